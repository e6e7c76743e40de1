"""Renews the leases of one client, so that they do not run out while it lives."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable

from ...codecs import messages
from ..directory import requests
from ..errors import DataPlaneError
from ..rpc.links import Link

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
