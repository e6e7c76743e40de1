"""Keeps the space that a client was granted ahead of time, so that its next put costs the directory only one call."""

from __future__ import annotations

import threading
import time
from collections import deque

from ...codecs.integers import round_up
from ..directory.requests import Space

RECENT_PUTS = 8
SLACK_PART = 4
"""Divisor that gives the slack: a quarter more than the largest recent put, as rows differ in length from put to
put."""
GRAIN_BYTES = 4096
MAX_BYTES = 64 << 20
"""Number of bytes above which nothing is asked for ahead, since a second call costs little beside moving so many
bytes."""


class Credit:
    """Holds the unused spaces of one client, and says what it should ask for next. Thread-safe.

    The directory may have taken a space back. A put that uses such a space is told so when it commits, at the latest.
    """

    def __init__(self, lifetime_s: float) -> None:
        """lifetime_s: seconds after which an unused space is given back."""
        self._lifetime_s = lifetime_s
        self._spaces: list[tuple[Space, float]] = []
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_PUTS)
        self._lock = threading.Lock()

    def take(self, nbytes: int, num_blocks: int) -> tuple[Space | None, tuple[int, ...]]:
        """Return (the smallest space that fits, the ids of spaces to give back when none fits)."""
        now = time.monotonic()
        with self._lock:
            self._recent.append((nbytes, num_blocks))
            fitting = [
                item
                for item in self._spaces
                if item[0].nbytes >= nbytes and item[0].num_blocks >= num_blocks and item[1] > now
            ]
            if not fitting:
                return None, self._drop_all()
            best = min(fitting, key=lambda item: item[0].nbytes)
            self._spaces.remove(best)
            return best[0], ()

    def add(self, space: Space | None) -> None:
        """Keep the space that the reply to a commit granted."""
        if space is not None:
            with self._lock:
                self._spaces.append((space, time.monotonic() + self._lifetime_s))

    def next_request(self) -> tuple[int, int]:
        """Return (bytes, blocks) to ask for with the next commit; (0, 0) asks for nothing."""
        with self._lock:
            nbytes = max((size for size, _ in self._recent), default=0)
            num_blocks = max((count for _, count in self._recent), default=0)
        nbytes = round_up(nbytes + nbytes // SLACK_PART, GRAIN_BYTES)
        return (nbytes, num_blocks + num_blocks // SLACK_PART + 1) if 0 < nbytes <= MAX_BYTES else (0, 0)

    def drop_all(self) -> tuple[int, ...]:
        """Return the ids of all spaces, which the caller must give back."""
        with self._lock:
            return self._drop_all()

    def _drop_all(self) -> tuple[int, ...]:
        spaces, self._spaces = self._spaces, []
        return tuple(space.space_id for space, _ in spaces)
