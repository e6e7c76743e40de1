"""Provides what waiting requests use: `Pulse`, a repeating event, and `Queue`, a first-come-first-served lock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Pulse:
    """Lets coroutines wait for a recurring event.

    A waiter passes the `count` that it saw before it checked its condition, so that no event between the check and the
    wait is missed.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of times that the event has happened."""
        self._waiters: dict[asyncio.Future[None], None] = {}
        """Futures of the waiting coroutines, in the order in which they came."""

    async def wait(self, seen: int) -> None:
        """Wait for the next event. Returns at once if `count` is no longer `seen`, as an event has happened since."""
        if self.count == seen:
            future = asyncio.get_running_loop().create_future()
            self._waiters[future] = None
            try:
                await future
            finally:
                self._waiters.pop(future, None)  # it is still there if the wait was cancelled

    def fire(self) -> None:
        self.count += 1
        if self._waiters:
            waiters, self._waiters = self._waiters, {}
            for future in waiters:
                if not future.done():
                    future.set_result(None)


class Queue:
    """Serves callers one at a time, first come, first served; used for waiting puts and claims."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._places: list[Place] = []

    @property
    def waiting(self) -> int:
        """Number of callers in the queue, including the one whose turn it is. A caller may skip the queue when it is
        0."""
        return len(self._places)

    @contextmanager
    def place(self, wants: str) -> Iterator[Place]:
        """Join the queue for as long as the context lasts. wants: text that says what this caller waits for; the
        timeout errors of the callers behind it quote it."""
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
