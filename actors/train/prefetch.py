"""A thread that makes a pass's items ahead of their use, in order, a bounded number of them at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CHECK_S = 1.0
"""How often a waiting consumer looks whether the thread is still there."""


class PrefetchStopped(Exception):
    """Raised inside `make` when the pass was given up: the thread then ends."""


class Prefetch(Generic[T]):
    """Items 0 to count - 1 of `make`, made by one thread of its own.

    `make` is called with an item's number and an event that is set when the pass is given up: everything in it that
    waits must be bounded, and must end soon once the event is set. An item is begun only while fewer than `depth` are
    waiting to be taken, so `depth` items at most are ready or in the making.
    """

    def __init__(self, make: Callable[[int, threading.Event], T], count: int, *, depth: int, name: str) -> None:
        assert depth >= 1, depth
        self._make = make
        self._count = count
        self._depth = depth
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._taken = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether all items have been taken."""
        return self._taken == self._count

    def take(self) -> T:
        """The next item; blocks until it is made. Raises what `make` raised for it."""
        with self._changed:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if not self._changed.wait(CHECK_S) and not self._thread.is_alive() and not self._ready:
                    raise RuntimeError(f"{self._thread.name}: ended before item {self._taken} of {self._count}")
            self._taken += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self, timeout_s: float) -> bool:
        """Give up what has not been made. Idempotent. Returns whether the thread has ended within `timeout_s`."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for number in range(self._count):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._stop.is_set())
                if self._stop.is_set():
                    raise PrefetchStopped
                item = self._make(number, self._stop)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
