"""The room that a client was granted ahead, so that its next put costs the directory one call."""

from __future__ import annotations

import threading
import time
from collections import deque

from ..codecs.integers import round_up
from .directory.requests import Room

RECENT_PUTS = 8
SLACK_PART = 4
"""A quarter more than the largest of the recent puts: rows of a policy differ in length from put to put."""
GRAIN_BYTES = 4096
MAX_BYTES = 64 << 20
"""Beyond it a second call costs nothing beside the bytes."""


class Credit:
    """Unused rooms of one client, and what it should ask for. Thread-safe.

    The directory may have taken a room back: whoever uses one finds out at its commit at the latest.
    """

    def __init__(self, lifetime_s: float) -> None:
        """lifetime_s: a room is given back when it has not been used by then."""
        self._lifetime_s = lifetime_s
        self._rooms: list[tuple[Room, float]] = []
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_PUTS)
        self._lock = threading.Lock()

    def take(self, nbytes: int, num_blocks: int) -> tuple[Room | None, tuple[int, ...]]:
        """(the smallest room that fits, ids of rooms to give back when there is none)."""
        now = time.monotonic()
        with self._lock:
            self._recent.append((nbytes, num_blocks))
            fitting = [
                item
                for item in self._rooms
                if item[0].nbytes >= nbytes and item[0].num_blocks >= num_blocks and item[1] > now
            ]
            if not fitting:
                return None, self._drop_all()
            best = min(fitting, key=lambda item: item[0].nbytes)
            self._rooms.remove(best)
            return best[0], ()

    def add(self, room: Room | None) -> None:
        """What a commit's answer granted."""
        if room is not None:
            with self._lock:
                self._rooms.append((room, time.monotonic() + self._lifetime_s))

    def wish(self) -> tuple[int, int]:
        """(bytes, blocks) to ask for; (0, 0): nothing."""
        with self._lock:
            nbytes = max((size for size, _ in self._recent), default=0)
            num_blocks = max((count for _, count in self._recent), default=0)
        nbytes = round_up(nbytes + nbytes // SLACK_PART, GRAIN_BYTES)
        return (nbytes, num_blocks + num_blocks // SLACK_PART + 1) if 0 < nbytes <= MAX_BYTES else (0, 0)

    def drop_all(self) -> tuple[int, ...]:
        """Ids of all rooms, which are the caller's to give back."""
        with self._lock:
            return self._drop_all()

    def _drop_all(self) -> tuple[int, ...]:
        rooms, self._rooms = self._rooms, []
        return tuple(room.room_id for room, _ in rooms)
