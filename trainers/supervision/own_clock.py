"""Counts the time in which a process ran itself. If it judges others, the time in which it was away must not count."""

from __future__ import annotations

import time

MOST_S = 5.0
"""Largest number of seconds that count between two readings of an `OwnClock`."""


class OwnClock:
    """A clock that stands still while its process does. It is monotonic, and indifferent to changes of the date.

    The process can be stopped (SIGSTOP, a debugger), swapped out, or starved of its CPU. If the clock is read often,
    a long pause between two readings means just that, and at most MOST_S seconds of the pause count. A suspended host
    needs no care, because `time.monotonic()` does not count that time.
    """

    def __init__(self, now_s: float = 0.0, most_s: float = MOST_S) -> None:
        """Begin at `now_s` seconds. most_s: largest number of seconds that count between two readings."""
        self._now_s = now_s
        self._most_s = most_s
        self._read_s = time.monotonic()
        self._was_away = False

    def now_s(self) -> float:
        """Return the seconds counted so far."""
        read_s, self._read_s = self._read_s, time.monotonic()
        passed_s = self._read_s - read_s
        self._was_away |= passed_s > self._most_s
        self._now_s += min(passed_s, self._most_s)
        return self._now_s

    def was_away(self) -> bool:
        """Return whether the process was away between two readings since the last call of this method."""
        away, self._was_away = self._was_away, False
        return away

    def turn_back(self, now_s: float) -> None:
        """Continue from `now_s` seconds, so that the time since then does not count."""
        self._now_s = now_s
