"""Records what a directory does in a log, and does it again in the process that follows a dead one.

The directory has no clock and no store, so the same calls lead to the same state: rows, generations, groups, blocks and
leases have the same numbers. Reservations of space are not recorded. Their writers learn at the commit that the space
is gone, and write again. Each reply is recorded with the effects of its request, so that a client that repeats a
request gets the first reply.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...codecs import messages
from ...codecs.schema import Field, Schema
from ..block_store import SERVED_DEAD
from ..compact import pack_keys, unpack_keys
from ..directory import requests
from ..directory.block_table import FreedBlock, Reservation
from ..directory.calls import ClaimRows, Outcome, PutRows
from ..directory.directory import Directory
from ..directory.partition import Partition, PartitionState
from ..directory.samplers import FirstInOrder, TaskConfig
from ..directory.task_cursor import Lease, TaskCursor
from ..errors import DataPlaneError
from ..meta import KVBatchMeta
from ..status import PartitionRows, TaskReset
from .effect_log import EffectLog, Item
from .saved_state import SavedState, load, saved

NUM_REPLIES = 4096
"""Number of latest replies that are kept for requests that are repeated. It is larger than the number of requests that
clients have in flight."""
AHEAD = 1 << 16
"""Number of ids of blocks and reservations that one record covers."""
COMPACT_BYTES = 4 << 20
"""Number of bytes of records after which the log begins again with a copy of the state. A process takes about 1.5 s to
do again what so many records say, on a busy machine."""


class Wrote(msgspec.Struct, frozen=True, array_like=True):
    """Record of a commit."""

    block_ids: tuple[int, int]
    """First id of the reservation's blocks, and the number after its last one."""
    locations: tuple[bytes, ...]
    commit: bytes
    """The `requests.Commit`, as its writer encoded it."""


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """Record of a claim."""

    lease_id: int
    partition: str
    task: str
    keys: bytes
    holder: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Record of the numbers that a sampler noted for rows."""

    partition: str
    task: str
    keys: bytes
    numbers: np.ndarray


@dataclass(frozen=True, slots=True)
class Copied:
    """Record of the whole state, with which a log begins."""

    state: SavedState
    next_ids: tuple[int, int]
    served: tuple[bytes, ...]


class RecordedDirectory(Directory):
    """Directory whose effects are recorded. After `replay` it is in the state of the directory that wrote the log."""

    def __init__(self, log: EffectLog, serve: Callable[[bytes], object], **settings: Any) -> None:
        """serve: function with which the store's host carries out a request, such as to add a unit. settings:
        arguments of `Directory`."""
        super().__init__(**settings)
        self._log = log
        self._serve = serve
        self.repeats = True
        self._pending: list[Item] = []
        self._is_replaying = False
        self._next_ids = (0, 0)
        """Ids of blocks and of reservations below which all may have been used, as the log says."""
        self._served: dict[bytes, None] = {}
        self._replies: OrderedDict[bytes, bytes] = OrderedDict()
        self._compact_at = COMPACT_BYTES

    # ---------------- These methods write and read the log.

    def replay(self, now: float) -> bool:
        """Do again what the log says. Leases run out `lease_s` seconds after `now` unless they are renewed. Returns
        whether the log was written by an earlier process."""
        self._is_replaying, num_items = True, 0
        for kind, content in self._log.take():
            with contextlib.suppress(DataPlaneError, ValueError):  # The call failed then, too.
                self._redo(kind, content, now)
            num_items += 1
        self._is_replaying = False
        blocks = self.blocks
        blocks.next_block = max(blocks.next_block, self._next_ids[0])
        self.first_space = blocks.next_reservation = max(blocks.next_reservation, self._next_ids[1])
        return num_items > 0

    def adopted(self) -> tuple[list[tuple[int, bytes, int]], int]:
        """Return the arguments of `Recovers.adopt`: the blocks, and the lowest id of later ones."""
        entries = self.blocks.entries.values()
        return [(item.ref.block_id, item.ref.location, item.nbytes) for item in entries], self.blocks.next_block

    def _redo(self, kind: str, content: bytes, now: float) -> None:
        if kind == "reply":
            self._keep(content[: requests.ID_BYTES], content[requests.ID_BYTES :])
        elif kind == "state":
            copied = messages.decode(content, Copied)
            for payload in copied.served:
                self.served(payload)
            load(copied.state, self._partitions, self.blocks, self._leases, now, self._lease_s)
            self._next_ids, self._puts_elsewhere = copied.next_ids, copied.state.puts_elsewhere
        elif kind == "served":
            self.served(content)
        elif kind == "ids":
            self._next_ids = messages.decode(content, tuple[int, int])
        elif kind == "lose":
            self.lose(messages.decode(content, dict[int, str]))
        elif kind == "end":
            lease = self._leases.get(messages.decode(content, int))
            assert lease is not None
            self._end(lease)
        else:
            self._redo_call(kind, content, now)

    def _redo_call(self, kind: str, content: bytes, now: float) -> None:
        request = messages.decode(content, _RECORDS[kind])
        match request:
            case Wrote(ids, locations, commit):
                put = messages.decode(commit, requests.Commit).put
                part = self._partitions[put.partition]
                reservation = Reservation(0, put.writer, range(*ids), put.nbytes, now, credit=False)
                self._write(reservation, put, part, part.check_put(put), locations)
            case Leased(lease_id, partition, task, keys, holder):
                part = self._partitions[partition]
                cursor, rows = part.tasks[task], part.rows.find(unpack_keys(keys))
                self._leases.next_id = lease_id
                self._leases.grant(partition, cursor.config, rows, now, self._lease_s, holder)
                cursor.lease(rows, lease_id)
            case Noted(partition, task, keys, numbers):
                part = self._partitions[partition]
                part.tasks[task].notes.set(part.rows.find(unpack_keys(keys)), numbers)
            case requests.Register(partition, schema, tasks, group_size, redefine):
                self.register(partition, schema, tasks, group_size, redefine=redefine)
            case requests.AddTasks(partition, tasks):
                self.add_tasks(partition, tasks)
            case requests.OnePartition(partition):
                self.unregister(partition)
            case requests.AddFields(partition, fields):
                self.add_fields(partition, list(fields.values()))
            case requests.Restore(partition, state, rows):
                self.restore(partition, state, PartitionRows.from_bytes(rows))
            case requests.Withdraw(partition, keys, first_block_id, num_blocks, _):
                self.withdraw(partition, unpack_keys(keys), first_block_id, num_blocks)
            case requests.Tag(partition, keys, tags):
                self.tag(partition, unpack_keys(keys), tags)
            case requests.Release(partition, task, lease_id, keys, outcome):
                self.release(partition, task, lease_id, unpack_keys(keys), outcome)
            case requests.Skip(partition, task, positions):
                self.skip(partition, task, positions)
            case requests.Reset(partition, task, keys):
                self.reset(partition, task, None if keys is None else unpack_keys(keys))
            case requests.FreeRows(partition, keys):
                self.free(partition, unpack_keys(keys))
            case requests.SomeRows(partition, keys):
                self.clear(partition, None if keys is None else unpack_keys(keys))

    def flush(self) -> None:
        if not self._pending:
            return
        items, self._pending = self._pending, []
        self._log.append(items)
        if self._log.nbytes > self._compact_at:
            state = saved(self._partitions, self.blocks, self._leases, self._puts_elsewhere)
            copied = messages.encode(Copied(state, self._next_ids, tuple(self._served)))
            self._log.begin([("state", copied), *(("reply", name + reply) for name, reply in self._replies.items())])
            self._compact_at = self._log.nbytes + COMPACT_BYTES

    def answered(self, request: bytes, reply: bytes) -> None:
        if request and any(kind != "ids" for kind, _ in self._pending):
            self._keep(request, reply)
            self._pending.append(("reply", request + reply))
        self.flush()

    def earlier_reply(self, request: bytes) -> bytes | None:
        return self._replies.get(request)

    def served(self, payload: bytes) -> None:
        if payload not in self._served:
            self._served[payload] = None
            self._record("served", payload)
            if self._is_replaying:
                self._serve(payload)

    def _keep(self, request: bytes, reply: bytes) -> None:
        self._replies[request] = reply
        if len(self._replies) > NUM_REPLIES:
            self._replies.popitem(last=False)

    def _record(self, kind: str, content: Any) -> None:
        if not self._is_replaying:
            self._pending.append((kind, content if isinstance(content, bytes) else messages.encode(content)))

    def _heard(self, op: str) -> bytes | None:
        """Return the request that is being answered, if it has this name. Its bytes need not be encoded again."""
        return self.request[1] if self.request[0] == op else None

    def _record_ids(self) -> None:
        """Record that ids of blocks and reservations are used, a good many in advance."""
        blocks = self.blocks
        if blocks.next_block > self._next_ids[0] or blocks.next_reservation > self._next_ids[1]:
            self._next_ids = (blocks.next_block + AHEAD, blocks.next_reservation + AHEAD)
            self._record("ids", self._next_ids)

    # ---------------- These calls are recorded as they come; if one fails, it fails again.

    def register(
        self,
        name: str,
        schema: Schema,
        tasks: Sequence[str | TaskConfig],
        group_size: int,
        *,
        redefine: bool = False,
    ) -> list[FreedBlock] | None:
        configs = tuple(TaskConfig(task) if isinstance(task, str) else task for task in tasks)
        self._record("register", requests.Register(name, schema, configs, group_size, redefine))
        return super().register(name, schema, tasks, group_size, redefine=redefine)

    def add_tasks(self, name: str, tasks: Sequence[str | TaskConfig]) -> None:
        configs = tuple(TaskConfig(task) if isinstance(task, str) else task for task in tasks)
        self._record("add_tasks", requests.AddTasks(name, configs))
        super().add_tasks(name, tasks)

    def unregister(self, name: str) -> tuple[int, list[FreedBlock]]:
        self._record("unregister", requests.OnePartition(name))
        return super().unregister(name)

    def add_fields(self, partition: str, fields: Sequence[Field]) -> Schema:
        self._record("add_fields", requests.AddFields(partition, Schema(fields)))
        return super().add_fields(partition, fields)

    def restore(self, name: str, state: PartitionState, rows: PartitionRows) -> None:
        self._record("restore", requests.Restore(name, state, rows.to_bytes()))
        super().restore(name, state, rows)

    def withdraw(self, partition: str, keys: Sequence[str], first_block_id: int, num_blocks: int) -> list[FreedBlock]:
        self._record("withdraw", requests.Withdraw(partition, pack_keys(keys), first_block_id, num_blocks, 0))
        return super().withdraw(partition, keys, first_block_id, num_blocks)

    def tag(self, partition: str, keys: Sequence[str], tags: Mapping[str, np.ndarray]) -> None:
        self._record("tag", requests.Tag(partition, pack_keys(keys), tags))
        super().tag(partition, keys, tags)

    def release(self, partition: str, task: str, lease_id: int, keys: Sequence[str], outcome: Outcome) -> None:
        heard = self._heard("release")
        self._record("release", heard or requests.Release(partition, task, lease_id, pack_keys(keys), outcome))
        super().release(partition, task, lease_id, keys, outcome)

    def skip(self, partition: str, task: str, positions: np.ndarray) -> None:
        self._record("skip", requests.Skip(partition, task, positions))
        super().skip(partition, task, positions)

    def reset(self, partition: str, task: str, keys: Sequence[str] | None) -> TaskReset:
        self._record("reset", requests.Reset(partition, task, None if keys is None else pack_keys(keys)))
        return super().reset(partition, task, keys)

    def clear(self, partition: str, keys: Sequence[str] | None) -> tuple[int, list[FreedBlock]]:
        heard = self._heard("clear")
        self._record("clear", heard or requests.SomeRows(partition, None if keys is None else pack_keys(keys)))
        return super().clear(partition, keys)

    def free(self, partition: str, keys: Sequence[str]) -> tuple[int, list[FreedBlock]]:
        self._record("free", requests.FreeRows(partition, pack_keys(keys)))
        return super().free(partition, keys)

    def lose(self, holders: Mapping[int, str]) -> tuple[int, list[FreedBlock]]:
        self._record("lose", dict(holders))
        for name in holders.values():
            self.served(SERVED_DEAD + name.encode())
        return super().lose(holders)

    # ---------------- These calls depend on the clock, on reservations or on samplers. What they did is recorded.

    def reserve(self, put: PutRows, now: float, room: int = 0) -> Reservation | None:
        found = super().reserve(put, now, room)
        self._record_ids()
        return found

    def grant(self, writer: str, nbytes: int, num_blocks: int, now: float, room: int = 0) -> Reservation | None:
        found = super().grant(writer, nbytes, num_blocks, now, room)
        self._record_ids()
        return found

    def _write(
        self, reservation: Reservation, put: PutRows, partition: Partition, rows: np.ndarray, locations: Sequence[bytes]
    ) -> list[FreedBlock]:
        if not self._is_replaying:
            ids = reservation.block_ids
            commit = self._heard("commit") or messages.encode(requests.Commit(0, False, put, None, 0, 0))
            self._record("wrote", Wrote((ids.start, ids.stop), tuple(locations), commit))
        return super()._write(reservation, put, partition, rows, locations)

    def claim(self, claim: ClaimRows, now: float, holder: str = "") -> KVBatchMeta | None:
        part = self._partitions[claim.partition]
        cursor = part.tasks.get(claim.task)  # The call itself refuses an unknown task.
        has_notes = cursor is not None and not isinstance(cursor.sampler, FirstInOrder)
        notes = cursor.notes.of(part.rows.live()) if cursor is not None and has_notes else None
        try:
            receipt = super().claim(claim, now, holder)
        finally:  # A sampler may note numbers before it raises an error.
            if cursor is not None and notes is not None:
                self._record_changed(part, cursor, notes)
        if receipt is not None:
            keys = pack_keys(receipt.keys)
            self._record("leased", Leased(receipt.lease_id, part.name, claim.task, keys, holder))
        return receipt

    def _record_changed(self, part: Partition, cursor: TaskCursor, notes: np.ndarray) -> None:
        """Record the numbers of a task's rows that differ from `notes`."""
        rows = part.rows.live()
        found = cursor.notes.of(rows)
        changed = np.flatnonzero(found != notes)
        if len(changed):
            keys = pack_keys(part.rows.keys[rows[changed]].tolist())
            self._record("noted", Noted(part.name, cursor.config.name, keys, found[changed]))

    def clear_lost(self) -> tuple[dict[str, list[str]], list[FreedBlock]]:
        found, freed = super().clear_lost()
        for partition, keys in found.items():
            self._record("clear", requests.SomeRows(partition, pack_keys(keys)))
        return found, freed

    def _end(self, lease: Lease) -> int:
        self._record("end", lease.lease_id)
        return super()._end(lease)


_RECORDS: dict[str, Any] = {
    "wrote": Wrote,
    "leased": Leased,
    "noted": Noted,
    "register": requests.Register,
    "add_tasks": requests.AddTasks,
    "unregister": requests.OnePartition,
    "add_fields": requests.AddFields,
    "restore": requests.Restore,
    "withdraw": requests.Withdraw,
    "tag": requests.Tag,
    "release": requests.Release,
    "skip": requests.Skip,
    "reset": requests.Reset,
    "clear": requests.SomeRows,
    "free": requests.FreeRows,
}
"""Type of each kind of record that stands for a call."""
