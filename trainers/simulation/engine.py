"""Simulates an engine that decodes its rows in one batch, at a speed that depends on the number of rows."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np


class SimulatedEngine:
    """An engine that decodes one token for all its rows in a time that grows with their number. It is `decode_s +
    decode_row_s * (number of running rows)` seconds.

    The engine counts the tokens that it has decoded per row since the start of the run. Between changes (new rows,
    pauses) the future is known: `_marks` has the token count at which each row ends, and `_times` the corresponding
    times in seconds. Both are computed again only at changes.
    """

    def __init__(self, rows: int, decode_s: float, decode_row_s: float) -> None:
        self.rows = rows
        self.stamp = 0
        """Number of changes (rows that joined, pauses) so far. A predicted event is no longer valid when this number
        has changed since the prediction."""
        self._decode_s = decode_s
        self._decode_row_s = decode_row_s
        self._mark = 0.0
        self._since = 0.0
        """Simulated time in seconds at which the engine's token count was `_mark`."""
        self._marks = np.empty(0)
        self._times: list[float] = []
        self._mark_list: list[float] = []
        self._groups: list[tuple[float, int]] = []
        """Heap of pairs (token count of the engine at which the group's last row ends, number of the group)."""
        self._busy_s = 0.0
        """Seconds before the time `_since` during which rows were decoded."""

    def running(self, now: float) -> int:
        """Return the number of rows that are being decoded at time `now`."""
        return len(self._times) - bisect_right(self._times, now)

    def busy_s(self, now: float) -> float:
        """Return the number of seconds before `now` during which rows were decoded."""
        if not self._times:
            return self._busy_s
        return self._busy_s + max(0.0, min(now, self._times[-1]) - self._since)

    def join(self, now: float, groups: Sequence[int], lengths: np.ndarray) -> None:
        """Start `groups` at time `now`. `lengths` has the number of tokens of each of their rows (float64 `[G, rows per
        group]`)."""
        self._settle(now, pause_s=0.0)
        ends = self._mark + lengths
        for group, last in zip(groups, ends.max(axis=1).tolist(), strict=True):
            heapq.heappush(self._groups, (last, group))
        self._foresee(np.sort(np.concatenate((self._marks, ends.reshape(-1)))))

    def pause(self, now: float, seconds: float) -> None:
        """Stop decoding for `seconds`, starting at time `now` or at the end of a pause that is in progress."""
        self._settle(now, pause_s=seconds)
        self._foresee(self._marks)

    def next_end(self) -> float:
        """Return the time at which the next group ends; infinity when there is no group."""
        if not self._groups:
            return math.inf
        return self._times[bisect_left(self._mark_list, self._groups[0][0])]

    def take_ended(self, now: float) -> list[int]:
        """Return the groups that have ended by time `now` and were not returned before. Must be called before `join`
        and `pause`."""
        ended = []
        while self._groups and self.next_end() <= now:
            ended.append(heapq.heappop(self._groups)[1])
        return ended

    def room_at(self, now: float, rows: int) -> float:
        """Return the earliest time, `now` or later, at which the engine has room for `rows` more rows."""
        leaving = len(self._times) + rows - self.rows
        return now if leaving <= 0 else max(now, self._times[leaving - 1])

    def _settle(self, now: float, pause_s: float) -> None:
        """Advance the engine to time `now`, remove rows that have ended, and pause decoding for `pause_s` seconds."""
        self._busy_s = self.busy_s(now)
        gone, running = bisect_right(self._times, now), len(self._times)
        if gone:
            self._mark, self._since = self._mark_list[gone - 1], self._times[gone - 1]
            assert not self._groups or self._groups[0][0] > self._mark, "ended groups were not taken"
        if gone < running and now > self._since:
            self._mark += (now - self._since) / self._token_s(running - gone)
        self._since = max(now, self._since) + pause_s  # a pause in progress ends first
        self._marks = self._marks[gone:]

    def _foresee(self, marks: np.ndarray) -> None:
        """Compute the time at which each row ends. `marks` has the engine's token counts at which rows end, in
        ascending order."""
        self.stamp += 1
        self._marks = marks
        left = len(marks) - np.arange(len(marks))
        seconds = np.diff(marks, prepend=self._mark) * (self._decode_s + self._decode_row_s * left)
        self._times = (self._since + np.cumsum(seconds)).tolist()
        self._mark_list = marks.tolist()

    def _token_s(self, running: int) -> float:
        return self._decode_s + self._decode_row_s * running
