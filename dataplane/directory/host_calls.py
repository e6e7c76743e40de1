"""Calls the store's host (its part in this process) for the directory service, in a thread if calls can wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..block_store import Cuts, FreesMany, FreesSoon, HasHolders, StartsUnits, StoreHost, holder_of
from ..errors import CapacityExceeded, DirectoryLost, StoreLost
from .block_table import FreedBlock, Reservation


class HostCalls:
    """Makes the calls to the host of one store (the store's part in the directory's process). All methods must be
    called from the service's event loop."""

    def __init__(self, host: StoreHost, space_freed: Callable[[], None]) -> None:
        """space_freed: function that is called whenever blocks or reservations have been removed from the store."""
        self.spec = host.spec
        self.is_remote = isinstance(host, FreesMany)
        """True when calls to the host are round trips. They are then made in a worker thread, because claims must not
        wait for a slow store."""
        self._host = host
        # The protocols are checked only once, because isinstance looks up every attribute of a protocol at each call.
        self._cuts = host if isinstance(host, Cuts) else None
        self._frees_many = host if isinstance(host, FreesMany) else None
        self._frees_soon = host if isinstance(host, FreesSoon) else None
        self._holders = host if isinstance(host, HasHolders) else None
        self.dead: dict[int, str] = {}
        """Names of the store's processes whose blocks `newly_dead` has reported as lost, by number."""
        self._space_freed = space_freed
        self._to_free: list[FreedBlock] = []
        """Blocks that the next batch frees. It takes one round trip for all that were freed while the batch before it
        was under way."""
        self._next_batch: asyncio.Future[None] | None = None
        self._freeing = False
        """Whether a batch is under way."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store-host")
        self._under_way: set[asyncio.Task[None]] = set()
        self._readying: Future[None] | None = None
        self._closed = False

    # ---------------- These methods allocate space.

    async def allocate(self, reservation: Reservation) -> bool:
        """Allocate a reservation's space in the store. Returns False when the store has no room at the moment. If this
        call is cancelled, the space is given back to the store."""
        call = self._in_thread(self._host.allocate, reservation.block_ids.start, reservation.nbytes)
        under_way = asyncio.ensure_future(call)
        try:
            reservation.location = await asyncio.shield(under_way)
        except asyncio.CancelledError:
            under_way.add_done_callback(lambda _: self.take_back([reservation]))
            raise
        return reservation.location is not None

    def allocate_at_once(self, reservation: Reservation) -> bool:
        """Allocate a reservation's space if this takes no time, and return whether it did. If not, `allocate` may still
        find room."""
        first, nbytes = reservation.block_ids.start, reservation.nbytes
        if self._frees_many is not None:
            reservation.location = b"" if self._frees_many.count(first, nbytes) else None
        elif self._cuts is None or self._cuts.has_ready(nbytes):
            reservation.location = self._host.allocate(first, nbytes)
        return reservation.location is not None

    def allocate_ready(self, reservation: Reservation) -> bool:
        """Allocate space for a reservation if the store can do so at once, and return whether it did. Otherwise the
        store prepares such space in the background for a later put. For a store that locates blocks only after the
        write, nothing is allocated and the result is True."""
        if self._cuts is not None:
            if not self._cuts.has_ready(reservation.nbytes):
                if self._readying is None or self._readying.done():
                    # The space will be ready for a later put.
                    self._readying = self._thread.submit(self._cuts.make_ready, reservation.nbytes)
                return False
            reservation.location = self._host.allocate(reservation.block_ids.start, reservation.nbytes)
            return reservation.location is not None
        return True

    def locate(self, written: Sequence[bytes] | None) -> Callable[[range, Sequence[int]], Sequence[bytes]]:
        """Return the function that locates a put's blocks: (block ids, their sizes) -> locations. written: the
        locations that the store returned to the writer; None if it returned none."""

        def of(block_ids: range, sizes: Sequence[int]) -> Sequence[bytes]:
            if self._cuts is not None:
                return self._cuts.cut(block_ids.start, sizes)
            if written is None or len(written) != len(sizes):
                raise ValueError(f"commit: got {written and len(written)} locations, expected {len(sizes)}")
            self._check_held(written)
            if not self.is_remote:
                self._count(block_ids, sizes)
            return written

        return of

    def count_at_once(self, reservation: Reservation, sizes: Sequence[int]) -> bool:
        """Report the sizes of a put's blocks as `count` does, if this takes no time. Returns whether it did; if not,
        `count` must be called."""
        counts, block_ids = self._frees_many, reservation.block_ids[: len(sizes)]
        return counts is None or all(map(counts.count, block_ids, sizes))

    async def count(self, reservation: Reservation, sizes: Sequence[int]) -> None:
        """Report the sizes of a put's blocks to a store with round trips (`is_remote`), just before the commit. Raises
        CapacityExceeded if the store has no room for one of them."""
        await self._in_thread(self._count, reservation.block_ids[: len(sizes)], sizes)

    def _check_held(self, locations: Sequence[bytes]) -> None:
        """Raise StoreLost if a process that holds one of a put's blocks has died since it was written."""
        for location in locations if self.dead else ():
            name = self.dead.get(holder_of(location))
            if name is not None:
                raise StoreLost("the process that holds the rows of this put has died", op="put", peer=name)

    def _count(self, block_ids: Sequence[int], sizes: Sequence[int]) -> None:
        for block_id, nbytes in zip(block_ids, sizes, strict=True):
            if self._host.allocate(block_id, nbytes) is None:
                raise CapacityExceeded(f"the store has no room for block {block_id} of {nbytes} bytes", op="put")

    # ---------------- These methods free blocks.

    def free(self, blocks: Sequence[FreedBlock]) -> asyncio.Future[None] | None:
        """Delete blocks from the store. If the result is None, they are gone; otherwise they are gone when the returned
        future is done."""
        if not blocks or self._closed:  # Closing the store frees its blocks.
            return None
        self._to_free += blocks
        if not self.is_remote:
            self._free(self._taken())
            self._space_freed()
            return None
        batch = self._next_batch = self._next_batch or asyncio.get_running_loop().create_future()
        if not self._freeing:
            self._start_batch()
        return batch

    def _start_batch(self) -> None:
        blocks, batch, self._next_batch = self._taken(), self._next_batch, None
        assert batch is not None
        self._freeing = True

        def done(gone: bool) -> None:
            if gone:
                self._end_batch(batch)
            else:
                self._started(self._free_in_thread(blocks, batch))

        if self._frees_soon is None or not self._frees_soon.free_soon(blocks, done):
            done(False)

    async def _free_in_thread(self, blocks: Sequence[tuple[int, bytes]], batch: asyncio.Future[None]) -> None:
        try:
            if not self._closed:
                await self._in_thread(self._free, blocks)
        except asyncio.CancelledError:
            batch.cancel()
            raise
        except Exception as error:
            batch.set_exception(error)
        self._end_batch(batch)

    def _end_batch(self, batch: asyncio.Future[None]) -> None:
        if not batch.done():
            batch.set_result(None)
        if not self._closed:
            self._space_freed()  # It may free further blocks.
        self._freeing = False
        if self._next_batch is not None:
            self._start_batch()

    def _taken(self) -> list[tuple[int, bytes]]:
        blocks, self._to_free = self._to_free, []
        return [(block.block_id, block.location) for block in blocks]

    def take_back(self, reservations: Sequence[Reservation]) -> asyncio.Task[None] | None:
        """Free the space of cancelled reservations in the store, with all that their writers have written there.
        Returns a task to wait for, or None when the space is free already."""
        if not reservations or self._closed:
            return None
        if not self.is_remote:
            self._take_back(reservations)
            self._space_freed()
            return None

        async def later() -> None:
            if self._closed:  # Closing the store has freed the blocks.
                return
            await self._in_thread(self._take_back, reservations)
            self._space_freed()

        return self._started(later())

    def _started(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(call)
        self._under_way.add(task)  # The event loop itself holds no reference to the task.
        task.add_done_callback(self._under_way.discard)
        return task

    def _free(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        if self._frees_many is not None:
            self._frees_many.free_many(blocks)
            return
        for block_id, location in blocks:
            self._host.free(block_id, location)

    def _take_back(self, reservations: Sequence[Reservation]) -> None:
        blocks: list[tuple[int, bytes]] = []
        for reservation in reservations:
            first, *others = reservation.block_ids
            if self._cuts is not None:
                others.clear()  # The space is one block until it is cut.
            elif reservation.location is None:
                others.insert(0, first)
            for block_id in others:
                self._host.allocate(block_id, 0)  # The block may have been written, or still be in transit.
            blocks += [(block_id, b"") for block_id in sorted({first, *others})]
        self._free(blocks)

    # ---------------- These methods concern the store as a whole.

    async def usage(self) -> tuple[int, int]:
        """Return the bytes that the store holds, and how many of them belong to blocks that have been freed. The
        store's processes are asked for a sign of life first."""

        def ask() -> tuple[int, int]:
            if self._holders is not None:
                self._holders.look()
            unfreed_bytes = self._host.unfreed_bytes()  # This call comes first, because it can free blocks.
            return self._host.usage_bytes(), unfreed_bytes

        found = await self._in_thread(ask)
        if self._holders is not None and len(self._holders.dead) > len(self.dead):
            self._space_freed()
        return found

    async def look(self, declared_dead: Sequence[str] = ()) -> None:
        """Ask the store's processes for a sign of life. `newly_dead` then returns those that have died. declared_dead:
        names for `HasHolders.declare_dead`."""
        if self._holders is not None:
            for named in declared_dead:
                await self._in_thread(self._holders.declare_dead, named)
            await self._in_thread(self._holders.look)

    def lacks_unit(self, node: str) -> bool:
        """Return whether a unit of the store should be started on a node of the Ray cluster."""
        return isinstance(self._host, StartsUnits) and self._host.lacks_unit(node)

    def newly_dead(self) -> dict[int, str]:
        """Return the names of the store's processes that have been found dead since the last call, by number."""
        found = {} if self._holders is None else dict(self._holders.dead)
        new = {number: name for number, name in found.items() if number not in self.dead}
        self.dead |= new
        return new

    async def shortage(self) -> str:
        """Return why the store itself has no room; "" if it knows no reason besides the directory's limit on bytes."""
        return await self._in_thread(self._host.shortage)

    async def close(self) -> None:
        """Close the store host and the worker thread. Idempotent."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._host.close)
            self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._closed:
            raise DirectoryLost("the data plane is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
