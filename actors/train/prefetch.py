"""Produces the items of a pass in a background thread, in order, with a bounded number of them ready at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

CHECK_S = 1.0
"""Seconds between two checks, by a waiting consumer, that the thread is still alive."""


class PrefetchStopped(Exception):
    """Raised in the background thread, also by `make`, when the pass was given up; it ends the thread."""


class Prefetch(Generic[T]):
    """Calls `make` for items 0 to count - 1, in order, in one background thread.

    `make` is called with an item's number and an event that is set when the pass is given up. Everything in it that
    blocks must be bounded, and must end soon after the event is set. The thread starts an item only while fewer than
    `depth` items wait to be taken, so at most `depth` items are ready or being made.
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
        """True if all items have been taken."""
        return self._taken == self._count

    def take(self) -> T:
        """Return the next item, blocking until it is ready. Raises what `make` raised for the item."""
        with self._changed:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if not self._thread.is_alive():  # and will say nothing: that takes the lock, which is held here
                    raise RuntimeError(f"{self._thread.name}: ended before item {self._taken} of {self._count}")
                self._changed.wait(CHECK_S)
            self._taken += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self, timeout_s: float) -> bool:
        """Give up the remaining items, and return whether the thread ended within `timeout_s` seconds. Idempotent."""
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
