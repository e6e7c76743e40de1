"""Lets requests wait for their turn, and puts wait for space.

A put needs space both in the directory's count of bytes and in the store. Puts of a host get space in their order of
arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from ..errors import CapacityExceeded, DataPlaneTimeout, DirectoryLost
from .block_table import Reservation
from .calls import PutRows
from .directory import Directory
from .host_calls import HostCalls


class Pulse:
    """Lets coroutines wait for a recurring event. A waiter reads `count` before it checks its condition, and passes it
    to `wait`, so that it misses no event between the check and the wait.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of times that the event has happened."""
        self._waiters: dict[asyncio.Future[None], None] = {}
        """Futures of the waiting coroutines, in the order in which they came."""

    async def wait(self, seen: int) -> None:
        """Wait for the next event. Returns at once if an event has happened since `count` had the value `seen`."""
        if self.count == seen:
            future = asyncio.get_running_loop().create_future()
            self._waiters[future] = None
            try:
                await future
            finally:
                self._waiters.pop(future, None)  # After a cancelled wait the entry is still there.

    def fire(self) -> None:
        self.count += 1
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for future in waiters:
                if not future.done():
                    future.set_result(None)


class Queue:
    """Serves callers one at a time, first come, first served. Waiting puts and claims use it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._places: list[Place] = []

    @property
    def waiting(self) -> int:
        """Number of callers in the queue, including the one whose turn it is. A caller can skip the queue when it is
        0."""
        return len(self._places)

    @contextmanager
    def place(self, wants: str) -> Iterator[Place]:
        """Join the queue for as long as the context lasts. wants: text that says what this caller waits for. The
        timeout errors of later callers quote it."""
        place = Place(self._lock, wants)
        self._places.append(place)
        try:
            yield place
        finally:
            self._places.remove(place)

    def before(self, place: Place, what: str) -> str:
        """Describe the callers ahead of `place`, for a timeout error; "" when there are none. what: noun for these
        callers, such as "claim"."""
        ahead = self._places.index(place)
        if not ahead:
            return ""
        first = self._places[0].wants
        return (
            f", behind 1 {what} that waits for {first}"
            if ahead == 1
            else (f", behind {ahead} {what}s, of which the first waits for {first}")
        )


class Place:
    """Represents one caller's place in a `Queue`."""

    def __init__(self, lock: asyncio.Lock, wants: str) -> None:
        self.turn = lock
        """Lock that a caller holds during its turn. The whole queue shares it, and callers get it in the order in which
        they ask for it."""
        self.wants = wants


LOOK_AGAIN_S = 0.25
"""Seconds after which a waiting put checks again whether a writer, another process or another program still holds the
memory."""


