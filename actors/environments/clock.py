"""`Clock` limits the time that an environment takes in an episode, and `Gate` the number of episodes at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from ..engines.protocol import Generator
from ..engines.router import Router


class Clock:
    """Limits the time that an environment takes in an episode, by turn and in all.

    It stands still while the policy generates, because a slow or paused engine is no fault of the environment.
    """

    def __init__(self, turn_s: float, episode_s: float) -> None:
        """turn_s: seconds that the environment may take between two turns of the policy. episode_s: seconds that it may
        take in the whole episode."""
        self._turn_s = turn_s
        self._episode_s = episode_s
        self._spent_s = 0.0  # in earlier turns
        self._since = time.monotonic()
        self._generating = 0

    def restart(self) -> None:
        """Begin to count now, when the episode begins."""
        self._since = time.monotonic()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Context manager in which the policy generates. Several may be open at the same time."""
        if not self._generating:
            self._spent_s += time.monotonic() - self._since
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds after which the environment may be out of time. While the policy generates, no less than the smaller
        bound, so that it must be asked again then."""
        if self._generating:
            return max(0.001, min(self._turn_s, self._episode_s - self._spent_s))
        taken_s = time.monotonic() - self._since
        return min(self._turn_s, self._episode_s - self._spent_s) - taken_s

    @property
    def exceeded(self) -> str:
        """Text that names the bound that an environment without time left has exceeded."""
        if self._episode_s - self._spent_s < self._turn_s:
            return f"it took longer than environment.episode_timeout_s={self._episode_s:g} s in all"
        return f"it took longer than environment.turn_timeout_s={self._turn_s:g} s for one turn"


class Gate:
    """Limits the number of episodes that run at the same time, in proportion to the engines that can answer.

    With half of the engines gone, half as many episodes may run; those that run already continue, and one always may.
    """

    def __init__(self, most: int) -> None:
        """most: largest number of episodes when all engines can answer."""
        self._most = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.running = 0
        """Number of episodes that run now."""

    def allowed(self, engine: Generator) -> int:
        """Return how many episodes may run now."""
        share = engine.available_share if isinstance(engine, Router) else 1.0
        return max(1, int(self._most * share))

    @asynccontextmanager
    async def place(self, engine: Generator) -> AsyncIterator[None]:
        """Context manager for one episode; waits until it may begin. Episodes begin in the order in which they came."""
        while self.running >= self.allowed(engine):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    self._waiting.remove(turn)
                else:
                    self._wake()  # the place goes to the next
                raise
        self.running += 1
        if self.running < self.allowed(engine):
            self._wake()  # more than one place is free when engines have come back
        try:
            yield
        finally:
            self.running -= 1
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
