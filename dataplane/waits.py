"""What callers of one event loop wait for: events that happen again and again, and their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Pulse:
    """Something that happens again and again; none is missed between looking and waiting."""

    def __init__(self) -> None:
        self.count = 0
        """How often it has happened."""
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self, seen: int) -> None:
        """Until `count` is more than `seen`."""
        if self.count == seen:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future

    def fire(self) -> None:
        self.count += 1
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for future in waiters:
                if not future.done():
                    future.set_result(None)


class Queue:
    """First come, first served."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.waiting = 0
        """Those in it, the one whose turn it is included. Who finds none need not queue."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for one's turn; it ends with the context."""
        self.waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self.waiting -= 1
