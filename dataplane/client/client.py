"""Gives programs the data plane's operations as blocking calls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ...codecs.batch import Batch
from ...codecs.schema import Schema
from ..block_store import BlockStore
from ..directory.directory import Outcome
from ..directory.requests import body_of
from ..directory.samplers import TaskConfig
from ..handle import DataPlaneHandle
from ..meta import KVBatchMeta
from ..rpc.links import Link
from ..status import DataPlaneStatus
from ..traffic import ClientStats
from .operations import Ask, Fields, Moved, Operations, Steps, Work
from .renewal import LeaseRenewal

T = TypeVar("T")


class DataPlaneClient:
    """Connects one process to the run's data plane. Get one from `factory.connect`.

    Threads may share it. Every call returns or raises within its `timeout_s` (None means the configured `timeout_s`)
    and a few seconds of grace. Any call may raise DirectoryLost or StoreLost, which name the process that did not
    answer, and ValueError for an unknown partition. Calls of one thread take effect in order; calls of several threads
    take effect in any order, each in full or not at all.
    """

    def __init__(self, handle: DataPlaneHandle, link: Link, store: BlockStore, name: str = "") -> None:
        self._operations = Operations(handle, store, LeaseRenewal(link, handle.config.lease_s), name)
        self._link = link

    @property
    def stats(self) -> ClientStats:
        """Counts of what this client has done and moved so far."""
        return self._operations.stats

    def register(
        self, partition: str, schema: Schema, tasks: Sequence[str | TaskConfig] = (), *, group_size: int = 1
    ) -> None:
        """Declare a partition by its fields, its consumers and the size of a whole group.

        tasks: a TaskConfig says in what order the task's claims take rows; a name alone means lowest version first.
        Idempotent with equal arguments, from any process. Raises ValueError naming what differs otherwise, and for a
        sampler that the directory's process cannot import or build.
        """
        self._run("register", self._operations.register(partition, schema, tasks, group_size))

    def unregister(self, partition: str, *, timeout_s: float | None = None) -> int:
        """Forget a partition with its rows, leases, tasks and schema, and return how many rows it had.

        Claims that wait for its rows raise ValueError, as every later call that names it does. The name may be
        registered again, also with another schema.
        """
        return self._run("unregister", self._operations.unregister(partition, timeout_s))

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Fields,
        *,
        versions: int | np.ndarray | None = None,
        groups: Sequence[str] | None = None,
        tags: Mapping[str, np.ndarray] | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write some fields of N rows, and return a receipt that reads just these fields.

        keys: N row ids; new ones create rows, known ones get further fields. fields: anything that `codecs.jagged.pack`
        takes. versions: policy version of each new row, or of all of them (-1 if None). groups: N names; None takes
        each key up to its last ".". tags: numbers `[N]` for each name; a later put of a tag overwrites it. The integer
        tag `position` is a row's place in the prompt stream. A row's length is the length of its PER_TOKEN fields,
        which must agree; it reads as 0 until one is written. A (key, field) is written again only with replace=True,
        which may change a row's version, and its length if it replaces all its PER_TOKEN fields. A put without rows
        does nothing.

        Ordering: all fields of all rows become readable together when it returns, or none does when it raises. Blocks
        while the store is full. Not idempotent: the same put again raises AlreadyWritten.

        Raises DuplicateKeys, and SchemaMismatch for fields, dtypes and shapes, before a byte moves. Raises
        AlreadyWritten, and SchemaMismatch for what only the directory knows (lengths, groups), at the latest at the
        commit; nothing has become visible then, and the bytes are dropped. Raises CapacityExceeded, and
        DataPlaneTimeout if writing took longer than `reserve_s`.
        """
        return self._move(
            "put", self._operations.put(partition, keys, fields, versions, groups, tags, replace, timeout_s)
        )

    def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None) -> Batch:
        """Read `fields` (None: all that the receipt can read) of its rows, in its order, into memory of their own.

        Asks only the store, never the directory. Idempotent, and open to anybody who holds the receipt. Raises
        RowsCleared naming keys whose block is gone (the last of its rows was cleared or replaced; until then a receipt
        still reads the bytes it was given for), ForeignReceipt for a receipt of another data plane (also of an earlier
        one of the same run_id), FieldsNotReady for fields that the receipt lacks, and IntegrityError.
        """
        return self._move("get", self._operations.get(meta, fields, timeout_s))

    def lookup(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Return a receipt for `keys` in that order (a key may repeat). fields: None means all that are written for
        every key.

        Does not wait for rows: raises KeysNotFound or FieldsNotReady naming what is missing. Idempotent.
        """
        return self._run("lookup", self._operations.lookup(partition, keys, fields, timeout_s))

    def get_keys(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout_s: float | None = None
    ) -> Batch:
        """Look up the keys and read them: exactly the keys x fields asked for, in request order. Raises as `lookup`
        and `get`."""
        return self._move("get_keys", self._operations.get_keys(partition, keys, fields, timeout_s))

    def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        n: int,
        *,
        whole_groups: bool = False,
        min_version: int | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Lease n rows that have all of `fields` to this caller; no other claim of `task` gets them.

        Rows come in the order of the task's sampler (by default the lowest version first, then in order of arrival), or
        group by group with whole_groups (n is then a multiple of group_size). min_version: rows of a lower version, and
        groups with such a row, are passed over. They are not leased, hold nothing else up, and stay until `clear_stale`
        or `clear` removes them or a claim with a lower bound takes them.

        Blocks until there are n rows; claims of a task are served first come, first served. The lease lasts until the
        rows are released or cleared, for as long as this client's process is at work: it is renewed in the background.
        When the process dies or is stopped, or the client is closed, the rows can be claimed again `lease_s` after the
        last renewal. Raises ClaimTimeout saying what was waited for, SamplerError
        when the sampler fails (no row is leased then), ValueError for an unknown task, and SchemaMismatch for an
        unknown field.
        """
        return self._run(
            "claim", self._operations.claim(partition, task, fields, n, whole_groups, min_version, timeout_s)
        )

    def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, *, timeout_s: float | None = None) -> None:
        """End this lease's hold on the receipt's rows. `done` finishes them for `task`; `retry` lets them be claimed
        again.

        meta: a receipt from `claim`, or a part of it (select, split). Raises LeaseLost naming rows whose lease had
        ended (by time, clear or an earlier release) after releasing the others, ForeignReceipt for a receipt of another
        data plane, and ValueError for a receipt without a lease.
        """
        self._run("release", self._operations.release(meta, task, outcome, timeout_s))

    def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        """Forget rows (None: all of the partition) and their leases, and return how many. The owner of the flow calls
        it.

        Bytes are free again once every row of their block is cleared. Raises KeysNotFound, and then clears nothing.
        """
        return self._run("clear", self._operations.clear(partition, keys, timeout_s))

    def clear_stale(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        min_version: int,
        *,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """Clear exactly the rows that a claim with these arguments passes over as too old, and return their keys.

        The owner of the flow calls it, to count the rows or to roll them out again. A claim never clears, because
        another task may want the rows, and because a claim that times out could not name them. Rows that are leased or
        lack a field stay; of a whole group all rows go or none. Does not wait. Idempotent: rows that are gone are not
        named again.
        """
        return self._run(
            "clear_stale",
            self._operations.clear_stale(partition, task, fields, min_version, whole_groups, timeout_s),
        )

    def status(self, partition: str | None = None, *, timeout_s: float | None = None) -> DataPlaneStatus:
        """Count rows, leases and bytes at this moment."""
        return self._run("status", self._operations.status(partition, timeout_s))

    def close(self) -> None:
        """Detach from the directory and the store. Idempotent. The data plane goes on; leases that this client holds
        run out within `lease_s`."""
        self._carry_out(self._operations.close())
        self._link.detach()

    def __enter__(self) -> DataPlaneClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, op: str, steps: Steps[T]) -> T:
        started = time.monotonic()
        try:
            return self._carry_out(steps)
        finally:
            self.stats.count_call(op, time.monotonic() - started)

    def _move(self, op: str, steps: Steps[Moved[T]]) -> T:
        """Run a call that moves bytes, and count them with it."""
        started, nbytes = time.monotonic(), 0
        try:
            moved = self._carry_out(steps)
            nbytes = moved.nbytes
            return moved.result
        finally:
            self.stats.count_call(op, time.monotonic() - started, nbytes)

    def _carry_out(self, steps: Steps[T]) -> T:
        """Carry out the steps one after another in this thread."""
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                step = steps.send(answer) if failure is None else steps.throw(failure)
                answer, failure = None, None
                try:
                    answer = step.run() if isinstance(step, Work) else self._ask(step)
                except BaseException as error:  # KeyboardInterrupt too: the operation takes back what it reserved
                    failure = error
        except StopIteration as end:
            return end.value

    def _ask(self, step: Ask) -> bytes:
        started = time.monotonic()
        reply = self._link.call(step.op, step.payload, step.timeout_s, step.undo)
        self.stats.count_directory(len(step.payload) + len(reply))
        return body_of(reply, step.op, time.monotonic() - started)
