"""Keeps the state of one partition: its schema, rows and groups, and the progress of each task.

It uses neither the content of the rows nor a clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...codecs import messages
from ...codecs.blocks import BlockLayout, RowSource
from ...codecs.integers import distinct
from ...codecs.schema import Field, Kind, Schema
from ..errors import AlreadyWritten, DuplicateKeys, KeysNotFound, SchemaMismatch
from ..meta import POSITION, BlockRef, KVBatchMeta, tag_type
from ..partition_rows import PartitionRows
from .ready import ReadyView
from .rows import ROW_BITS, UNKNOWN, UNWRITTEN, GroupTable, Numbers, RowTable, pick
from .samplers import TaskConfig
from .task_cursor import DONE, TaskCursor

# ---------------- Rows of a put form groups by names that the caller gives, or by row keys up to their last dot.


@dataclass(frozen=True, slots=True)
class Grouping:
    """Assigns the rows of one put to groups, such as all samples of one prompt."""

    names: Sequence[str]
    """Names of the G groups, without repeats, in order of appearance."""
    index: np.ndarray
    """Group of each row, int64 `[N]`, as an index into `names`."""
    given: bool
    """True when the caller named the groups, False when the names were taken from the keys."""

    @staticmethod
    def of(keys: Sequence[str], groups: Sequence[str] | None) -> Grouping:
        """Group rows by the names in `groups`. With None, a row's group is the part of its key before the last ".", or
        the whole key if there is no such part."""
        if groups is None:
            heads, names = _stem_runs(keys)
        else:
            column = np.array(groups, dtype=object)
            heads = np.ones(len(column), dtype=bool)
            heads[1:] = column[1:] != column[:-1]
            names = column[heads].tolist()
        index = np.cumsum(heads) - 1
        distinct_names = list(dict.fromkeys(names))
        if len(distinct_names) < len(names):  # a group's rows do not all follow one another
            number = dict(zip(distinct_names, range(len(distinct_names)), strict=True))
            index = np.array([number[name] for name in names], dtype=np.int64)[index]
        return Grouping(distinct_names, index, groups is not None)


def _stem_runs(keys: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Find the runs of consecutive keys with the same stem, which is the part of a key before the last ".".

    Returns a bool array `[N]` that is True where a run begins, and the stem of each run. A plain loop takes 0.12 us per
    key, half the time that numpy needs on the keys' bytes.
    """
    first: list[int] = []
    names: list[str] = []
    before = None
    for number, key in enumerate(keys):
        stem = key.rpartition(".")[0] or key  # ".3" has no stem: it is one
        if stem != before:
            first.append(number)
            names.append(stem)
            before = stem
    heads = np.zeros(len(keys), dtype=bool)
    heads[first] = True
    return heads, names


@dataclass(frozen=True, slots=True)
class ClaimRows:
    """Describes the rows that a claim asks for, on behalf of one task (consumer)."""

    partition: str
    task: str
    fields: tuple[str, ...]
    num_rows: int
    whole_groups: bool = False
    min_version: int | None = None
    """Lowest policy version to take. Rows with a lower version, and groups that contain one, are skipped. None takes
    all versions."""
    max_version: int | None = None
    """Highest policy version to take. Rows with a higher version, and groups that contain one, are skipped until a
    claim allows them. None takes all versions."""
    at_least: int | None = None
    """Smallest number of rows with which the claim is content, at most `num_rows`. None stands for `num_rows`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments for the task's sampler, as plain values."""

    @property
    def least(self) -> int:
        """Smallest number of rows with which the claim is content."""
        return self.num_rows if self.at_least is None else self.at_least

    @property
    def wanted(self) -> str:
        """Description of the number of rows, for error messages, such as "8 rows" or "1 to 8 rows in whole groups"."""
        count = str(self.num_rows) if self.least == self.num_rows else f"{self.least} to {self.num_rows}"
        return f"{count} {'rows in whole groups' if self.whole_groups else 'rows'}"


