"""The blocking client: rows in, rows out, over a directory and a store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ..codecs.batch import Batch
from ..codecs.schema import Schema
from .block_store import BlockStore
from .directory.directory import Outcome
from .directory.requests import body_of
from .directory.samplers import TaskConfig
from .handle import DataPlaneHandle
from .meta import KVBatchMeta
from .operations import Ask, Fields, Moved, Operations, Steps, Work
from .rpc.links import Link
from .status import DataPlaneStatus
from .traffic import ClientStats

T = TypeVar("T")


class DataPlaneClient:
    """One process's access to the run's data plane. Get one from `factory.connect`.

    May be shared by threads. Every call returns or raises within its `timeout_s` (None: the configured `timeout_s`)
    and a grace of seconds. Any call may raise DirectoryLost or StoreLost, naming the process that did not answer, and
    ValueError for an unknown partition. Calls of one thread take effect in order; calls of several in any order, each
    in full or not at all.
    """

    def __init__(self, handle: DataPlaneHandle, link: Link, store: BlockStore, name: str = "") -> None:
        self._operations = Operations(handle, store, name)
        self._link = link

    @property
    def stats(self) -> ClientStats:
        """What this client has moved so far."""
        return self._operations.stats

    def register(
        self, partition: str, schema: Schema, tasks: Sequence[str | TaskConfig] = (), *, group_size: int = 1
    ) -> None:
        """Declare a partition: its fields, its consumers, and (if over 1) the rows of a whole group.

        tasks: a TaskConfig says in what order the task's claims take rows; a name alone means lowest version first.
        Idempotent with equal arguments, from any process; ValueError naming what differs otherwise, or for a sampler
        that cannot be built in the directory's process (which imports it).
        """
        self._run("register", self._operations.register(partition, schema, tasks, group_size))

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
        """Write some fields of N rows; returns a receipt that reads just these fields.

        keys: N row ids; new ones make rows, known ones get further fields. fields: all that `codecs.jagged.pack` takes.
        versions: policy version(s) of new rows (-1 if None). groups: N names, None takes each key up to its last ".".
        tags: per-row numbers `[N]`; a later put of a tag overwrites it. The integer tag `position` is a row's place in
        the prompt stream. A row's length is that of its PER_TOKEN fields: until one is written it reads as 0, and all
        of them must agree. Only replace=True writes a (key, field) again; it may change a row's version, and its length
        if it replaces all its PER_TOKEN fields. No rows: nothing happens.

        Ordering: all fields of all rows become readable together when it returns, or none does when it raises.
        Blocks while the store is full. Not idempotent: the same again raises AlreadyWritten.
        Raises DuplicateKeys, and SchemaMismatch for fields, dtypes and shapes, before a byte moves; AlreadyWritten, and
        SchemaMismatch for what only the directory knows (lengths, groups), at the commit at the latest: nothing has
        become visible then and the bytes are dropped. CapacityExceeded; DataPlaneTimeout if writing took `reserve_s`.
        """
        return self._move(
            "put", self._operations.put(partition, keys, fields, versions, groups, tags, replace, timeout_s)
        )

    def get(self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None) -> Batch:
        """Read a receipt's rows x `fields` (None: all it can read), in its order, into memory of their own.

        Asks the store only, never the directory. Idempotent; anybody who holds the receipt may call it.
        Raises RowsCleared naming keys whose block is gone (the last of its rows was cleared or replaced; until then a
        receipt still reads the bytes it was given for), FieldsNotReady for fields the receipt lacks, IntegrityError.
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
        """A receipt for `keys` in that order (a key may repeat). fields None: all that are written for every key.

        Does not wait for rows: raises KeysNotFound or FieldsNotReady naming what is missing. Idempotent.
        """
        return self._run("lookup", self._operations.lookup(partition, keys, fields, timeout_s))

    def get_keys(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout_s: float | None = None
    ) -> Batch:
        """`lookup`, then `get`: exactly the keys x fields asked for, in request order, or it raises as they do."""
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
        """Lease n rows with all of `fields` written to this caller: no other claim of `task` gets them.

        In the order of the task's sampler (if none was registered: lowest version first, then in order of arrival);
        whole_groups: group by group (n a multiple of group_size). min_version: rows of a lower version, groups with
        such a row, are passed over: they are not leased, hold nothing else up, and stay where they are until
        `clear_stale` (or `clear`) takes them away, or a claim with a lower bound takes them after all.
        Blocks until there are n; claims of a task are served first come, first served. Each lease lasts `lease_s`:
        rows not released by then can be claimed again. Raises ClaimTimeout saying what was waited for, SamplerError
        when the sampler fails (no row is leased then), ValueError for an unknown task, SchemaMismatch for an unknown
        field.
        """
        return self._run(
            "claim", self._operations.claim(partition, task, fields, n, whole_groups, min_version, timeout_s)
        )

    def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, *, timeout_s: float | None = None) -> None:
        """End this lease's hold on the receipt's rows: `done`, `task` is through with them; `retry`, claim them again.

        meta: from `claim`, or a part of it (select, split). Raises LeaseLost naming rows whose lease had ended (time,
        clear, an earlier release), having released the others; ValueError for a receipt without a lease.
        """
        self._run("release", self._operations.release(meta, task, outcome, timeout_s))

    def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        """Forget rows (None: all of the partition) and their leases; returns how many. Who owns the flow calls it.

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
        """Clear just what a claim with these arguments passes over as too old; returns the keys, to count or roll out
        again. Who owns the flow calls it.

        A claim never clears: another task may want the rows, and a claim that times out could not name them. Rows
        that are leased, or lack a field, stay; of whole groups all or none go. Does not wait. Idempotent: what is
        gone is not named again.
        """
        return self._run(
            "clear_stale",
            self._operations.clear_stale(partition, task, fields, min_version, whole_groups, timeout_s),
        )

    def status(self, partition: str | None = None, *, timeout_s: float | None = None) -> DataPlaneStatus:
        """Counts of rows, leases and bytes at this moment."""
        return self._run("status", self._operations.status(partition, timeout_s))

    def close(self) -> None:
        """Detach from directory and store. Idempotent; data plane and leases go on."""
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
        """One step after another in this thread."""
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
        reply = self._link.call(step.op, step.payload, step.timeout_s)
        self.stats.count_directory(len(step.payload) + len(reply))
        return body_of(reply, step.op, time.monotonic() - started)
