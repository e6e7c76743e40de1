"""Keeps the store space that the directory has granted to one client ahead of its next puts."""

from __future__ import annotations

import threading
import time
from collections import deque

from ...codecs.integers import ALIGN, round_up
from ..directory.requests import Space
from ..rpc.forks import renew_in_forks

RECENT_PUTS = 8
SLACK_PART = 4
"""Divisor of the largest slack in a request for space. Row lengths differ from put to put, so a request adds the
difference between the largest and the smallest recent put, up to a quarter of the largest. Puts of equal size get no
slack, because unused space becomes a hole between blocks, and holes that are too small for a put cannot be filled."""
MAX_BYTES = 64 << 20
"""Largest number of bytes of space that is requested ahead of a put. For larger puts, the extra call that reserves
space costs little compared with moving the bytes."""


class Credit:
    """Store space granted to one client ahead of its next puts, and the size that the client should request next.
    Thread-safe.

    The directory (the metadata service) can take a space back at any time. A put in this space fails at its commit at
    the latest, and is written to other space.
    """

    def __init__(self, lifetime_s: float) -> None:
        """Begin without any space. lifetime_s: seconds for which a space can be used after it was granted."""
        self._lifetime_s = lifetime_s
        self._spaces: list[tuple[Space, float]] = []
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT_PUTS)
        self._lock = threading.Lock()
        renew_in_forks(self, Credit._renew)

    def _renew(self) -> None:
        """Leave the spaces to the process from which this one was forked, which may write to them."""
        self._lock, self._spaces = threading.Lock(), []

    def take(self, nbytes: int, num_blocks: int) -> tuple[Space | None, tuple[int, ...]]:
        """Take the smallest of the granted spaces into which a put fits. Returns (space, ()), or (None, ids of all
        spaces) when none fits; the caller must then give these spaces back to the directory."""
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
        """Store the space that the directory granted for later puts in its reply to a commit. None means that it
        granted no space."""
        if space is not None:
            with self._lock:
                self._spaces.append((space, time.monotonic() + self._lifetime_s))

    def next_request(self) -> tuple[int, int]:
        """Return the (bytes, blocks) to request with the current commit for later puts; (0, 0) requests none."""
        with self._lock:
            largest = max((size for size, _ in self._recent), default=0)
            smallest = min((size for size, _ in self._recent), default=0)
            num_blocks = max((count for _, count in self._recent), default=0)
        nbytes = round_up(largest + min(largest // SLACK_PART, largest - smallest), ALIGN)
        return (nbytes, num_blocks + num_blocks // SLACK_PART + 1) if 0 < nbytes <= MAX_BYTES else (0, 0)

    def drop_all(self) -> tuple[int, ...]:
        """Forget all spaces and return their ids. The caller must give the spaces back to the directory."""
        with self._lock:
            return self._drop_all()

    def _drop_all(self) -> tuple[int, ...]:
        spaces, self._spaces = self._spaces, []
        return tuple(space.space_id for space, _ in spaces)
