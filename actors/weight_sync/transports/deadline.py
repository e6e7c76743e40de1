"""`Deadline` limits how long the sender or a receiver of an update waits, and builds the errors of waits that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .protocol import WeightTransferError

TICK_S = 0.0005
"""Seconds between two checks of another process's progress."""


class Deadline:
    """Limits how long the sender or a receiver of one update may wait without progress. The update as a whole may take
    any time, as long as buckets keep coming."""

    def __init__(self, end: str, version: int, timeout_s: float) -> None:
        """Create a deadline whose timeout starts now. end: name of the process that waits, for errors. timeout_s:
        longest time without progress, in seconds."""
        self.end = end
        self.version = version
        self.timeout_s = timeout_s
        self._started = self._moved = time.monotonic()
        self._stopped = False

    def moved(self) -> None:
        """Restart the timeout. Call it after progress, and after time that was spent working rather than waiting."""
        self._moved = time.monotonic()

    def stop(self) -> None:
        """Make all waits fail at once. Meant to be called from a thread other than the waiting one."""
        self._stopped = True

    @property
    def elapsed_s(self) -> float:
        """Seconds since the deadline was created."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Seconds left before a wait without progress fails; 0.0 when the time is over or `stop` was called."""
        return 0.0 if self._stopped else max(0.0, self.timeout_s - (time.monotonic() - self._moved))

    def error(self, what: str, engines: Sequence[str] = ()) -> WeightTransferError:
        """Return an error that says what failed, in which version, and after how many seconds. engines: names of the
        engines known to be at fault."""
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
        """Wait until `ready()` is true, checking every `tick_s` seconds. At the deadline, raise WeightTransferError.
        late: function that returns what is missing and the names of the engines at fault, for that error."""
        while not ready():
            if not self.left_s:
                what, engines = late()
                raise self.error(what, engines)
            time.sleep(tick_s)


def worker_name(engine: str, worker: int) -> str:
    """Return the name of one worker process of an engine, for errors."""
    return f"{engine} worker {worker}"
