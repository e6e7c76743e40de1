"""Keeps the state of one partition: its schema, rows and groups, and the progress of each task.

It uses neither the content of the rows nor a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...codecs.integers import distinct
from ...codecs.schema import Field, Kind, Schema
from ..blobs.row_references import RowReferences
from ..errors import AlreadyWritten, BlobsMissing, FieldsNotReady, KeysNotFound, SchemaMismatch, StoreLost
from ..meta import POSITION, tag_type
from ..status import PartitionRows
from .calls import ClaimRows, Grouping, PutRows, check_distinct, schema_id
from .ready import ReadyView
from .rows import LOST, MOST_REMEMBERED, ROW_BITS, UNKNOWN, UNWRITTEN, GroupTable, Numbers, RowTable, pick
from .samplers import TaskConfig
from .task_cursor import DONE, TaskCursor


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
    notes: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Numbers that the task's sampler has noted, one for each row, int64 `[N]`, in order of arrival; 0 for no note. The
    array is empty if the sampler has noted nothing, and in files of versions that did not save notes."""


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Describes a partition without its rows, for `Directory.restore`."""

    schema: Schema
    group_size: int
    tasks: tuple[TaskState, ...]


class Partition:
    """Holds the rows and groups of one partition (a named set of rows), and the progress of each of its tasks."""

    def __init__(
        self, name: str, schema: Schema, tasks: Sequence[TaskConfig], group_size: int, samplers: Collection[str]
    ) -> None:
        """Raise ValueError for a task whose sampler cannot be built. samplers: import paths of the samplers that are
        not built in."""
        self.name = name
        self.schema = schema
        self.schemas = {schema_id(schema): schema}
        """The schema and its earlier states, which lack fields that were added later, by their digest."""
        self.rows = RowTable(schema)
        self.groups = GroupTable(group_size)
        self._samplers = samplers
        self.tasks: dict[str, TaskCursor] = {}
        self.add_tasks(tasks)
        self.registered = frozenset(self.tasks)
        """Names of the tasks with which the partition was registered."""
        self.blobs: dict[str, Partition] = {}
        """For each field with blobs, the partition that holds them."""
        self.references: dict[str, RowReferences] = {}
        """For each field with blobs, what the rows refer to."""
        self.died: list[str] = []
        """Names of the store's processes with which rows of this partition were lost."""
        self._checked: set[tuple[str, ...]] = set()
        """Sets of fields that have passed `check_fields`. Most requests name one of a few."""
        self._token_fields = [field.name for field in schema.values() if field.kind is Kind.PER_TOKEN]

    def add_tasks(self, tasks: Sequence[TaskConfig]) -> None:
        """Add tasks with names that the partition does not have yet. Raises ValueError for a task whose sampler cannot
        be built; no task is added then."""
        cursors = {task.name: TaskCursor(task, self.name, self.rows, self.groups, self._samplers) for task in tasks}
        for cursor in cursors.values():
            cursor.grow()
        self.tasks |= cursors

    def declared(self, names: Iterable[str]) -> list[TaskConfig]:
        """Return the settings that a repeated registration with the tasks `names` must declare. These are the tasks of
        the first registration, and those of `names` that were added since."""
        wanted = self.registered.union(names)
        return [cursor.config for name, cursor in self.tasks.items() if name in wanted]

    # ---------------- These methods read.

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

    def view_for(self, claim: ClaimRows) -> ReadyView:
        """Return the index of the rows that a claim can take. Raises the errors of `view`, and ValueError for any other
        invalid argument of the claim."""
        view = self.view(claim.task, claim.fields, claim.whole_groups)
        multiple = self.groups.group_size if claim.whole_groups else 1
        if claim.num_rows < 1 or claim.num_rows % multiple:
            raise ValueError(f"claim: got n={claim.num_rows}, expected a positive multiple of {multiple}")
        if not 1 <= claim.least <= claim.num_rows or claim.least % multiple:
            raise ValueError(
                f"claim: got at_least={claim.at_least}, expected a multiple of {multiple} from {multiple} to n, which "
                f"is {claim.num_rows}"
            )
        self.cursor(claim.task).check_arguments(claim.arguments)
        low, high = claim.min_version, claim.max_version
        if low is not None and high is not None and low > high:
            raise ValueError(f"claim: got min_version={low}, expected at most max_version={high}")
        return view

    def shortage(self, claim: ClaimRows, view: ReadyView) -> str:
        """Return the message of a ClaimTimeout. It says how many rows are ready and why the other rows are not."""
        task = self.tasks[claim.task]
        lacking = {name: len(self.rows) - self.rows.num_written[name] for name in claim.fields}
        reasons = [f"{count} lack field {name!r}" for name, count in lacking.items() if count]
        counts = (
            (self.num_lost, "lost with a process of the store"),
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

    @property
    def num_lost(self) -> int:
        """Number of rows that have lost a value with the process that held it, and have not been put again."""
        return int(self.rows.lost(self.rows.live()).sum()) if self.rows.any_lost else 0

    def lost_groups(self) -> np.ndarray:
        """Return the numbers of the rows of all groups in which a row has lost a value, in order of arrival, int64."""
        rows = self.rows.live()
        groups = self.rows.groups[rows]
        return rows[np.isin(groups, groups[self.rows.lost(rows)])]

    def find(self, keys: Sequence[str], op: str) -> np.ndarray:
        """Return the row number of each key, int64 `[N]`. Raises KeysNotFound naming the keys that are not in the
        partition."""
        rows = self.rows.find(keys)
        gone = (rows < 0).nonzero()[0]
        if len(gone):
            missing = pick(keys, gone)
            raise KeysNotFound(
                f"{len(missing)} of {len(keys)} keys not found", op=op, partition=self.name, keys=missing
            )
        return rows

    def readable(self, keys: Sequence[str], fields: Sequence[str] | None) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return the row number of each key, int64 `[N]`, and which of `fields` are written for all of these rows.
        `fields` None stands for all fields. Raises the errors of `Directory.lookup`."""
        if fields is not None:
            self.check_fields(fields)
        rows = self.find(keys, "lookup")
        if fields is None:
            fields = [name for name in self.schema if self.rows.written(rows, (name,)).all()]
            if not fields:
                self._check_lost(keys, rows, self.schema)
                raise FieldsNotReady(
                    "no field is written for all the keys", op="lookup", partition=self.name, keys=keys
                )
        self._check_lost(keys, rows, fields)
        for name in fields:
            ready = self.rows.written(rows, (name,))
            if not ready.all():
                missing = pick(keys, np.flatnonzero(~ready))
                message = f"field {name!r} is not written for {len(missing)} of {len(keys)} keys"
                raise FieldsNotReady(message, op="lookup", partition=self.name, keys=missing)
        return rows, tuple(fields)

    def _check_lost(self, keys: Sequence[str], rows: np.ndarray, fields: Iterable[str]) -> None:
        """Raise StoreLost naming the keys of the rows that have lost one of the fields with its process."""
        lost = self.rows.lost(rows, fields)
        if lost.any():
            gone = pick(keys, np.flatnonzero(lost))
            message = (
                f"{len(gone)} of {len(keys)} rows were lost with a process of the store that has died; clear them, or "
                "put their fields again"
            )
            raise StoreLost(message, op="lookup", partition=self.name, keys=gone, peer=" and ".join(self.died))

    def absent(self, keys: Sequence[str], fields: Sequence[str] | None) -> tuple[list[str], dict[str, list[str]]]:
        """Return the keys that do not exist, and for each field the existing keys without it. See
        `Directory.absent`."""
        if fields is not None:
            self.check_fields(fields)
        rows = self.rows.find(keys)
        there = np.flatnonzero(rows >= 0)
        unwritten: dict[str, list[str]] = {}
        for name in fields or ():
            lacking = there[~self.rows.written(rows[there], (name,))]
            if len(lacking):
                unwritten[name] = list(pick(keys, lacking))
        return list(pick(keys, np.flatnonzero(rows < 0))), unwritten

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
            {name: slots[rows] >= 0 for name, slots in table.slots.items()},
            table.lost(rows),
        )

    def by_fields(self, rows: np.ndarray) -> list[tuple[tuple[str, ...], np.ndarray]]:
        """Divide rows by the fields that are written in them. Returns (fields, rows with exactly these fields) for each
        set of fields that occurs, with the rows in the given order."""
        parts: list[tuple[tuple[str, ...], np.ndarray]] = [((), rows)]
        for name, slots in self.rows.slots.items():
            divided = []
            for fields, some in parts:
                has = slots[some] >= 0
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
            tasks.append(TaskState(cursor.config, done, first, tuple(sorted(ahead)), cursor.notes_of(rows)))
        return PartitionState(self.schema, self.groups.group_size, tuple(tasks))

    def check_fields(self, fields: Sequence[str]) -> None:
        """Raise SchemaMismatch unless `fields` is a list of one or more declared fields without repeats."""
        if (named := tuple(fields)) in self._checked:
            return
        unknown = [name for name in fields if name not in self.schema]
        if unknown or not fields or len(set(fields)) < len(fields):
            raise SchemaMismatch(
                f"fields: got {list(fields)}, expected one or more of {list(self.schema)}, each once",
                partition=self.name,
            )
        if len(self._checked) < MOST_REMEMBERED:
            self._checked.add(named)

    def knows(self, schema: Schema) -> bool:
        """Return whether `schema` is the partition's schema, or an earlier state of it to which fields were added."""
        return schema in self.schemas.values()

    # ---------------- These methods write.

    def add_fields(self, fields: Sequence[Field]) -> None:
        """Extend the schema by the fields that it does not have yet; no row has a value of them. Writers that know an
        earlier state of the schema can still put.

        Raises ValueError for a field that is already declared differently; no field is added then.
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
        self.schemas[schema_id(self.schema)] = self.schema
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
        if put.schema_id not in self.schemas:
            raise self._mismatch("the writer uses an outdated schema: the partition was registered again", put.keys)
        if sum(layout.num_rows for layout in put.layouts) != len(put.keys):
            raise self._mismatch(
                f"got blocks of {[at.num_rows for at in put.layouts]} rows, expected one row per key", put.keys
            )
        self._check_groups(put)
        rows = self.rows.find(put.keys)
        old = (rows >= 0).nonzero()[0]
        if len(old):
            if not put.replace:
                self._check_unwritten(put, rows, old)
            self._check_lengths(put, rows, old)
            self._check_identity(put, rows, old)
        if len(old) < len(rows):
            self._check_new(put, rows)
        self._check_tags("put", put.keys, put.tags)
        self._check_blobs(put)
        return rows

    def _check_blobs(self, put: PutRows) -> None:
        """Raise BlobsMissing naming the blobs to which the rows refer that are neither stored nor in the put.

        Raises SchemaMismatch unless the put describes the references of all its fields with blobs.
        """
        expected = [name for name in put.fields if name in self.blobs]
        if sorted(expected) != sorted(refs.field for refs in put.blobs):
            raise self._mismatch(f"got the blobs of {[refs.field for refs in put.blobs]}, not {expected}", put.keys)
        for refs in put.blobs:
            used = np.bincount(refs.index, minlength=len(refs.names))
            whole = refs.counts.shape == (len(put.keys),) and refs.counts.sum() == len(refs.index)
            brought = len(refs.carried) == len(refs.layouts) and set(refs.carried) <= set(range(len(refs.names)))
            if len(used) > len(refs.names) or not (used.all() and whole and brought):
                raise self._mismatch(f"field {refs.field!r}: the references do not fit the blobs", put.keys)
            holder, there = self.blobs[refs.field], self.blobs[refs.field].rows.find(refs.names) >= 0
            there[list(refs.carried)] = True
            if not there.all():
                missing = pick(refs.names, np.flatnonzero(~there))
                message = f"field {refs.field!r}: {len(missing)} of {len(there)} blobs are not stored"
                raise BlobsMissing(message, op="put", partition=holder.name, keys=missing)

    def _check_unwritten(self, put: PutRows, rows: np.ndarray, old: np.ndarray) -> None:
        """Raise AlreadyWritten if one of the existing rows has a value of a field of the put."""
        for name in put.fields:
            written = old[self.rows.slots[name][rows[old]] >= 0]
            if len(written):
                message = f"field {name!r} is written already; replace=True overwrites it"
                raise AlreadyWritten(message, op="put", partition=self.name, keys=pick(put.keys, written))

    def _check_tags(self, op: str, keys: Sequence[str], tags: Mapping[str, np.ndarray]) -> None:
        """Raise SchemaMismatch for a tag whose type changes, and for positions that are not integers. Positions are in
        the prompt stream. op, keys: context for the error."""
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
            raise self._mismatch(f"groups: got {index.min()} to {index.max()}, expected ids below {count}", put.keys)

    def _check_lengths(self, put: PutRows, rows: np.ndarray, old: np.ndarray) -> None:
        """Raise SchemaMismatch for a row whose length differs from that of its PER_TOKEN fields written earlier. A put
        with `replace` can change the length if it rewrites all of these fields."""
        if put.lengths is None:
            return
        known = self.rows.lengths[rows[old]]
        differ = (known != UNKNOWN) & (known != put.lengths[old])
        if put.replace and differ.any():
            kept = [name for name in self._token_fields if name not in put.fields]
            stays = np.zeros(len(old), dtype=bool)
            for name in kept:
                stays |= self.rows.slots[name][rows[old]] >= 0
            differ &= stays
        if differ.any():
            i = int(old[differ][0])
            expected = self.rows.lengths[rows[i]]
            message = f"got {put.lengths[i]} tokens for {put.keys[i]!r}, expected {expected} as in its other fields"
            raise self._mismatch(message, pick(put.keys, old[differ]))

    def _check_identity(self, put: PutRows, rows: np.ndarray, old: np.ndarray) -> None:
        """Raise SchemaMismatch if a put gives an existing row another group or, without `replace`, another version."""
        if put.versions is not None and not put.replace:
            differ = old[self.rows.versions[rows[old]] != put.versions[old]]
            if len(differ):
                message = f"version {put.versions[differ[0]]}, but the row has {self.rows.versions[rows[differ[0]]]}"
                raise self._mismatch(message, pick(put.keys, differ))
        if put.groups.given:
            known = self.groups.names[self.rows.groups[rows[old]]]
            differ = old[np.array(put.groups.names, dtype=object)[put.groups.index[old]] != known]
            if len(differ):
                given = put.groups.names[int(put.groups.index[differ[0]])]
                message = f"group {given!r}, but the row belongs to another"
                raise self._mismatch(message, pick(put.keys, differ))

    def _check_new(self, put: PutRows, rows: np.ndarray) -> None:
        """Raise SchemaMismatch if the new rows of a put make a group larger than group_size."""
        names, index = put.groups.names, put.groups.index[rows < 0]
        full = self.groups.overfull(names, np.bincount(index, minlength=len(names)))
        if full is not None:
            raise self._mismatch(
                f"group {full!r} would hold more than group_size={self.groups.group_size} rows", put.keys
            )

    def write(self, put: PutRows, rows: np.ndarray, block_ids: Sequence[int], numbering: Numbers) -> np.ndarray:
        """Record the rows of a put that has passed `check_put`, which makes them readable.

        rows: the result of `check_put`, in which the numbers of new rows are filled in. Returns the slots (numbers that
        locate a value by block and row) that the fields of the put had before, int64 `[fields, N]`, negative where
        there was no value.
        """
        new = (rows < 0).nonzero()[0]
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
        lines = self.rows.lines(put.fields)
        replaced = self.rows.table[lines, rows]
        self.rows.table[lines, rows] = slots
        self.rows.count_written(lines, replaced < 0)
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
        must be new. Raises DuplicateKeys for a key that occurs twice, SchemaMismatch for a group of more than
        group_size rows, and ValueError for notes that are not one number for each row."""
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
            cursor.restore_notes(numbers, task.notes)
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
        if POSITION in tags:  # Samplers can sort views by position.
            for cursor in self.tasks.values():
                cursor.refresh(rows, requeue=True)

    def free(self, rows: np.ndarray) -> np.ndarray:
        """Mark all fields of `rows`, given without repeats, as unwritten. The rows keep their tags and leases. Returns
        the slots (numbers that locate a value by block and row) of the fields."""
        slots = self._unwrite(rows)
        self.rows.lengths[rows] = UNKNOWN
        for cursor in self.tasks.values():
            cursor.refresh(rows)
        return slots

    def lose(self, block_ids: np.ndarray, holders: Iterable[str]) -> int:
        """Mark the values in blocks that are gone as lost. holders: names of the processes that held them, for errors.
        Returns the number of rows that have lost a value."""
        rows = self.rows.live()
        hit, tokens_left = np.zeros((2, len(rows)), dtype=bool)
        for name, column in self.rows.slots.items():
            slots = column[rows]
            gone = (slots >= 0) & np.isin(slots >> ROW_BITS, block_ids)
            column[rows[gone]] = LOST
            self.rows.num_written[name] -= int(gone.sum())
            hit |= gone
            if name in self._token_fields:
                tokens_left |= (slots >= 0) & ~gone
        if hit.any():
            self.rows.any_lost = True
            self.died += holders
        self.rows.lengths[rows[hit & ~tokens_left]] = UNKNOWN
        for cursor in self.tasks.values():
            cursor.refresh(rows[hit])
        return int(hit.sum())

    def lose_field(self, name: str, rows: np.ndarray, holders: Iterable[str]) -> np.ndarray:
        """Mark a field of rows as lost, because blobs to which it refers are gone. holders: as for `lose`. Returns the
        slots that the field had, negative where it had none."""
        column = self.rows.slots[name]
        slots = column[rows]
        column[rows] = LOST
        self.rows.num_written[name] -= int((slots >= 0).sum())
        if len(rows):
            self.rows.any_lost = True
            self.died += [one for one in holders if one not in self.died]
        for cursor in self.tasks.values():
            cursor.refresh(rows)
        return slots

    def _unwrite(self, rows: np.ndarray) -> np.ndarray:
        slots = self.rows.table[:, rows]
        self.rows.table[:, rows] = UNWRITTEN
        self.rows.count_written(self.rows.lines(tuple(self.rows.slots)), np.negative(slots >= 0, dtype=np.int64))
        return slots

    def remove(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forget rows, given without repeats. Returns the slots (numbers that locate a value by block and row) of all
        their fields, and the ids of the leases that held the rows; an id occurs once for each row."""
        slots = self._unwrite(rows)
        leases = [cursor.forget(rows) for cursor in self.tasks.values()] or [np.empty(0, dtype=np.int64)]
        self.groups.remove(rows, self.rows.groups[rows])
        self.rows.remove(rows)
        return slots, np.concatenate(leases)

    def withdraw(self, rows: np.ndarray, first_block_id: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Undo a put: mark the fields of `rows` in its blocks as unwritten, and forget rows without another field.
        `rows` has no repeats.

        Returns the slots (numbers that locate a value by block and row) of the undone values, and the ids of the leases
        that held forgotten rows; an id occurs once for each row.
        """
        slots = self.rows.table[:, rows]
        blocks = slots >> ROW_BITS
        mine = (blocks >= first_block_id) & (blocks < first_block_id + num_blocks)
        for name, own in zip(self.rows.slots, mine, strict=True):
            self.rows.slots[name][rows[own]] = UNWRITTEN
            self.rows.num_written[name] -= int(own.sum())
        tokens = [name in self._token_fields for name in self.rows.slots]
        left = (slots >= 0) & ~mine
        self.rows.lengths[rows[mine.any(axis=0) & ~left[tokens].any(axis=0)]] = UNKNOWN
        touched, kept = mine.any(axis=0), left.any(axis=0)
        for cursor in self.tasks.values():
            cursor.refresh(rows[touched & kept])
        return slots[mine], self.remove(rows[touched & ~kept])[1]

    def _mismatch(self, message: str, keys: Sequence[str]) -> SchemaMismatch:
        return SchemaMismatch(message, op="put", partition=self.name, keys=keys)
