"""Keeps track of which rows exist, where their bytes are, and which client may read them next.

The module is pure and synchronous. The directory has no clock (`now` is passed in, as seconds of any monotonic clock)
and no store (it returns freed blocks for the caller to delete). It never waits (None means that something is not
possible now). Each operation happens in full or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ...codecs.integers import distinct
from ...codecs.schema import Field, Schema
from ..block_store import ANY_HOLDER, HasRooms, holder_of
from ..errors import CapacityExceeded, DataPlaneTimeout, LeaseLost
from ..meta import BlockRef, KVBatchMeta
from ..status import DataPlaneStatus, LeaseStatus, PartitionRows, TaskReset, TaskStatus
from .block_table import BlockTable, FreedBlock, Reservation
from .calls import ClaimRows, Committed, Expired, Grouping, Outcome, PutRows, check_lease_id, check_no_blobs
from .fences import check_fences
from .partition import Partition, PartitionState
from .partition_registry import PartitionRegistry
from .ready import ReadyView
from .receipts import committed_of, receipt_of, token_starts
from .rows import ROW_BITS, pick
from .samplers import TaskConfig
from .task_cursor import DONE, Lease, LeaseBook

Locate = Callable[[range, Sequence[int]], Sequence[bytes]]


class Directory:
    """Holds the partitions of one run, the blocks of data in its store, and the leases of rows to consumers."""

    def __init__(
        self,
        *,
        capacity_bytes: int,
        lease_s: float,
        reserve_s: float,
        plane_id: int = 0,
        samplers: Collection[str] = (),
        rooms: HasRooms | None = None,
    ) -> None:
        """capacity_bytes: capacity of each host in `rooms`, or of the store if None. plane_id: number of the data
        plane, which every receipt (the keys and locations of rows) contains. samplers: import paths of the samplers
        that tasks can name besides the built-in ones."""
        self._plane_id = plane_id
        self._lease_s = lease_s
        self._reserve_s = reserve_s
        self.blocks = BlockTable(capacity_bytes, rooms)
        self._puts_elsewhere = 0
        self._leases = LeaseBook()
        self._partitions = PartitionRegistry(samplers)
        self.request: tuple[str, bytes] = "", b""
        """Name and encoding of the request that is being answered; empty once it waits, and between requests."""
        self.repeats = False
        """Whether the replies to requests with effects are known when the requests are repeated."""
        self.first_space = 0
        """Lowest id of a reservation that this process can have made. Lower ones were made by a process that died."""

    # ---------------- These methods do something only in a directory whose process can be replaced.

    def flush(self) -> None:
        """Make the effects of all calls so far outlive this process."""

    def answered(self, request: bytes, reply: bytes) -> None:
        """Make the effects of all calls so far outlive this process, with the reply to the request that caused them.
        request: identity of the request, which its repetition names; b"" for none."""

    def earlier_reply(self, request: bytes) -> bytes | None:
        """Return the reply to a request that had effects, or None if it is unknown."""
        return None

    def served(self, payload: bytes) -> None:
        """Record that the store's host has carried out a request."""

    # ---------------- These methods manage partitions.

    def register(
        self,
        name: str,
        schema: Schema,
        tasks: Sequence[str | TaskConfig],
        group_size: int,
        *,
        redefine: bool = False,
    ) -> list[FreedBlock] | None:
        """Declare a partition. Repeating the call with equal arguments does nothing, even if fields and tasks were
        added since.

        tasks: consumers of the partition. A task given only by its name uses the default sampler, which takes the rows
        of the lowest policy version first. redefine: whether to replace a partition that is registered with other
        arguments. Its rows, leases and tasks are then forgotten. Returns the blocks to which no row refers any more if
        a partition was replaced, None otherwise.

        Raises ValueError for invalid arguments, for a sampler that cannot be built, and without `redefine` if the
        partition is already registered with other arguments; the error names the difference.
        """
        check_no_blobs("register", name)
        replaced = self._partitions.register(name, schema, tasks, group_size, redefine=redefine)
        return None if replaced is None else self._forget(replaced, replaced.rows.live())

    def add_tasks(self, name: str, tasks: Sequence[str | TaskConfig]) -> None:
        """Add tasks to a partition. They can claim all rows of the partition. A task that the partition already has
        with equal settings remains as it is.

        Raises ValueError for a task with other settings than the partition's task of the same name, for a name that
        occurs twice or is empty, and for a sampler that cannot be built; no task is added then.
        """
        self._partitions.add_tasks(name, tasks)

    def unregister(self, name: str) -> tuple[int, list[FreedBlock]]:
        """Forget a partition. Returns the number of rows that were in it, and the blocks to which no row refers any
        more."""
        check_no_blobs("unregister", name)
        part = self._partitions.remove(name)
        rows = part.rows.live()
        return len(rows), self._forget(part, rows)

    def has(self, partition: str) -> bool:
        return any(part.name == partition for part in self._partitions)

    def schema(self, partition: str) -> Schema:
        return self._partitions[partition].schema

    def add_fields(self, partition: str, fields: Sequence[Field]) -> Schema:
        """Extend a partition's schema by fields, and return the schema. Fields that it has already are ignored. Raises
        ValueError for a field that is already declared differently; no field is added then."""
        part = self._partitions[partition]
        check_no_blobs("add_fields", partition)
        part.add_fields(fields)
        self._partitions.add_blobs(part)
        return part.schema

    def export(self, partition: str) -> tuple[PartitionState, PartitionRows, list[KVBatchMeta]]:
        """Return what is needed to save a partition in its current state. This is its definition and its tasks'
        progress, its rows, and for each set of fields a receipt (keys and locations) of the rows that have exactly
        these fields written. In the list and in each receipt the rows are in order of arrival."""
        part = self._partitions[partition]
        rows = part.rows.live()
        receipts = [self._receipt(part, having, fields) for fields, having in part.by_fields(rows) if fields]
        return part.state(), part.listing(rows), receipts

    def restore(self, name: str, state: PartitionState, rows: PartitionRows) -> None:
        """Register a saved partition under a name, with its rows and its tasks' progress. No field of the rows is
        written yet. Raises ValueError if a partition of that name is registered, and the errors of `register`; nothing
        is registered then."""
        check_no_blobs("load", name)
        self._partitions.restore(name, state, rows)

    # ---------------- These methods carry out puts.

    def reserve(self, put: PutRows, now: float, room: int = 0) -> Reservation | None:
        """Check a put and reserve space for it on a host. Returns None when there is not enough space at the moment.
        Raises the same errors as `check`."""
        self.check(put)
        blocks, near = self.blocks, self.blocks.near_room(put.near)
        spare = 0 if near in (None, room) else blocks.spare_bytes
        if put.nbytes > blocks.free_bytes(room) - spare:
            return None
        return blocks.reserve(put.writer, put.nbytes, len(put.sizes), now + self._reserve_s, room=room)

    def check(self, put: PutRows) -> None:
        """Check a put without changing anything. Raises SchemaMismatch, DuplicateKeys or AlreadyWritten when the
        partition cannot take it, RowsCleared or LeaseLost when a fence does not hold, and CapacityExceeded when it is
        larger than the whole capacity."""
        self._check_rows(put)
        if put.nbytes > self.blocks.capacity_bytes:
            raise CapacityExceeded(
                f"the put takes {put.nbytes} bytes, more than the capacity of {self.blocks.capacity_bytes}; "
                "put fewer rows at a time or raise dataplane.store.capacity_mib",
                op="put",
                partition=put.partition,
                keys=put.keys,
            )

    def grant(self, writer: str, nbytes: int, num_blocks: int, now: float, room: int = 0) -> Reservation | None:
        """Reserve space on a host in advance for a writer's next put (credit). Returns None if less than an eighth of
        the capacity would remain free, or if `nbytes` or `num_blocks` is 0."""
        blocks = self.blocks
        if not 0 < nbytes <= blocks.free_bytes(room) - blocks.spare_bytes or num_blocks < 1:
            return None
        return blocks.reserve(writer, nbytes, num_blocks, now + self._reserve_s, room=room, credit=True)

    def revoke(self, nbytes: int | None, room: int = 0) -> list[Reservation]:
        """Cancel credit (space granted in advance) on a host, the oldest first, until `nbytes` are free there. None
        cancels the credit of all hosts. Returns the cancelled reservations."""
        revoked = []
        for item in self.blocks.credits(None if nbytes is None else room):
            if nbytes is not None and self.blocks.free_bytes(room) >= nbytes:
                break
            revoked.append(item)
            self.abort(item.reservation_id)
        return revoked

    def reservation(self, reservation_id: int) -> Reservation:
        """Return a put's reservation of space. Raises DataPlaneTimeout if it has expired, was aborted, or was
        revoked."""
        found = self.blocks.reservations.get(reservation_id)
        if found is None:
            raise DataPlaneTimeout(
                f"the put took longer than reserve_s={self._reserve_s:g}s (or was aborted): its bytes were reclaimed",
                op="put",
            )
        return found

    def commit(self, reservation_id: int, put: PutRows, locate: Locate) -> tuple[Committed, list[FreedBlock]]:
        """Make all rows of a put readable at once. Returns what the writer needs to build its receipt (the keys and
        locations of the rows), and the blocks to which no row refers any more because their rows were replaced.

        locate: function (block ids, their sizes) -> locations, called once all checks have passed. Raises the errors of
        `check` (another put may have come first) and of `reservation`, and ValueError if there are more blocks or bytes
        than reserved. After an error the reservation remains until `abort`.
        """
        reservation = self.reservation(reservation_id)
        partition, rows = self._check_rows(put)
        sizes = put.sizes
        if sum(sizes) > reservation.nbytes or len(sizes) > len(reservation.block_ids):
            raise ValueError(
                f"commit: got {len(sizes)} blocks of {sum(sizes)} bytes, "
                f"expected at most {len(reservation.block_ids)} of {reservation.nbytes}"
            )
        block_ids = reservation.block_ids[: len(sizes)]
        locations = tuple(locate(block_ids, sizes))
        freed = self._write(reservation, put, partition, rows, locations)
        return committed_of(partition, put, rows, block_ids.start, locations[: len(put.layouts)]), freed

    def _write(
        self, reservation: Reservation, put: PutRows, partition: Partition, rows: np.ndarray, locations: Sequence[bytes]
    ) -> list[FreedBlock]:
        """Make the rows of a checked put readable. rows: the result of `Partition.check_put`, in which the numbers of
        new rows are filled in. Returns the blocks to which no row refers any more."""
        sizes, of_rows = put.sizes, len(put.layouts)
        block_ids = reservation.block_ids[: len(sizes)]
        refs = [BlockRef(*item) for item in zip(block_ids, locations, put.all_layouts, strict=True)]
        live = [layout.num_rows * len(layout.fields) for layout in put.all_layouts]
        starts = token_starts(put.lengths, put.layouts) + [None] * (len(sizes) - of_rows)
        self.blocks.settle(reservation, refs, sizes, starts, live)
        room_of = self.blocks.rooms.room_of
        if put.near != ANY_HOLDER and locations and room_of(holder_of(locations[0])) != room_of(put.near):
            self._puts_elsewhere += 1
        replaced = partition.write(put, rows, block_ids[:of_rows], self._partitions.group_numbers)
        return self.blocks.unlink(replaced) + self._refer(partition, put, rows, block_ids[of_rows:])

    def _refer(self, part: Partition, put: PutRows, rows: np.ndarray, block_ids: Sequence[int]) -> list[FreedBlock]:
        """Add the blobs that a put brings, and make its rows refer to their blobs. Returns the blocks of blobs to which
        no row refers any more, and of those that another put has brought meanwhile."""
        freed: list[FreedBlock] = []
        for refs in put.blobs:
            holder, count = part.blobs[refs.field], len(refs.carried)
            own, block_ids = block_ids[:count], block_ids[count:]
            names = [refs.names[number] for number in refs.carried]
            there = holder.rows.find(names) >= 0
            for name, layout, block_id, known in zip(names, refs.layouts, own, there.tolist(), strict=True):
                if known:
                    freed += self.blocks.unlink(np.full(len(layout.fields), block_id << ROW_BITS))
                    continue
                groups = Grouping.of((name,), None)
                blob = PutRows(holder.name, (name,), layout.fields, None, None, groups, {}, (layout,), False, "", 0)
                holder.write(blob, np.array([-1]), (block_id,), self._partitions.group_numbers)
            blobs = holder.rows.find(refs.names)[refs.index]
            freed += self._forget(holder, part.references[refs.field].set(rows, refs.counts, blobs))
        return freed

    def _drop_references(self, part: Partition, rows: np.ndarray) -> list[FreedBlock]:
        """Drop the references of those of `rows` whose fields are not written any more. Returns the blocks of the blobs
        to which no row refers any more."""
        freed: list[FreedBlock] = []
        for name, references in part.references.items():
            unwritten = rows[part.rows.slots[name][rows] < 0]
            freed += self._forget(part.blobs[name], references.drop(unwritten.tolist()))
        return freed

    def abort(self, reservation_id: int) -> Reservation | None:
        """Cancel a reservation or credit, and return it so that the store can take its space back. Credit is a
        reservation made in advance. Returns None if it no longer exists."""
        return self.blocks.cancel(reservation_id)

    def withdraw(self, partition: str, keys: Sequence[str], first_block_id: int, num_blocks: int) -> list[FreedBlock]:
        """Undo a committed put: remove those of its values that still exist. Rows that have no other values are
        forgotten. Returns the blocks to which no row refers any more."""
        part = self._partitions[partition]
        rows = part.rows.find(keys)
        rows = distinct(rows[rows >= 0])
        slots, leases = part.withdraw(rows, first_block_id, num_blocks)
        self._leases.drop_rows(leases)
        return self.blocks.unlink(slots) + self._drop_references(part, rows)

    def tag(self, partition: str, keys: Sequence[str], tags: Mapping[str, np.ndarray]) -> None:
        """Set tags of existing rows: for each tag (a named number or text of a row), a value for each key.

        Raises DuplicateKeys, KeysNotFound, and SchemaMismatch for values of another type than the tag's earlier values;
        no tag is changed then.
        """
        self._partitions[partition].tag(keys, tags)

    # ---------------- These methods read, claim and clear rows.

    def lookup(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> KVBatchMeta:
        """Return a receipt (the keys and locations of rows) for the rows of `keys`, in that order. With `fields` None
        it covers all fields that are written for every one of these rows.

        Raises KeysNotFound for unknown keys, SchemaMismatch for invalid fields, and FieldsNotReady if a field is not
        written for every row, or if no field is.
        """
        part = self._partitions[partition]
        return self._receipt(part, *part.readable(keys, fields))

    def rows(self, partition: str, keys: Sequence[str] | None) -> PartitionRows:
        """Return a list of the rows of `keys`, in that order, or of all rows in order of arrival if None. Raises
        KeysNotFound for unknown keys."""
        part = self._partitions[partition]
        return part.listing(part.rows.live() if keys is None else part.find(keys, "rows"))

    def absent(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None
    ) -> tuple[list[str], dict[str, list[str]]]:
        """Return the keys that do not exist, and for each field the existing keys without it. Only fields for which
        there are such keys are in the result. Both results are empty if `lookup` with these arguments would succeed.
        `fields` None stands for any field that is written for every key; only keys can then be missing. Raises
        SchemaMismatch for invalid fields.
        """
        return self._partitions[partition].absent(keys, fields)

    def claim(self, claim: ClaimRows, now: float, holder: str = "") -> KVBatchMeta | None:
        """Lease ready rows, chosen by the task's sampler, and return a receipt (their keys and locations). As many as
        are ready are leased, at most `num_rows`. Returns None if fewer than `at_least` are ready or the sampler waits
        for more.

        With `whole_groups`, the claim takes only groups whose `group_size` rows are all ready, and the receipt lists
        the rows group by group. Raises SamplerError, and the errors of `check_claim`.
        """
        part, view = self.check_claim(claim)
        view.set_versions(claim.min_version, claim.max_version)
        cursor = part.tasks[claim.task]
        rows = cursor.choose(view, claim.num_rows, claim.least, claim.arguments)
        if rows is None:
            return None
        lease = self._leases.grant(part.name, cursor.config, rows, now, self._lease_s, holder)
        cursor.lease(rows, lease.lease_id)
        return self._receipt(part, rows, claim.fields, lease.lease_id)

    def check_claim(self, claim: ClaimRows) -> tuple[Partition, ReadyView]:
        """Check that the arguments of a claim are valid, so that it can be served once enough rows are ready. Returns
        its partition, and the index of the rows that it can take (a `ReadyView`). Raises SchemaMismatch for invalid
        fields, and ValueError for any other invalid argument."""
        part = self._partitions[claim.partition]
        return part, part.view_for(claim)

    def shortage(self, claim: ClaimRows) -> str:
        """Return the message of a ClaimTimeout, which says why a claim cannot be served now."""
        part, view = self.check_claim(claim)
        return part.shortage(claim, view)

    def renew(self, lease_ids: Sequence[int], now: float) -> list[int]:
        """Extend leases, so that they expire `lease_s` seconds after `now`. Returns the ids of the leases that still
        exist."""
        return self._leases.renew(lease_ids, now + self._lease_s)

    def renew_rows(self, partition: str, lease_id: int, keys: Sequence[str], now: float) -> None:
        """Extend the lease of rows, so that it expires `lease_s` seconds after `now`. Raises LeaseLost naming the keys
        of rows that the lease does not hold any more, and ValueError if `lease_id` is not positive; nothing is extended
        then."""
        part = self._partitions[partition]
        check_lease_id("renew", lease_id)
        lease = self._leases.get(lease_id)
        rows = part.rows.find(keys)
        held = rows >= 0
        if lease is None or lease.partition != partition:
            held[:] = False
        else:
            held[held] = part.tasks[lease.task].column[rows[held]] == lease_id
        _check_held("renew", partition, f"lease {lease_id}", keys, held)
        self._leases.renew((lease_id,), now + self._lease_s)

    def release(self, partition: str, task: str, lease_id: int, keys: Sequence[str], outcome: Outcome) -> None:
        """Release the rows of `keys` from a lease. The outcome `done` means that the task has finished them; `retry`
        lets the task claim them again.

        Raises ValueError for an unknown task or outcome, or if `lease_id` is not positive. Raises LeaseLost if the
        lease no longer holds some of the rows; it names their keys, and the other rows are released nevertheless.
        """
        part = self._partitions[partition]
        cursor = part.tasks.get(task)
        if cursor is None or outcome not in ("done", "retry"):
            raise ValueError(
                f"release: got task {task!r} and outcome {outcome!r}, expected one of the tasks "
                f"{sorted(part.tasks)} and the outcome done or retry"
            )
        check_lease_id("release", lease_id)
        rows = part.rows.find(keys)
        held = rows >= 0
        held[held] = cursor.column[rows[held]] == lease_id
        released = distinct(rows[held])
        self._leases.drop(lease_id, len(released))
        cursor.set(released, DONE if outcome == "done" else 0)
        _check_held("release", partition, f"lease {lease_id} of task {task!r}", keys, held)

    def leases(self, partition: str, now: float) -> tuple[LeaseStatus, ...]:
        """Return the leases of a partition, oldest first."""
        part = self._partitions[partition]
        leases = self._leases.of(partition)
        return tuple(lease.status(part.rows.keys[self._rows_of(lease)].tolist(), now) for lease in leases)

    def revoke_leases(self, partition: str, task: str, older_than_s: float, now: float) -> int:
        """End the leases of a task that were granted at least `older_than_s` seconds before `now`. Returns the number
        of rows that can then be claimed again. Raises ValueError for an unknown task and for a negative time."""
        self._partitions[partition].cursor(task)
        if not older_than_s >= 0:
            raise ValueError(f"revoke: got older_than_s={older_than_s}, expected seconds >= 0")
        leases = [lease for lease in self._leases.of(partition) if lease.task == task]
        return sum(self._end(lease) for lease in leases if now - lease.granted >= older_than_s)

    def skip(self, partition: str, task: str, positions: np.ndarray) -> None:
        """Settle positions of the prompt stream, so that `task` does not wait for their prompts any more. Raises
        ValueError for a negative position, for an unknown task, and for a task with a sampler that does not follow the
        prompts; nothing is settled then."""
        self._partitions[partition].cursor(task).skip(positions)

    def reset(self, partition: str, task: str, keys: Sequence[str] | None) -> TaskReset:
        """Make finished rows of a task claimable again: those of `keys`, or all of the partition if `keys` is None.
        Leased rows remain leased. Raises KeysNotFound for unknown keys; nothing is reset then."""
        part = self._partitions[partition]
        cursor = part.cursor(task)
        rows = part.rows.live() if keys is None else distinct(part.find(keys, "reset"))
        return cursor.reset(rows)

    def task_status(self, partition: str, task: str, fields: Sequence[str] | None) -> TaskStatus:
        """Return a task's progress in its partition, and how many rows have all of `fields` (None: of all fields).
        Raises SchemaMismatch for invalid fields."""
        part = self._partitions[partition]
        if fields is not None:
            part.check_fields(fields)
        return part.cursor(task).status(tuple(part.schema) if fields is None else fields)

    def clear(self, partition: str, keys: Sequence[str] | None) -> tuple[int, list[FreedBlock]]:
        """Forget the rows of `keys`, or all rows of the partition if `keys` is None. Returns their number, and the
        blocks to which no row refers any more.

        Raises KeysNotFound for unknown keys, and then nothing is cleared.
        """
        check_no_blobs("clear", partition)
        part = self._partitions[partition]
        rows = part.rows.live() if keys is None else distinct(part.find(keys, "clear"))
        return len(rows), self._forget(part, rows)

    def free(self, partition: str, keys: Sequence[str]) -> tuple[int, list[FreedBlock]]:
        """Drop the values of all fields of the rows of `keys`, but not the rows. Returns the number of rows, and the
        blocks to which no row refers any more.

        Raises KeysNotFound for unknown keys, and then nothing is dropped.
        """
        check_no_blobs("free", partition)
        part = self._partitions[partition]
        rows = distinct(part.find(keys, "free"))
        return len(rows), self.blocks.unlink(part.free(rows)) + self._drop_references(part, rows)

    def clear_stale(self, claim: ClaimRows) -> tuple[list[str], list[FreedBlock]]:
        """Forget the ready rows that a claim like `claim` skips as too old, except those leased to any task. A claim of
        whole groups skips a group if any of its rows is too old; the group is kept if any of its rows is leased.

        Returns the keys of the forgotten rows, and the blocks to which no row refers any more. Raises ValueError if the
        claim has no `min_version`.
        """
        if claim.min_version is None:
            raise ValueError("clear_stale: got min_version=None, expected an integer version")
        part = self._partitions[claim.partition]
        view = part.view(claim.task, claim.fields, claim.whole_groups)
        view.set_versions(claim.min_version, claim.max_version)
        rows = view.stale_rows()
        held = np.zeros(len(rows), dtype=bool)
        for cursor in part.tasks.values():
            held |= cursor.column[rows] > 0
        if claim.whole_groups:
            held = held.reshape(-1, part.groups.group_size).any(axis=1).repeat(part.groups.group_size)
        keys: list[str] = part.rows.keys[rows[~held]].tolist()
        return keys, self.clear(part.name, keys)[1]

    # ---------------- These methods expire what is overdue, forget what is lost, and report the state.

    def lose(self, holders: Mapping[int, str]) -> tuple[int, list[FreedBlock]]:
        """Forget the blocks that dead processes of the store held. Their values count as not written from now on, and
        their bytes are free. holders: names of the processes, by number.

        Returns the number of rows that have lost a value, and the blocks.
        """
        blocks = self.blocks.lose(holders)
        block_ids = np.array([block.block_id for block in blocks], dtype=np.int64)
        lost = [part.lose(block_ids, holders.values()) for part in self._partitions] if blocks else []
        for part in self._partitions if blocks else ():
            for name, holder in part.blobs.items():
                gone = holder.rows.live()
                rows = part.references[name].referrers(gone[holder.rows.lost(gone)])
                blocks += self.blocks.unlink(part.lose_field(name, rows, holders.values()))
            blocks += self._drop_references(part, part.rows.live())
        return sum(lost), blocks

    def clear_lost(self) -> tuple[dict[str, list[str]], list[FreedBlock]]:
        """Forget the rows that have lost a value, and the other rows of their groups. Returns their keys by partition,
        and the blocks to which no row refers any more."""
        found: dict[str, list[str]] = {}
        freed: list[FreedBlock] = []
        for part in self._partitions:
            rows = part.lost_groups()
            if len(rows):
                found[part.name] = part.rows.keys[rows].tolist()
                freed += self._forget(part, rows)
        return found, freed

    def expire(self, now: float) -> Expired:
        """End the leases and reservations whose deadline has passed."""
        returned = sum(self._end(lease) for lease in self._leases.take_expired(now))
        late = [item for item in self.blocks.reservations.values() if item.deadline <= now]
        for item in late:
            self.abort(item.reservation_id)
        return Expired(returned, tuple(item.writer for item in late if not item.credit), tuple(late))

    def forgive(self, away_s: float) -> None:
        """Take the seconds for which this process did not run out of the time that leases have been held."""
        self._leases.forgive(away_s)

    def next_deadline(self) -> float | None:
        """Return the earliest time at which `expire` will have something to do; None when there is none."""
        first = next((item.deadline for item in self.blocks.reservations.values()), None)
        return min((one for one in (first, self._leases.next_deadline()) if one is not None), default=None)

    def status(self, partition: str | None, now: float) -> DataPlaneStatus:
        """Return the numbers of rows and leases of one partition or all, and of blocks and bytes in the whole store.
        `partition` None selects all."""
        parts = list(self._partitions) if partition is None else [self._partitions[partition]]
        ready: dict[str, int] = {}
        for part in parts:
            for name, count in part.rows.num_written.items():
                ready[name] = ready.get(name, 0) + count
        total, rooms = self.blocks.total, self.blocks.rooms.rooms
        leases = self._leases.of(partition)
        oldest = min(leases, key=lambda lease: lease.granted, default=None)
        return DataPlaneStatus(
            partitions={part.name: len(part.rows) for part in parts},
            rows=sum(len(part.rows) for part in parts),
            ready=ready,
            leases=len(leases),
            leased_rows=sum(lease.held for lease in leases),
            oldest_lease_s=0.0 if oldest is None else now - oldest.granted,
            oldest_lease="" if oldest is None else f"task {oldest.task!r} of {oldest.partition!r}, {oldest.holder}",
            blocks=len(self.blocks),
            bytes_used=total.used_bytes,
            bytes_reserved=total.reserved_bytes,
            bytes_capacity=self.blocks.capacity_bytes * len(rooms),
            bytes_credit=total.credit_bytes,
            stale_rows=sum(cursor.num_stale for part in parts for cursor in part.tasks.values()),
            lost_rows=sum(part.num_lost for part in parts),
            bytes_by_host={rooms[room]: count for room, count in self.blocks.used_by_room().items() if rooms[room]},
            puts_elsewhere=self._puts_elsewhere,
        )

    # ---------------- These methods are private.

    def _rows_of(self, lease: Lease) -> np.ndarray:
        """Return the numbers of the rows that a lease still holds."""
        column = self._partitions[lease.partition].tasks[lease.task].column
        return lease.rows[column[lease.rows] == lease.lease_id]

    def _end(self, lease: Lease) -> int:
        """End a lease, so that its rows can be claimed again, and return how many they are."""
        rows = self._rows_of(lease)
        self._leases.drop(lease.lease_id, len(rows))
        self._partitions[lease.partition].tasks[lease.task].set(rows, 0)
        return len(rows)

    def _forget(self, part: Partition, rows: np.ndarray) -> list[FreedBlock]:
        """Remove rows from a partition and from the leases that hold them. The partition need not be registered any
        more. Returns the blocks to which no row refers any more."""
        if not len(rows):
            return []
        slots, leases = part.remove(rows)
        self._leases.drop_rows(leases)
        return self.blocks.unlink(slots) + self._drop_references(part, rows)

    def _check_rows(self, put: PutRows) -> tuple[Partition, np.ndarray]:
        """Check the rows of a put. Returns its partition, and the result of `Partition.check_put`."""
        check_no_blobs("put", put.partition)
        part = self._partitions[put.partition]
        check_fences(part, self._leases, put)
        return part, part.check_put(put)

    def _receipt(self, part: Partition, rows: np.ndarray, fields: tuple[str, ...], lease_id: int = 0) -> KVBatchMeta:
        return receipt_of(part, self.blocks, rows, fields, lease_id, self._plane_id)


def _check_held(op: str, partition: str, lease: str, keys: Sequence[str], held: np.ndarray) -> None:
    """Raise LeaseLost unless a lease holds all rows of `keys`. held: whether it does, bool `[N]`."""
    lost = pick(keys, np.flatnonzero(~held))
    if lost:
        raise LeaseLost(
            f"{lease} no longer holds {len(lost)} of {len(keys)} rows", op=op, partition=partition, keys=lost
        )
