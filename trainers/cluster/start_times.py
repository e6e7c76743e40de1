"""Records when each part of a run's start ends, for the run's metrics and one line of output."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil


class StartTimes:
    """Times at which the parts of one start ended, in seconds since the start began. Parts run in parallel, so the
    times do not add up."""

    def __init__(self, began_s: float | None = None) -> None:
        """Begin now, or at the Unix time `began_s`."""
        self._began_s = time.time() if began_s is None else began_s
        self._marks: dict[str, float] = {}

    @staticmethod
    def of_process() -> StartTimes:
        """Return times that count from the start of the calling process, so that they include its imports."""
        return StartTimes(psutil.Process().create_time())

    def mark(self, part: str) -> None:
        """Record that `part` of the start has just ended."""
        self._marks[part] = round(time.time() - self._began_s, 2)

    def figures(self) -> Mapping[str, float]:
        """Return the times as metrics: `start/PART_s` -> seconds. PART is in lower case with underscores for spaces."""
        return {f"start/{part.lower().replace(' ', '_')}_s": moment for part, moment in self._marks.items()}

    def __str__(self) -> str:
        return f"started in {max(self._marks.values(), default=0.0):.1f} s"
