"""Gives asyncio programs, such as rollout actors and servers, the data plane's operations as coroutines."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from ...codecs.batch import Batch
from ...codecs.blobs import BlobRows
from ...codecs.schema import Field, Schema
from ..block_store import BlockStore
from ..directory.calls import Outcome
from ..directory.samplers import TaskConfig
from ..errors import DataPlaneTimeout, DirectoryLost
from ..handle import DataPlaneHandle
from ..meta import KVBatchMeta, Tags
from ..rpc.forks import renew_in_forks
from ..rpc.links import Link, wait_out
from ..status import DataPlaneStatus, LeaseStatus, PartitionRows, TaskReset, TaskStatus
from .arguments import Fields, Keys
from .counted_client import CountedClient
from .saving import load, save
from .steps import Ask, Moved, Steps, Work

T = TypeVar("T")


class AsyncDataPlaneClient(CountedClient):
    """Client with the methods of `DataPlaneClient` as coroutines. Arguments, results, errors and time limits are the
    same.

    Created by `connect_async`. Bytes are packed, moved and unpacked in the client's own threads, so that the event loop
    only waits; the wait for a free thread counts towards a call's time limit. Tasks of one event loop can share a
    client.

    A cancelled call leaves nothing behind. A cancelled put first waits until the store no longer touches its bytes.
    Rows that were leased can be claimed again, space that was reserved is freed, and rows that were written meanwhile
    are withdrawn. Only a put with replace=True may have taken effect, because the previous values are gone.
    """

    def __init__(
        self,
        handle: DataPlaneHandle,
        link: Link,
        store: BlockStore,
        name: str = "",
        others: Sequence[tuple[DataPlaneHandle, Link, BlockStore]] = (),
    ) -> None:
        """others: handle, link and store of each further directory of the data plane."""
        super().__init__(handle, link, store, name, others)
        self._closed = False
        self._renew()
        renew_in_forks(self, AsyncDataPlaneClient._renew)

    def _renew(self) -> None:
        # The client has its own threads, because tools that hang can occupy all default threads of the event loop.
        self._threads = ThreadPoolExecutor(thread_name_prefix="data-plane")

    async def register(
        self,
        partition: str,
        schema: Schema | Iterable[Field],
        tasks: Sequence[str | TaskConfig] = (),
        *,
        group_size: int = 1,
        redefine: bool = False,
    ) -> None:
        """Declare a partition (a named set of rows), as `DataPlaneClient.register` does."""
        await self._run(self._operations.register(partition, schema, tasks, group_size, redefine))

    async def add_tasks(
        self, partition: str, tasks: Sequence[str | TaskConfig], *, timeout_s: float | None = None
    ) -> None:
        """Add tasks (consumers) to a partition that is registered, as `DataPlaneClient.add_tasks` does."""
        await self._run(self._operations.add_tasks(partition, tasks, timeout_s))

    async def unregister(self, partition: str, *, timeout_s: float | None = None) -> int:
        """Remove a partition and return how many rows it had, as `DataPlaneClient.unregister` does."""
        return await self._run(self._operations.unregister(partition, timeout_s))

    async def add_fields(
        self, partition: str, fields: Schema | Iterable[Field], *, timeout_s: float | None = None
    ) -> None:
        """Add fields to a partition's schema, as `DataPlaneClient.add_fields` does."""
        await self._run(self._operations.add_fields(partition, fields, timeout_s))

    async def put(
        self,
        partition: str,
        keys: Keys,
        fields: Fields,
        *,
        versions: int | np.ndarray | None = None,
        groups: Keys | None = None,
        tags: Tags | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write some fields of N rows and return a receipt, as `DataPlaneClient.put` does. The receipt has the rows'
        keys and locations."""
        return await self._move(
            self._operations.put(partition, keys, fields, versions, groups, tags, replace, timeout_s)
        )

    async def write(
        self,
        meta: KVBatchMeta,
        fields: Fields,
        *,
        tags: Tags | None = None,
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write further fields of the rows of a receipt, as `DataPlaneClient.write` does."""
        return await self._move(self._operations.write(meta, fields, tags, replace, timeout_s))

    async def get(
        self, meta: KVBatchMeta, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> Batch:
        """Read fields of the rows of a receipt (their keys and locations), as `DataPlaneClient.get` does."""
        return await self._move(self._operations.get(meta, fields, timeout_s))

    async def get_blobs(
        self, meta: KVBatchMeta, field: str, parts: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> BlobRows:
        """Read the blobs to which the rows of a receipt refer, as `DataPlaneClient.get_blobs` does."""
        return await self._move(self._operations.get_blobs(meta, field, parts, timeout_s))

    async def lookup(
        self,
        partition: str,
        keys: Keys,
        fields: Sequence[str] | None = None,
        *,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Return a receipt (keys and locations) for the rows with these keys, as `DataPlaneClient.lookup` does."""
        return await self._run(self._operations.lookup(partition, keys, fields, wait, timeout_s))

    async def rows(self, partition: str, keys: Keys | None = None, *, timeout_s: float | None = None) -> PartitionRows:
        """Return a list of the partition's rows without their content, as `DataPlaneClient.rows` does."""
        return await self._run(self._operations.rows(partition, keys, timeout_s))

    async def get_keys(
        self, partition: str, keys: Keys, fields: Sequence[str], *, timeout_s: float | None = None
    ) -> Batch:
        """Read fields of the rows with these keys, as `DataPlaneClient.get_keys` does."""
        return await self._move(self._operations.get_keys(partition, keys, fields, timeout_s))

    async def tag(self, partition: str, keys: Keys, tags: Tags, *, timeout_s: float | None = None) -> None:
        """Set tags of existing rows without writing a field, as `DataPlaneClient.tag` does."""
        await self._run(self._operations.tag(partition, keys, tags, timeout_s))

    async def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        n: int,
        *,
        at_least: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        max_version: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Wait for n rows that have all of `fields`, and lease them to this caller for `task`. Returns a receipt (their
        keys and locations), as `DataPlaneClient.claim` does."""
        return await self._move(
            self._operations.claim(
                partition, task, fields, n, at_least, whole_groups, min_version, max_version, arguments, timeout_s
            ),
        )

    async def renew(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Extend the lease on the rows of a receipt and keep renewing it, as `DataPlaneClient.renew` does. A lease is a
        consumer's exclusive hold."""
        await self._run(self._operations.renew(meta, timeout_s))

    async def release(self, meta: KVBatchMeta, task: str, outcome: Outcome, *, timeout_s: float | None = None) -> None:
        """End the lease (a consumer's exclusive hold) on the rows of a receipt, as `DataPlaneClient.release` does."""
        await self._run(self._operations.release(meta, task, outcome, timeout_s))

    async def leases(self, partition: str, *, timeout_s: float | None = None) -> tuple[LeaseStatus, ...]:
        """Return the leases on rows of a partition, as `DataPlaneClient.leases` does."""
        return await self._run(self._operations.leases(partition, timeout_s))

    async def revoke(self, partition: str, task: str, *, older_than_s: float, timeout_s: float | None = None) -> int:
        """End leases of a task and return how many rows they held, as `DataPlaneClient.revoke` does."""
        return await self._run(self._operations.revoke(partition, task, older_than_s, timeout_s))

    async def skip(
        self,
        partition: str,
        task: str,
        positions: Sequence[int] | np.ndarray,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Settle positions of the prompt stream whose prompts will not be put, as `DataPlaneClient.skip` does."""
        await self._run(self._operations.skip(partition, task, positions, timeout_s))

    async def reset(
        self, partition: str, task: str, keys: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TaskReset:
        """Make rows that `task` has finished claimable again, as `DataPlaneClient.reset` does."""
        return await self._run(self._operations.reset(partition, task, keys, timeout_s))

    async def free(self, partition: str, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Give back the bytes of rows but keep the rows, as `DataPlaneClient.free` does."""
        return await self._run(self._operations.free(partition, keys, timeout_s))

    async def clear(self, partition: str, keys: Keys | None = None, *, timeout_s: float | None = None) -> int:
        """Remove rows from a partition and return how many, as `DataPlaneClient.clear` does."""
        return await self._run(self._operations.clear(partition, keys, timeout_s))

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
        """Remove the rows that a claim with these arguments passes over as too old, and return their keys. It works
        like `DataPlaneClient.clear_stale`."""
        return await self._run(
            self._operations.clear_stale(partition, task, fields, min_version, whole_groups, timeout_s),
        )

    async def forget_unit(self, *units: str, timeout_s: float | None = None) -> dict[str, tuple[str, ...]]:
        """Remove the rows that were lost with a process of the store, as `DataPlaneClient.forget_unit` does."""
        return await self._run(self._operations.forget_unit(units, timeout_s))

    async def hosts_of(self, meta: KVBatchMeta) -> np.ndarray:
        """Return the host on which each row of a receipt is stored, as `DataPlaneClient.hosts_of` does."""
        return await self._carry_out(self._operations.hosts_of(meta))

    async def save(self, partition: str, path: str | os.PathLike[str], *, timeout_s: float | None = None) -> int:
        """Write a partition into one file and return how many rows it has, as `DataPlaneClient.save` does."""
        return await self._move(save(self._operations, partition, path, timeout_s))

    async def load(
        self, path: str | os.PathLike[str], partition: str | None = None, *, timeout_s: float | None = None
    ) -> str:
        """Register a partition that `save` wrote into a file, put its rows back and return its name. It works like
        `DataPlaneClient.load`."""
        return await self._move(load(self._operations, path, partition, timeout_s))

    async def status(self, partition: str | None = None, *, timeout_s: float | None = None) -> DataPlaneStatus:
        """Return the numbers of rows, leases and bytes at this moment, as `DataPlaneClient.status` does."""
        return await self._run(self._operations.status(partition, timeout_s))

    async def task_status(
        self, partition: str, task: str, fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TaskStatus:
        """Return the progress of a task, as `DataPlaneClient.task_status` does."""
        return await self._run(self._operations.task_status(partition, task, fields, timeout_s))

    async def close(self) -> None:
        """Disconnect from the directory (the metadata service) and the store, as `DataPlaneClient.close` does."""
        if self._closed:
            return
        await self._carry_out(self._operations.close())
        self._closed = True
        self._threads.shutdown(wait=False)
        for link in self._links:
            await link.detach_async()

    async def __aenter__(self) -> AsyncDataPlaneClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, steps: Steps[T]) -> T:
        return await self._carry_out(self._counted(steps))

    async def _move(self, steps: Steps[Moved[T]]) -> T:
        moved: Moved[T] | None = None
        try:
            moved = await self._carry_out(self._counted(steps))
            return moved.result
        except BaseException:  # A signal's handler can raise between the end of the operation and the return.
            if moved is not None and moved.undo is not None:
                await self._carry_out(moved.undo())
            raise

    async def _carry_out(self, steps: Steps[T]) -> T:
        """Run the steps of an operation one after another and return its result. Requests to the directory (the
        metadata service) run on the event loop; work that can block runs in a thread."""
        answer: Any = None
        failure: BaseException | None = None
        try:
            while True:
                step = steps.send(answer) if failure is None else steps.throw(failure)
                answer, failure = None, None
                try:
                    if isinstance(step, Work):
                        answer = await self._in_thread(step)
                    elif isinstance(step, Ask):
                        answer = await (self._uncancelled(step) if step.undoes else self._ask(step))
                except BaseException as error:  # The operation undoes its work, also after CancelledError.
                    failure = error
        except StopIteration as end:
            return end.value
        finally:
            failure = None  # A cycle through the traceback would keep the operation's receipts alive.

    async def _ask(self, step: Ask) -> bytes:
        started = time.monotonic()
        reply = await step.link.call_async(step.op, step.payload, step.timeout_s, step.undo)
        return self._body(step, reply, time.monotonic() - started)

    async def _uncancelled(self, step: Ask) -> bytes:
        """Send a request that undoes an earlier one. A cancellation of the caller does not end the wait, because the
        caller's error is raised anyway."""
        task = asyncio.ensure_future(self._ask(step))
        await wait_out(task, math.inf)
        return task.result()

    async def _in_thread(self, work: Work) -> Any:
        """Run `work` in one of the client's threads and return its result.

        Raises DataPlaneTimeout when no thread becomes free before the work's deadline, and DirectoryLost when the
        client is closed. When the caller is cancelled, the call first waits for work that has begun, because a block
        must not be freed while it is being written.
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
                        f"no thread was free: {self._threads._max_workers} other calls of this client use them",
                        op=work.op,
                        elapsed_s=time.monotonic() - started,
                    )
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if call.cancel():  # The call has not begun.
                raise
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # A second cancellation changes nothing; the store's time limit ends this wait.
            if not future.cancelled():
                # Reading the exception marks it as retrieved; the caller gets the cancellation instead.
                future.exception()
            raise
