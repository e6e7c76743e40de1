"""A simulated engine: rows that decode side by side, each as fast as the engine's batch lets it."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np


class SimulatedEngine:
    """Rows advance together, a token in `decode_s + decode_row_s x rows running` seconds.

    Between changes (rows that join, pauses) all is known ahead: `_marks`, the engine's own clock in tokens, at which
    each row ends, and `_times`, when that is. So a row costs nothing but its part of a change.
    """

    def __init__(self, rows: int, decode_s: float, decode_row_s: float) -> None:
        self.rows = rows
        self.stamp = 0
        """Changes so far: what was foreseen under another stamp does not hold any more."""
        self._decode_s = decode_s
        self._decode_row_s = decode_row_s
        self._mark = 0.0
        self._since = 0.0
        """The engine's clock stood at `_mark` then, and goes on from there."""
        self._marks = np.empty(0)
        self._times: list[float] = []
        self._mark_list: list[float] = []
        self._groups: list[tuple[float, int]] = []
        """Heap of (mark at which its last row ends, group)."""
        self._busy_s = 0.0
        """Until `_since`."""

    def running(self, now: float) -> int:
        """Rows that decode at `now`."""
        return len(self._times) - bisect_right(self._times, now)

    def busy_s(self, now: float) -> float:
        """Seconds, up to `now`, in which rows decoded."""
        if not self._times:
            return self._busy_s
        return self._busy_s + max(0.0, min(now, self._times[-1]) - self._since)

    def join(self, now: float, groups: Sequence[int], lengths: np.ndarray) -> None:
        """Groups begin; lengths: float64 `[G, rows a group]`, their tokens."""
        self._settle(now, pause_s=0.0)
        ends = self._mark + lengths
        for group, last in zip(groups, ends.max(axis=1).tolist(), strict=True):
            heapq.heappush(self._groups, (last, group))
        self._foresee(np.sort(np.concatenate((self._marks, ends.reshape(-1)))))

    def pause(self, now: float, seconds: float) -> None:
        """Stand still for `seconds` from `now` on."""
        self._settle(now, pause_s=seconds)
        self._foresee(self._marks)

    def next_end(self) -> float:
        """When its next group ends; infinity when it has none."""
        if not self._groups:
            return math.inf
        return self._times[bisect_left(self._mark_list, self._groups[0][0])]

    def take_ended(self, now: float) -> list[int]:
        """The groups that have ended by `now`, each once; to be taken before anything is changed."""
        ended = []
        while self._groups and self.next_end() <= now:
            ended.append(heapq.heappop(self._groups)[1])
        return ended

    def room_at(self, now: float, rows: int) -> float:
        """When (`now` or later) it has room for `rows` more."""
        leaving = len(self._times) + rows - self.rows
        return now if leaving <= 0 else max(now, self._times[leaving - 1])

    def _settle(self, now: float, pause_s: float) -> None:
        """Bring the clock to `now`, drop the rows that have ended, go on after `pause_s`."""
        self._busy_s = self.busy_s(now)
        gone, running = bisect_right(self._times, now), len(self._times)
        if gone:
            self._mark, self._since = self._mark_list[gone - 1], self._times[gone - 1]
            assert not self._groups or self._groups[0][0] > self._mark, "ended groups were not taken"
        if gone < running and now > self._since:
            self._mark += (now - self._since) / self._token_s(running - gone)
        self._since = max(now, self._since) + pause_s  # a pause that has not ended yet goes on first
        self._marks = self._marks[gone:]

    def _foresee(self, marks: np.ndarray) -> None:
        """From now on rows end at these marks, which ascend."""
        self.stamp += 1
        self._marks = marks
        left = len(marks) - np.arange(len(marks))
        seconds = np.diff(marks, prepend=self._mark) * (self._decode_s + self._decode_row_s * left)
        self._times = (self._since + np.cumsum(seconds)).tolist()
        self._mark_list = marks.tolist()

    def _token_s(self, running: int) -> float:
        return self._decode_s + self._decode_row_s * running