@dataclass(frozen=True, slots=True)
class PutRows:
    """Describes the rows and blocks of one put, without the content of the rows."""

    partition: str
    keys: Sequence[str]
    """Keys (ids) of the N rows."""
    fields: tuple[str, ...]
    lengths: np.ndarray | None
    """Number of tokens of each row, int64 `[N]`; None when no field is PER_TOKEN."""
    versions: np.ndarray | None
    """Policy version of each row, int64 `[N]`. With None, new rows get -1 and existing rows keep their version."""
    groups: Grouping
    tags: Mapping[str, np.ndarray]
    layouts: tuple[BlockLayout, ...]
    """Layout of each block. The blocks hold the rows in the order of `keys`."""
    replace: bool
    writer: str
    schema_id: int
    """Digest of the schema with which the blocks were encoded, as the function `schema_id` returns it."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that the blocks take in the store, including the padding between their parts."""
        return sum(layout.nbytes for layout in self.layouts)

    @property
    def value_bytes(self) -> int:
        """Number of bytes of the blocks' values, indexes and headers, without padding."""
        return sum(sum(layout.part_bytes) for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class Committed:
    """Values that the directory adds to the writer's `PutRows` when it commits a put. Both together make a receipt
    (the keys and locations of the rows)."""

    first_block_id: int
    locations: tuple[bytes, ...]
    lengths: np.ndarray | None
    """Number of tokens of each row, int64 `[N]`, 0 for rows without tokens; None when `PutRows` has the lengths."""
    versions: np.ndarray | None
    """Version of each row, int64 `[N]`; None when `PutRows` has the versions."""
    groups: np.ndarray
    """Id of each row's group, int64 `[N]`, unique in the directory."""
    tags: dict[str, np.ndarray]
    """Values of the tags (named numbers or texts, one for each committed row) that every one of these rows already had
    from earlier puts: tag name -> values."""

    def receipt(self, put: PutRows, schema: Schema, plane_id: int) -> KVBatchMeta:
        """Build the put's receipt (the keys and locations of its rows), with which only the fields of this put can be
        read."""
        lengths = put.lengths if self.lengths is None else self.lengths
        versions = put.versions if self.versions is None else self.versions
        assert lengths is not None and versions is not None
        rows = np.array([layout.num_rows for layout in put.layouts])
        first = np.repeat(np.cumsum(rows) - rows, rows)
        start = np.zeros(len(first), dtype=np.int64)
        if put.lengths is not None:
            start = np.cumsum(put.lengths) - put.lengths
            start -= start[first]
        block = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        row = (np.arange(len(first)) - first).astype(np.int32)
        ids = range(self.first_block_id, self.first_block_id + len(rows))
        return KVBatchMeta(
            put.partition,
            tuple(put.keys),
            put.fields,
            lengths,
            versions,
            self.groups,
            {**self.tags, **put.tags},
            tuple(BlockRef(*item) for item in zip(ids, self.locations, put.layouts, strict=True)),
            (RowSource(put.fields, block, row, start),),
            schema=schema,
            plane_id=plane_id,
        )


def schema_id(schema: Schema) -> int:
    """Return a digest of a schema (CRC-32). It reveals a writer that still uses the schema of an earlier partition of
    the same name."""
    return zlib.crc32(messages.encode(schema))


@dataclass(frozen=True, slots=True)
class TaskState:
    """Describes one task (consumer) of a partition and its progress, for `Partition.restore`."""

    config: TaskConfig
    done: bytes
    """One bit for each row, in order of arrival: 1 if the task has finished the row. Leased rows count as not
    finished."""
    first_prompt: int | None
    """Lowest position in the prompt stream that is not settled; None for samplers that do not follow the prompts."""
    settled: tuple[int, ...]
    """Settled positions after `first_prompt`."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Describes a partition without its rows, for `Directory.restore`."""

    schema: Schema
    group_size: int
    tasks: tuple[TaskState, ...]


class Partition:
    """Holds the rows and groups of one partition (a named flow of data), and the progress of each of its tasks."""

    def __init__(
        self, name: str, schema: Schema, tasks: Sequence[TaskConfig], group_size: int, samplers: Collection[str]
    ) -> None:
        """Raise ValueError for a task whose sampler cannot be built. samplers: import paths of the samplers that are
        not built in."""
        self.name = name
        self.schema = schema
        self._schemas = {schema_id(schema): schema}
        """The schema and its earlier states, which lack fields that were added later, by their digest."""
        self.rows = RowTable(schema)
        self.groups = GroupTable(group_size)
        self._samplers = samplers
        self.tasks: dict[str, TaskCursor] = {}
        self.add_tasks(tasks)
        self._registered = frozenset(self.tasks)
        """Names of the tasks with which the partition was registered."""
        self._token_fields = [field.name for field in schema.values() if field.kind is Kind.PER_TOKEN]

    def add_tasks(self, tasks: Sequence[TaskConfig]) -> None:
        """Add tasks with names that the partition does not have yet. Raises ValueError for a task whose sampler cannot
        be built; no task is added then."""
        cursors = {task.name: TaskCursor(task, self.name, self.rows, self.groups, self._samplers) for task in tasks}
        for cursor in cursors.values():
            cursor.grow()
        self.tasks |= cursors

    def declared(self, names: Iterable[str]) -> list[TaskConfig]:
        """Return the settings of the tasks that a repeated registration which names `names` must declare. These are the
        tasks of the first registration, and those of `names` that were added since."""
        wanted = self._registered.union(names)
        return [cursor.config for name, cursor in self.tasks.items() if name in wanted]

    # -------------------------------------------------------------- reading

    def cursor(self, task: str) -> TaskCursor:
        """Return the progress of a task. Raises ValueError for an unknown task."""
        cursor = self.tasks.get(task)
        if cursor is None:
            raise ValueError(f"task {task!r}: partition {self.name!r} has {sorted(self.tasks)}, expected one of them")
        return cursor

    def view(self, task: str, fields: tuple[str, ...], whole_groups: bool) -> ReadyView:
        """Return the index of the rows, or whole groups, that `task` can claim with all of `fields`. It is kept up to
        date from now on.

        Raises ValueError for an unknown task, for whole groups in a partition with group_size 1, and for single rows
        when the task's sampler takes only whole groups. Raises SchemaMismatch for invalid fields.
        """
        cursor = self.cursor(task)
        self.check_fields(fields)
        if whole_groups and self.groups.group_size == 1:
            raise ValueError(f"whole_groups: partition {self.name!r} was registered with group_size=1, expected more")
        return cursor.view(fields, whole_groups)

    def shortage(self, claim: ClaimRows, view: ReadyView) -> str:
        """Return the message of a ClaimTimeout, which says how many rows are ready and why the others are not."""
        task = self.tasks[claim.task]
        lacking = {name: len(self.rows) - self.rows.num_written[name] for name in claim.fields}
        reasons = [f"{count} lack field {name!r}" for name, count in lacking.items() if count]
        counts = (
            (task.num_leased, "leased"),
            (task.num_done, "done"),
            (view.num_stale, f"older than min_version={claim.min_version}"),
            (view.num_too_new, f"newer than max_version={claim.max_version}"),
        )
        reasons += [f"{count} {what}" for count, what in counts if count]
        text = f"task {claim.task!r} waited for fields {list(claim.fields)} of {claim.wanted}"
        text += f"; {view.num_ready} of the partition's {len(self.rows)} rows are ready"
        text += "".join(f", {reason}" for reason in reasons) + task.waits_for(enough=view.num_ready >= claim.least)
        if claim.whole_groups and len(self.groups.index) == len(self.rows) >= claim.least:
            text += (
                f"; the rows are in {len(self.rows)} groups of 1 row each; name groups by put(groups=...) or by keys "
                "`{prompt}.{sample}`"
            )
        return text

    def find(self, keys: Sequence[str], op: str) -> np.ndarray:
        """Return the row number of each key, int64 `[N]`. Raises KeysNotFound naming the keys that are not in the
        partition."""
        rows = self.rows.find(keys)
        if (rows < 0).any():
            missing = pick(keys, np.flatnonzero(rows < 0))
            raise KeysNotFound(
                f"{len(missing)} of {len(keys)} keys not found", op=op, partition=self.name, keys=missing
            )
        return rows

    def listing(self, rows: np.ndarray) -> PartitionRows:
        """Return what the partition knows of `rows`, without the content of their fields."""
        table, groups = self.rows, self.rows.groups[rows]
        tagged = {name: given[rows] for name, given in table.tag_given.items() if given[rows].any()}
        return PartitionRows(
            self.name,
            table.keys[rows],
            np.maximum(table.lengths[rows], 0).astype(np.int64),
            table.versions[rows],
            self.groups.numbers[groups],
            self.groups.names[groups],
            {name: table.tag_of(name, rows) for name in tagged},
            tagged,
            {name: slots[rows] != UNWRITTEN for name, slots in table.slots.items()},
        )

    def by_fields(self, rows: np.ndarray) -> list[tuple[tuple[str, ...], np.ndarray]]:
        """Divide rows by the fields that are written in them. Returns (fields, the rows that have just these) for each
        set of fields that occurs, with the rows in the given order."""
        parts: list[tuple[tuple[str, ...], np.ndarray]] = [((), rows)]
        for name, slots in self.rows.slots.items():
            divided = []
            for fields, some in parts:
                has = slots[some] != UNWRITTEN
                divided += [((*fields, name), some[has]), (fields, some[~has])]
            parts = [(fields, some) for fields, some in divided if len(some)]
        return parts

    def state(self) -> PartitionState:
        """Return the partition's definition and the progress of its tasks."""
        rows = self.rows.live()
        tasks = []
        for cursor in self.tasks.values():
            done = np.packbits(cursor.column[rows] == DONE).tobytes()
            first, ahead = (None, ()) if cursor.progress is None else (cursor.progress.first, cursor.progress.ahead)
            tasks.append(TaskState(cursor.config, done, first, tuple(sorted(ahead))))
        return PartitionState(self.schema, self.groups.group_size, tuple(tasks))

    def check_fields(self, fields: Sequence[str]) -> None:
        """Raise SchemaMismatch unless `fields` is a list of one or more declared fields without repeats."""
        unknown = [name for name in fields if name not in self.schema]
        if unknown or not fields or len(set(fields)) < len(fields):
            raise SchemaMismatch(
                f"fields {list(fields)}: expected one or more of {list(self.schema)}, each once", partition=self.name
            )

    def knows(self, schema: Schema) -> bool:
        """Return whether `schema` is the partition's schema, or was before fields were added to it."""
        return schema in self._schemas.values()

    # -------------------------------------------------------------- writing

    def add_fields(self, fields: Sequence[Field]) -> None:
        """Extend the schema by the fields that it does not have yet; no row has a value of them. Writers that know an
        earlier state of the schema may still put.

        Raises ValueError for a field that is declared in another way already; no field is added then.
        """
        added = Schema(fields)
        for addition in added.values():
            known = self.schema.get(addition.name)
            if known is not None and known != addition:
                raise ValueError(f"add_fields {self.name!r}: got {addition}, but the partition has {known}")
        new = [addition for addition in added.values() if addition.name not in self.schema]
        if not new:
            return
        self.schema = Schema([*self.schema.values(), *new])
        self._schemas[schema_id(self.schema)] = self.schema
        self._token_fields += [addition.name for addition in new if addition.kind is Kind.PER_TOKEN]
        self.rows.add_fields(addition.name for addition in new)

    def check_put(self, put: PutRows) -> np.ndarray:
        """Check a put against the partition. Returns the row number of each key, int64 `[N]`, -1 for new keys.

        Raises DuplicateKeys when a key occurs twice, AlreadyWritten when a field is already written and `replace` is
        False, and SchemaMismatch when the put does not fit the schema or the existing rows' lengths, versions, groups
        or tags.
        """
        check_distinct(put.keys, self.name)
        self.check_fields(put.fields)
        if put.schema_id not in self._schemas:
            raise self._mismatch("the writer knows another schema: the partition was registered anew", put.keys)
        if sum(layout.num_rows for layout in put.layouts) != len(put.keys):
            raise self._mismatch(f"blocks of {[at.num_rows for at in put.layouts]} rows", put.keys)
        self._check_groups(put)
        rows = self.rows.find(put.keys)
        old = np.flatnonzero(rows >= 0)
        if not put.replace:
            for name in put.fields:
                written = old[self.rows.slots[name][rows[old]] != UNWRITTEN]
                if len(written):
                    message = f"field {name!r} is written already; replace=True writes it anew"
                    raise AlreadyWritten(message, op="put", partition=self.name, keys=pick(put.keys, written))
        self._check_lengths(put, rows, old)
        self._check_identity(put, rows, old)
        self._check_tags("put", put.keys, put.tags)
        return rows

    def _check_tags(self, op: str, keys: Sequence[str], tags: Mapping[str, np.ndarray]) -> None:
        """Raise SchemaMismatch for a tag whose values have another type than before, and for positions in the prompt
        stream that are not integers. op, keys: context for the error."""
        for name, values in tags.items():
            got, column = tag_type(values.dtype), self.rows.tags.get(name)
            if name == POSITION and values.dtype.kind not in "iu":
                message = f"tag {name!r}: got {got}, expected integers"
            elif column is not None and column.dtype != values.dtype:
                message = f"tag {name!r}: got {got}, expected {tag_type(column.dtype)} as before"
            else:
                continue
            raise SchemaMismatch(message, op=op, partition=self.name, keys=keys)

    def _check_groups(self, put: PutRows) -> None:
        """Raise SchemaMismatch unless the put assigns each of its rows to one of its groups."""
        index, count = put.groups.index, len(put.groups.names)
        if index.dtype.kind not in "iu" or index.shape != (len(put.keys),):
            message = (
                f"groups: got {index.dtype} {list(index.shape)}, expected an integer for each of {len(put.keys)} rows"
            )
            raise self._mismatch(message, put.keys)
        if len(index) and not 0 <= index.min() <= index.max() < count:
            raise self._mismatch(f"groups: got {index.min()} to {index.max()} of {count} groups", put.keys)

    def _check_lengths(self, put: PutRows, rows: np.ndarray, old: np.ndarray) -> None:
        """Raise SchemaMismatch for a row whose length differs from that of its PER_TOKEN fields written earlier. A put
        with `replace` may change the length if it rewrites all of these fields."""
        if put.lengths is None:
            return
        known = self.rows.lengths[rows[old]]
        differ = (known != UNKNOWN) & (known != put.lengths[old])
        if put.replace and differ.any():
            kept = [name for name in self._token_fields if name not in put.fields]
            stays = np.zeros(len(old), dtype=bool)
            for name in kept:
                stays |= self.rows.slots[name][rows[old]] != UNWRITTEN
            differ &= stays
        if differ.any():
            i = int(old[differ][0])
            expected = self.rows.lengths[rows[i]]
            message = f"got {put.lengths[i]} tokens for {put.keys[i]!r}, expected {expected} as in its other fields"
            raise self._mismatch(message, pick(put.keys, old[differ]))

    def _check_identity(self, put: PutRows, rows: np.ndarray, old: np.ndarray) -> None:
        """Raise SchemaMismatch if a put gives an existing row another group or (without `replace`) another version, or
        if it makes a group larger than group_size."""
        if put.versions is not None and not put.replace:
            differ = old[self.rows.versions[rows[old]] != put.versions[old]]
            if len(differ):
                message = f"version {put.versions[differ[0]]}, but the row has {self.rows.versions[rows[differ[0]]]}"
                raise self._mismatch(message, pick(put.keys, differ))
        if put.groups.given and len(old):
            known = self.groups.names[self.rows.groups[rows[old]]]
            differ = old[np.array(put.groups.names, dtype=object)[put.groups.index[old]] != known]
            if len(differ):
                given = put.groups.names[int(put.groups.index[differ[0]])]
                message = f"group {given!r}, but the row belongs to another"
                raise self._mismatch(message, pick(put.keys, differ))
        if len(old) < len(rows):
            names, index = put.groups.names, put.groups.index[rows < 0]
            full = self.groups.overfull(names, np.bincount(index, minlength=len(names)))
            if full is not None:
                raise self._mismatch(
                    f"group {full!r} would hold more than group_size={self.groups.group_size} rows", put.keys
                )

    def write(self, put: PutRows, rows: np.ndarray, block_ids: Sequence[int], numbering: Numbers) -> np.ndarray:
        """Record the rows of a put that has passed `check_put`, which makes them readable.

        rows: the result of `check_put`, in which the numbers of new rows are filled in. Returns the slots (numbers that
        locate a value by block and row) that the fields of the put had before, int64 `[fields, N]`, UNWRITTEN where
        there was no value.
        """
        new = np.flatnonzero(rows < 0)
        if len(new):
            index = put.groups.index[new]
            used = distinct(index)
            indices = np.empty(len(put.groups.names), dtype=np.int64)
            indices[used] = self.groups.intern(pick(put.groups.names, used), numbering)
            groups = indices[index]
            rows[new] = self.rows.add(pick(put.keys, new), groups)
            self.groups.add(rows[new], groups)
        for cursor in self.tasks.values():
            cursor.grow()
        sizes = [layout.num_rows for layout in put.layouts]
        slots = np.concatenate([(block << ROW_BITS) + np.arange(n) for block, n in zip(block_ids, sizes, strict=True)])
        replaced = np.stack([self.rows.slots[name][rows] for name in put.fields])
        for name, before in zip(put.fields, replaced, strict=True):
            self.rows.slots[name][rows] = slots
            self.rows.num_written[name] += int((before == UNWRITTEN).sum())
        if put.lengths is not None:
            self.rows.lengths[rows] = put.lengths
        if put.versions is not None:
            self.rows.versions[rows] = put.versions
        for name, values in put.tags.items():
            self.rows.set_tag(name, rows, values)
        for cursor in self.tasks.values():
            cursor.refresh(rows, requeue=put.replace)
        return replaced

    def restore(self, rows: PartitionRows, tasks: Sequence[TaskState], numbering: Numbers) -> None:
        """Add the rows of a saved partition, without any written field, and the progress of its tasks. The partition
        must be new. Raises DuplicateKeys for a key that occurs twice, and SchemaMismatch for a group of more than
        group_size rows."""
        keys: list[str] = rows.keys.tolist()
        check_distinct(keys, self.name, "load")
        grouping = Grouping.of(keys, rows.group_names.tolist())
        if self.groups.overfull(grouping.names, np.bincount(grouping.index)) is not None:
            message = f"a group holds more than group_size={self.groups.group_size} rows"
            raise SchemaMismatch(message, op="load", partition=self.name)
        groups = self.groups.intern(grouping.names, numbering)[grouping.index]
        numbers = self.rows.add(keys, groups)
        self.groups.add(numbers, groups)
        self.rows.versions[numbers] = rows.versions
        for name, given in rows.tagged.items():
            self.rows.set_tag(name, numbers[given], rows.tags[name][given])
        for task in tasks:
            cursor = self.tasks[task.config.name]
            cursor.grow()
            done = np.unpackbits(np.frombuffer(task.done, np.uint8), count=len(keys)).astype(bool)
            cursor.set(numbers[done], DONE)
            if cursor.progress is not None and task.first_prompt is not None:
                cursor.progress.first = task.first_prompt
                cursor.progress.ahead = set(task.settled)

    def tag(self, keys: Sequence[str], tags: Mapping[str, np.ndarray]) -> None:
        """Set tags of existing rows: for each tag, a value for each key. Raises DuplicateKeys, KeysNotFound, and
        SchemaMismatch for values of another type than before; no tag is changed then."""
        check_distinct(keys, self.name, "tag")
        rows = self.find(keys, "tag")
        self._check_tags("tag", keys, tags)
        for name, values in tags.items():
            self.rows.set_tag(name, rows, values)
        if POSITION in tags:  # by which views may be sorted
            for cursor in self.tasks.values():
                cursor.refresh(rows, requeue=True)

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forget rows, given without repeats. Returns the slots (numbers that locate a value by block and row) of all
        their fields, and the ids of the leases that held the rows; an id occurs once for each row."""
        slots = np.stack([column[rows] for column in self.rows.slots.values()])
        for name, before in zip(self.rows.slots, slots, strict=True):
            self.rows.slots[name][rows] = UNWRITTEN
            self.rows.num_written[name] -= int((before != UNWRITTEN).sum())
        leases = [np.empty(0, dtype=np.int64)]
        leases += [cursor.forget(rows) for cursor in self.tasks.values()]
        self.groups.remove(rows, self.rows.groups[rows])
        self.rows.remove(rows)
        return slots, np.concatenate(leases)

    def withdraw(self, rows: np.ndarray, first_block_id: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Undo a put: mark the fields of `rows` (given without repeats) that are stored in its blocks as unwritten, and
        forget the rows that have no other field.

        Returns the slots (numbers that locate a value by block and row) of the undone values, and the ids of the leases
        that held forgotten rows; an id occurs once for each row.
        """
        slots = np.stack([column[rows] for column in self.rows.slots.values()])
        blocks = slots >> ROW_BITS
        mine = (blocks >= first_block_id) & (blocks < first_block_id + num_blocks)
        for name, own in zip(self.rows.slots, mine, strict=True):
            self.rows.slots[name][rows[own]] = UNWRITTEN
            self.rows.num_written[name] -= int(own.sum())
        tokens = [name in self._token_fields for name in self.rows.slots]
        left = (slots != UNWRITTEN) & ~mine
        self.rows.lengths[rows[mine.any(axis=0) & ~left[tokens].any(axis=0)]] = UNKNOWN
        touched, kept = mine.any(axis=0), left.any(axis=0)
        for cursor in self.tasks.values():
            cursor.refresh(rows[touched & kept])
        return slots[mine], self.remove(rows[touched & ~kept])[1]

    def _mismatch(self, message: str, keys: Sequence[str]) -> SchemaMismatch:
        return SchemaMismatch(message, op="put", partition=self.name, keys=keys)


def check_distinct(keys: Sequence[str], partition: str, op: str = "put") -> None:
    """Raise DuplicateKeys if a key occurs more than once. The error names these keys."""
    if len(set(keys)) < len(keys):
        seen: set[str] = set()
        twice = [key for key in keys if key in seen or seen.add(key)]
        raise DuplicateKeys(f"keys occur twice in one {op}", op=op, partition=partition, keys=twice)
