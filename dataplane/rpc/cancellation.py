"""Lets one thread end the wait of another thread for the directory's answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallCancelled(Exception):
    """A request was cancelled before it took effect, because its caller was interrupted. Never leaves the client."""


class Cancellation:
    """Lets one thread cancel the request for whose answer another thread waits. Thread-safe."""

    def __init__(self) -> None:
        self.requested = False
        self._lock = threading.Lock()
        self._cancel: Callable[[], None] | None = None

    def request(self) -> None:
        """Cancel the request in progress, if it waits for rows or space, and all later ones."""
        with self._lock:
            self.requested = True
            if self._cancel is not None:
                self._cancel()

    @contextmanager
    def applies(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call `cancel`, which must not raise, as soon as the cancellation is requested within the context."""
        with self._lock:
            self._cancel = cancel
            if self.requested:
                cancel()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None
