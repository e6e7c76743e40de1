"""Keeps what the directory has granted to one client: store space for its next puts, and leases, which it renews."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable

from ...codecs import messages
from ...codecs.integers import ALIGN, round_up
from ..directory import requests
from ..directory.requests import Space
from ..errors import DataPlaneError
from ..rpc.links import Link

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


_logger = logging.getLogger(__name__)

RENEWALS = 4
"""Number of renewals within the duration of a lease (`lease_s`), so that a lease survives one renewal that is late or
lost."""


class LeaseRenewal:
    """Keeps the leases of one client from running out. Thread-safe. It holds no reference to the client, so that an
    unused client can be garbage-collected while the thread runs.

    Renewal of a lease begins when its claim returns to this client, or when this client calls `renew` with a receipt of
    another process. When the process has died or is stopped, or when the client is closed or no longer referenced, its
    leases run out `lease_s` after their last renewal.
    """

    def __init__(self, link: Link, lease_s: float) -> None:
        self._link = link
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._held: dict[int, set[str]] = {}
        """Keys of the rows that this client holds under each lease, by lease id. A lease that other clients have ended
        by release or clear is noticed only at the next renewal."""
        self._thread: threading.Thread | None = None
        """Thread that renews; None while there is no lease."""
        self._ended = threading.Event()

    def add(self, lease_id: int, keys: Iterable[str]) -> None:
        """Renew the lease `lease_id` from now on, on behalf of the rows `keys`."""
        with self._lock:
            if self._pid != os.getpid():  # After a fork, the parent has the thread and the leases.
                self._pid, self._held, self._thread = os.getpid(), {}, None
            self._held.setdefault(lease_id, set()).update(keys)
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="lease-renewal", daemon=True)
                self._thread.start()

    def drop(self, lease_id: int, keys: Iterable[str]) -> None:
        """Record that the rows `keys` of a lease were released. A lease is no longer renewed once all of its rows given
        to `add` were released."""
        with self._lock:
            left = self._held.get(lease_id, set())
            left.difference_update(keys)
            if not left:
                self._held.pop(lease_id, None)

    def end(self) -> None:
        """Stop renewing all leases. Idempotent."""
        self._ended.set()

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._ended.wait(self._lease_s / RENEWALS):
            with self._lock:
                asked = tuple(self._held)
                if not asked:
                    self._thread = None
                    return
            try:
                live = self._renew(asked)
            except DataPlaneError as error:
                if time.monotonic() - heard <= self._lease_s:
                    continue
                _logger.warning("%d leases ran out, as they could not be renewed: %s", len(asked), error)
                live = ()
            else:
                heard = time.monotonic()
            with self._lock:
                for lease_id in set(asked).difference(live):
                    self._held.pop(lease_id, None)

    def _renew(self, lease_ids: tuple[int, ...]) -> tuple[int, ...]:
        request, timeout_s = requests.encode(requests.Renew(lease_ids)), self._lease_s / RENEWALS
        reply = requests.body_of(self._link.call("renew", request, timeout_s), "renew", 0.0)
        return messages.decode(reply, tuple[int, ...])
