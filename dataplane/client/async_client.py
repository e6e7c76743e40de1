"""Gives asyncio programs, such as rollout actors and servers, the data plane's operations as coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ...codecs.batch import Batch
from ...codecs.schema import Schema
from ..block_store import BlockStore
from ..directory.directory import Outcome
from ..directory.requests import body_of
from ..directory.samplers import TaskConfig
from ..errors import DataPlaneTimeout, DirectoryLost
from ..handle import DataPlaneHandle
from ..meta import KVBatchMeta
from ..rpc.links import Link
from ..status import DataPlaneStatus
from ..traffic import ClientStats
from .operations import Ask, Fields, Moved, Operations, Steps, Work
from .renewal import LeaseRenewal

T = TypeVar("T")


class AsyncDataPlaneClient:
    """Offers the methods of `DataPlaneClient` as coroutines, with the same arguments, results, errors and time limits.

    Created by `connect_async`. Bytes are packed, moved and unpacked in the client's own threads, so that the event loop
    only waits; the wait for a thread counts in a call's time limit. Tasks of one loop may share a client.

    A cancelled call leaves nothing behind: a put waits until the store no longer touches its bytes; rows that were
    leased, room that was reserved and rows that were written meanwhile are given back. Only a put with replace=True may
    have taken effect, as the values of before are gone.
    """

    def __init__(self, handle: DataPlaneHandle, link: Link, store: BlockStore, name: str = "") -> None:
        self._operations = Operations(handle, store, LeaseRenewal(link, handle.config.lease_s), name)
        self._link = link
        # Of its own: the event loop's default threads may all be held by tools that hang.
        self._threads = ThreadPoolExecutor(thread_name_prefix="data-plane")
        self._closed = False

    @property
    def stats(self) -> ClientStats:
        """Counts of what this client has done and moved so far."""
        return self._operations.stats

    async def register(
        self, partition: str, schema: Schema, tasks: Sequence[str | TaskConfig] = (), *, group_size: int = 1
    ) -> None:
        """See `DataPlaneClient.register`."""
        await self._run("register", self._operations.register(partition, schema, tasks, group_size))

    async def unregister(self, partition: str, *, timeout_s: float | None = None) -> int:
        """See `DataPlaneClient.unregister`."""
        return await self._run("unregister", self._operations.unregister(partition, timeout_s))

    async def put(
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
        """See `DataPlaneClient.put`."""
        return await self._move(
            "put", self._operations.put(partition, keys, fields, versions, groups, tags, replace, timeout_s)
        )

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> Batch:
        """See `DataPlaneClient.get`."""
        return await self._move("get", self._operations.get(meta, fields, timeout_s))

    async def lookup(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """See `DataPlaneClient.lookup`."""
        return await self._run("lookup", self._operations.lookup(partition, keys, fields, timeout_s))

    async def get_keys(
        self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout_s: float | None = None
    ) -> Batch:
        """See `DataPlaneClient.get_keys`."""
        return await self._move("get_keys", self._operations.get_keys(partition, keys, fields, timeout_s))

    async def claim(
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
        """See `DataPlaneClient.claim`."""
        return await self._run(
            "claim", self._operations.claim(partition, task, fields, n, whole_groups, min_version, timeout_s)
        )

    async def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, *, timeout_s: float | None = None) -> None:
        """See `DataPlaneClient.release`."""
        await self._run("release", self._operations.release(meta, task, outcome, timeout_s))

    async def clear(self, partition: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None) -> int:
        """See `DataPlaneClient.clear`."""
        return await self._run("clear", self._operations.clear(partition, keys, timeout_s))

    async def clear_stale(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        min_version: int,
        *,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """See `DataPlaneClient.clear_stale`."""
        return await self._run(
            "clear_stale",
            self._operations.clear_stale(partition, task, fields, min_version, whole_groups, timeout_s),
        )

    async def status(self, partition: str | None = None, *, timeout_s: float | None = None) -> DataPlaneStatus:
        """See `DataPlaneClient.status`."""
        return await self._run("status", self._operations.status(partition, timeout_s))

    async def close(self) -> None:
        """See `DataPlaneClient.close`."""
        if self._closed:
            return
        await self._carry_out(self._operations.close())
        self._closed = True
        self._threads.shutdown(wait=False)
        await self._link.detach_async()

    async def __aenter__(self) -> AsyncDataPlaneClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, op: str, steps: Steps[T]) -> T:
        started = time.monotonic()
        try:
            return await self._carry_out(steps)
        finally:
            self.stats.count_call(op, time.monotonic() - started)

    async def _move(self, op: str, steps: Steps[Moved[T]]) -> T:
        """Run a call that moves bytes, and count them with it."""
        started, nbytes = time.monotonic(), 0
        try:
            moved = await self._carry_out(steps)
            nbytes = moved.nbytes
            return moved.result
        finally:
            self.stats.count_call(op, time.monotonic() - started, nbytes)

    async def _carry_out(self, steps: Steps[T]) -> T:
        """Carry out the steps one after another, directory calls on the event loop and work in a thread."""
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                step = steps.send(answer) if failure is None else steps.throw(failure)
                answer, failure = None, None
                try:
                    answer = await (self._in_thread(step) if isinstance(step, Work) else self._ask(step))
                except BaseException as error:  # CancelledError too: the operation takes back what it reserved
                    failure = error
        except StopIteration as end:
            return end.value

    async def _ask(self, step: Ask) -> bytes:
        started = time.monotonic()
        reply = await self._link.call_async(step.op, step.payload, step.timeout_s, step.undo)
        self.stats.count_directory(len(step.payload) + len(reply))
        return body_of(reply, step.op, time.monotonic() - started)

    async def _in_thread(self, work: Work) -> Any:
        """Run the work in a thread. Raises DataPlaneTimeout when none is free until the work's deadline.

        When cancelled, wait for the end of work that has begun, as a block must not be freed under its writer.
        """
        if self._closed:
            raise DirectoryLost("this client is closed", op=work.op, elapsed_s=0.0)
        started = time.monotonic()
        call = self._threads.submit(work.run)
        future = asyncio.wrap_future(call)
        try:
            if work.deadline is not None:
                done, _ = await asyncio.wait([future], timeout=max(0.0, work.deadline - started))
                if not done and call.cancel():
                    raise DataPlaneTimeout(
                        f"no thread was free: {self._threads._max_workers} other calls of this client move bytes",
                        op=work.op,
                        elapsed_s=time.monotonic() - started,
                    )
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if call.cancel():  # it has not begun
                raise
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # it is being obeyed; the store's own bound ends this wait
            if not future.cancelled():
                future.exception()  # seen: the cancellation is what the caller is told
            raise