class PutSpace:
    """Reserves space for the puts of one directory service. All methods must be called from the service's event
    loop."""

    def __init__(self, directory: Directory, store: HostCalls, freed: Pulse) -> None:
        """freed: event that is fired whenever blocks or reservations have been removed from the store."""
        self._directory = directory
        self._store = store
        self._freed = freed
        self._queues: dict[int | None, Queue] = defaultdict(Queue)
        """Queue of the puts from each host, so that a full host does not make the writers of others wait."""
        self.usual: dict[str, tuple[int, int]] = {}
        """Numbers of bytes and blocks that the last put of each partition expects of the next one."""
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Number of puts that wait for space or for their turn."""
        return sum(queue.waiting for queue in self._queues.values())

    def close(self) -> None:
        """Make the waiting puts fail with DirectoryLost. Idempotent."""
        self._closed = True
        self._freed.fire()

    def reserve_at_once(self, put: PutRows) -> Reservation | None:
        """Reserve space for a put if that takes no time. Returns None if the put has to wait, for its turn or for room,
        so that `reserve` must be called. Raises the errors of `Directory.check`."""
        room = self._directory.blocks.near_room(put.near)
        if self._queues[room].waiting or room is None:
            self._directory.check(put)
            return None
        reservation = self._directory.reserve(put, _now(), room)
        if reservation is not None and not self._store.allocate_at_once(reservation):
            self._directory.abort(reservation.reservation_id)
            return None
        return reservation

    async def reserve(self, put: PutRows, timeout_s: float) -> Reservation:
        """Reserve space for a put that has passed the directory's check, once it is its turn and there is room. Raises
        CapacityExceeded after `timeout_s` seconds, and DirectoryLost when the service is closed meanwhile."""
        deadline, queue = _now() + timeout_s, self._queues[self._directory.blocks.near_room(put.near)]
        with queue.place(f"{put.nbytes} bytes for {put.writer}") as place:
            try:
                async with _turn(place, deadline):
                    while True:
                        seen = self._freed.count
                        reservation = await self._try_reserve(put)
                        if reservation is not None:
                            return reservation
                        async with asyncio.timeout_at(deadline):
                            _, unfreed_bytes = await self._store.usage()
                        # The call of `usage` also frees the space of ended writers, so the attempt is repeated.
                        if not unfreed_bytes and (reservation := await self._try_reserve(put)) is not None:
                            return reservation
                        refused = self._directory.blocks.has_room(
                            put.nbytes, put.near
                        )  # Only the store refused; /dev/shm may be full.
                        await self._wait_for_space(seen, deadline, look_again=refused or unfreed_bytes > 0)
            except TimeoutError:
                raise await self._no_room(put, queue.before(place, "put"), timeout_s) from None

    async def _no_room(self, put: PutRows, before: str, timeout_s: float) -> CapacityExceeded:
        """Build the error for a put that found no space in time. before: description of the puts ahead of it in the
        queue; "" when it was this put's turn."""
        message = f"no room for {put.nbytes} bytes: {self._directory.blocks.described_room(put.near)}{before}"
        if not before and self._directory.blocks.has_room(put.nbytes, put.near):
            reason = await self._store.shortage()
            message += f"; {reason}" if reason else ""
        return CapacityExceeded(message, op="put", partition=put.partition, keys=put.keys, elapsed_s=timeout_s)

    async def _try_reserve(self, put: PutRows) -> Reservation | None:
        """Reserve space for a put, both in the directory's count of bytes and in the store. Credit (space granted to
        writers in advance) is revoked if necessary. Returns None when even that does not free enough."""
        reservation = None
        for room in self._directory.blocks.rooms_for(put.near):
            reservation = self._directory.reserve(put, _now(), room)
            if reservation is None:
                await self.take_back(self._directory.revoke(put.nbytes, room))
                reservation = self._directory.reserve(put, _now(), room)
            if reservation is not None:
                break
        if reservation is None:
            return None
        try:
            granted = await self._store.allocate(reservation)
            if not granted and (revoked := self._directory.revoke(None)):
                await self.take_back(revoked)
                granted = await self._store.allocate(reservation)
        except BaseException:
            self._directory.abort(reservation.reservation_id)
            raise
        if not granted:
            self._directory.abort(reservation.reservation_id)
            return None
        try:
            return self._directory.reservation(reservation.reservation_id)
        except DataPlaneTimeout:  # The reservation expired while the store allocated.
            self._store.take_back([reservation])
            raise

    async def _wait_for_space(self, seen: int, deadline: float, *, look_again: bool) -> None:
        """Wait until space is freed. Returns at once if space was freed since the count of these events was `seen`.
        Raises TimeoutError at the deadline.

        look_again: whether to return after LOOK_AGAIN_S at the latest, because memory held by a stopped process, a
        dying writer or another program becomes free without any call.
        """
        if not self._closed:  # A closed service sends no more events.
            async with asyncio.timeout_at(deadline):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S if look_again else None):
                        await self._freed.wait(seen)
        if self._closed:
            raise DirectoryLost("the data plane was closed while this call waited")

    def grant(self, writer: str, near: int, nbytes: int, num_blocks: int) -> Reservation | None:
        """Reserve space for the next put of a writer in advance (credit). Returns None when another put of its host
        waits for space, or when too little space is free. near: number of a process of the store on that host."""
        room = self._directory.blocks.near_room(near)
        if self._queues[room].waiting:
            return None
        if room is None:
            [room, *_] = self._directory.blocks.rooms_for(near)
        credit = self._directory.grant(writer, nbytes, num_blocks, _now(), room)
        if credit is not None and not self._store.allocate_ready(credit):
            self._directory.abort(credit.reservation_id)
            return None
        return credit

    async def take_back(self, reservations: Sequence[Reservation]) -> None:
        """Give the space of cancelled reservations back to the store, and wait until the store has freed it."""
        task = self._store.take_back(reservations)
        if task is not None:
            await asyncio.shield(task)


def _now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def _turn(place: Place, deadline: float) -> AsyncIterator[None]:
    """Wait for the caller's turn in a queue, and hold it within the context. The deadline limits only the wait, not
    the work in the context."""
    async with AsyncExitStack() as stack:
        async with asyncio.timeout_at(deadline):
            await stack.enter_async_context(place.turn)
        yield
