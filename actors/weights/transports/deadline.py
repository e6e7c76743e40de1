"""`Deadline` limits each wait of one end of an update, and makes the errors of waits that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .protocol import WeightTransferError

TICK_S = 0.0005
"""Seconds between two checks of another process's progress."""


class Deadline:
    """Limits the time in which one end of an update may make no progress. However long the update takes as a whole, it
    goes on as long as buckets come and go."""

    def __init__(self, end: str, version: int, timeout_s: float) -> None:
        """Start the clock. end: name of the end that waits, for errors. timeout_s: longest time without progress."""
        self.end = end
        self.version = version
        self.timeout_s = timeout_s
        self._started = self._moved = time.monotonic()
        self._stopped = False

    def moved(self) -> None:
        """Note progress, or the end of work that was no wait: from now on the whole time is left again."""
        self._moved = time.monotonic()

    def stop(self) -> None:
        """End all waits at once with an error. Called by another thread."""
        self._stopped = True

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was started."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds left until the deadline, unless there is progress before; 0.0 after it."""
        return 0.0 if self._stopped else max(0.0, self.timeout_s - (time.monotonic() - self._moved))

    def error(self, what: str, engines: Sequence[str] = ()) -> WeightTransferError:
        """Make the error that says `what` failed. engines: names of those known to be at fault."""
        what += " (given up here)" if self._stopped else ""
        error = WeightTransferError(f"weights: version {self.version}: {self.end}: {what} after {self.elapsed_s:.1f} s")
        error.engines = tuple(dict.fromkeys(engines))
        return error

    def wait(
        self,
        ready: Callable[[], bool],
        late: Callable[[], tuple[str, Sequence[str]]],
        tick_s: float = TICK_S,
    ) -> None:
        """Wait until `ready`. late: returns what is missing and which engines are at fault, for the error at the
        deadline."""
        while not ready():
            if not self.left_s:
                what, engines = late()
                raise self.error(what, engines)
            time.sleep(tick_s)


def worker_name(engine: str, worker: int) -> str:
    """Return the name of one process of an engine, for errors."""
    return f"{engine} worker {worker}"
