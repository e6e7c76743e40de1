"""Bounded waits of one end of an update, and the errors that they end in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .protocol import WeightTransferError

TICK_S = 0.0005
"""Between two looks at what another process is to do."""


class Deadline:
    """The time that one end of an update may take for all its waits together."""

    def __init__(self, end: str, version: int, timeout_s: float) -> None:
        """end: who waits, for errors."""
        self.end = end
        self.version = version
        self.timeout_s = timeout_s
        self._started = time.monotonic()
        self._stopped = False

    def stop(self) -> None:
        """Time is up: whoever waits raises at once. For another thread."""
        self._stopped = True

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return 0.0 if self._stopped else max(0.0, self.timeout_s - self.elapsed_s)

    def error(self, what: str, engines: Sequence[str] = ()) -> WeightTransferError:
        """engines: those known to be at fault."""
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
        """Until `ready`. late: what is missing, and which engines are at fault, for the error when time is up."""
        while not ready():
            if not self.left_s:
                what, engines = late()
                raise self.error(what, engines)
            time.sleep(tick_s)


def worker_name(engine: str, worker: int) -> str:
    """What errors call one process of an engine."""
    return f"{engine} worker {worker}"
