"""Renews the leases of one client, so that they do not run out while it lives, and gives rows back that it dropped."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...codecs import messages
from ..compact import pack_keys
from ..directory import requests
from ..directory.calls import Fence
from ..errors import DataPlaneError, LeaseLost
from ..meta import KVBatchMeta
from ..rpc.links import Link
from .holds import LeaseHold

_logger = logging.getLogger(__name__)

RENEWALS = 4
"""Number of renewals within the duration of a lease (`lease_s`), so that a lease survives one renewal that is late or
lost."""
GIVE_BACK_S = 5.0
"""Time limit in seconds for giving back the rows of a receipt that was garbage-collected."""


@dataclass(slots=True)
class _Held:
    """The rows that this client holds under one lease."""

    partition: str
    left: dict[str, int]
    """Generation of each row by its key, without the rows that this client has released or cleared."""
    is_live: bool = True
    """Whether the lease exists, as far as this client knows. A lease that other clients have ended by release or clear
    is noticed only at the next renewal."""
    task: str = ""
    """Task for which this client has claimed the rows; "" if another process claimed them."""
    watch: weakref.ref[LeaseHold] | None = None
    """Reference to the hold that the receipts share; None if another process claimed the rows."""


class LeaseRenewal:
    """Keeps the leases of one client from running out. Thread-safe. It holds no reference to the client, so that an
    unused client can be garbage-collected while the thread runs.

    Renewal of a lease begins when its claim returns to this client, or when this client calls `renew` with a receipt of
    another process. When the process has died or is stopped, or when the client is closed or no longer referenced, its
    leases run out `lease_s` after their last renewal. When the last receipt of a claim has been garbage-collected, the
    rows that it still holds are given back for retry, unless the receipt was handed over: encoded, or alive when this
    process forked.
    """

    def __init__(self, link: Link, lease_s: float) -> None:
        self.link = link
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._has_ended = False
        self._begin()
        _renewals.add(weakref.ref(self, _renewals.discard))

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._held: dict[int, _Held] = {}
        self._watched: dict[weakref.ref[LeaseHold], tuple[int, str, str]] = {}
        """Lease id, partition and task of each hold whose rows are given back when it is garbage-collected. Holds that
        were handed over are not among them."""
        self._inbox: queue.SimpleQueue[weakref.ref[LeaseHold] | None] = queue.SimpleQueue()
        """References to holds that were garbage-collected, and None for the end. The garbage collector can run within
        any instruction, so it only puts the reference here, which needs no lock and runs no Python code."""
        self._thread: threading.Thread | None = None
        """Thread that renews; None while there is no lease."""

    def add(self, lease_id: int, partition: str, keys: Iterable[str], generations: np.ndarray) -> None:
        """Renew the lease `lease_id` from now on, on behalf of the rows `keys`."""
        with self._lock:
            if self._pid != os.getpid():  # After a fork, the parent has the thread and the leases.
                self._begin()
            held = self._held.setdefault(lease_id, _Held(partition, {}))
            held.left.update(zip(keys, generations.tolist(), strict=True))
            held.is_live = True
            if self._thread is None and not self._has_ended:
                self._thread = threading.Thread(target=self._run, name="lease-renewal", daemon=True)
                self._thread.start()

    def hold(self, meta: KVBatchMeta, task: str, client: weakref.ref[Any]) -> LeaseHold:
        """Return a new hold of `client` on the rows of a claim, which were given to `add` before."""
        lease_id, partition = meta.lease_id, meta.partition
        with self._lock:
            held = self._held.setdefault(lease_id, _Held(partition, {}))
            hold = LeaseHold(lease_id, partition, task, held.left, client, functools.partial(self._hand_over, lease_id))
            held.task, held.watch = task, weakref.ref(hold, self._inbox.put)
            self._watched[held.watch] = lease_id, partition, task
        return hold

    def _hand_over(self, lease_id: int) -> None:
        with self._lock:
            held = self._held.get(lease_id)
            if held is not None and held.watch is not None:
                self._watched.pop(held.watch, None)

    def before_fork(self) -> None:
        """Hand over all receipts that are alive, because the new process has them, too. Takes no lock, because a
        handler of a signal may fork while its thread has the lock."""
        for watch in list(self._watched):
            if watch() is not None:
                self._watched.pop(watch, None)

    def after_fork(self) -> None:
        """Replace the lock in the new process, because a thread that this process lacks may have taken it."""
        self._lock = threading.Lock()

    def drop(self, lease_id: int, keys: Iterable[str]) -> None:
        """Record that the rows `keys` of a lease were released. A lease is no longer renewed once all of its rows given
        to `add` were released."""
        with self._lock:
            held = self._held.get(lease_id)
            if held is None:
                return
            for key in keys:
                held.left.pop(key, None)
            if not held.left:
                del self._held[lease_id]
                if held.watch is not None:
                    self._watched.pop(held.watch, None)

    def cleared(self, partition: str, keys: Sequence[str] | None) -> None:
        """Record that this client has cleared rows, or has defined the partition again, which ends their leases. keys:
        None for all rows."""
        for lease_id, held in self._of(partition):
            self.drop(lease_id, list(held.left) if keys is None else keys)

    def fences(self, partition: str, keys: Sequence[str]) -> tuple[Fence, ...]:
        """Return the conditions of a put by key, one for each task for which this client has claimed some of the rows.

        Rows that it has claimed, or renews, and that it has neither released nor cleared must still be held by their
        lease, or by a later one for the same task. Rows of a receipt that was dropped are not among them, because they
        are given back.
        """
        found: dict[str, tuple[np.ndarray, list[int]]] = {}
        for lease_id, held in self._of(partition):
            left = dict(held.left)
            if not left.keys().isdisjoint(keys) and self._is_fenced(held):
                generations, leases = found.get(held.task, (np.full(len(keys), -1), []))
                found[held.task] = np.maximum(generations, [left.get(key, -1) for key in keys]), [*leases, lease_id]
        return tuple(Fence(generations, tuple(leases)) for generations, leases in found.values())

    def end(self) -> None:
        """Stop renewing all leases. Idempotent."""
        self._has_ended = True
        self._inbox.put(None)

    def _of(self, partition: str) -> list[tuple[int, _Held]]:
        """Return the ids of the leases on rows of a partition, each with what this client holds under it."""
        with self._lock:
            held = self._held.items() if self._pid == os.getpid() else ()
            return [(lease_id, rows) for lease_id, rows in held if rows.partition == partition]

    def _is_fenced(self, held: _Held) -> bool:
        """Return whether this process has a receipt of the rows, or renews their lease for another process."""
        has_receipt = held.watch is None or held.watch() is not None
        return has_receipt or held.is_live and held.watch not in self._watched

    def _run(self) -> None:
        inbox, heard, told = self._inbox, time.monotonic(), False
        due = heard + self._lease_s / RENEWALS
        while not self._has_ended:
            with contextlib.suppress(queue.Empty):
                watch = inbox.get(timeout=max(0.0, due - time.monotonic()))
                if watch is not None:
                    self._give_back(watch)
                continue
            due = time.monotonic() + self._lease_s / RENEWALS
            with self._lock:
                asked = tuple(lease_id for lease_id, held in self._held.items() if held.is_live)
                if not asked:
                    self._thread = None
                    return
            try:
                live = self._renew(asked)
            except DataPlaneError as error:  # Only the directory knows whether a lease has ended.
                if not told and time.monotonic() - heard > self._lease_s:
                    told = True
                    _logger.warning("%d leases could not be renewed, and may have run out: %s", len(asked), error)
                continue
            heard, told = time.monotonic(), False
            self._lose(set(asked).difference(live))

    def _lose(self, lease_ids: Iterable[int]) -> None:
        """Stop renewing leases that have ended. Those whose receipts this process still has are kept, so that their
        holder writes and releases nothing by mistake."""
        with self._lock:
            for lease_id in lease_ids:
                if lease_id in self._held:
                    self._held[lease_id].is_live = False
            for lease_id, held in list(self._held.items()):
                if not held.is_live and (held.watch is None or held.watch() is None):
                    del self._held[lease_id]

    def _give_back(self, watch: weakref.ref[LeaseHold]) -> None:
        """Give back the rows of a hold that was garbage-collected, unless its receipts were handed over."""
        with self._lock:
            found = self._watched.pop(watch, None)
            held = None if found is None else self._held.pop(found[0], None)
        if found is None or held is None or not held.left or not held.is_live:
            return
        lease_id, partition, task = found
        request = requests.Release(partition, task, lease_id, pack_keys(list(held.left)), "retry")
        try:
            reply = self.link.call("release", requests.encode(request), GIVE_BACK_S)
            requests.body_of(reply, "release", 0.0)
        except LeaseLost:
            pass  # Other clients have cleared these rows, or released them.
        except (DataPlaneError, ValueError) as error:
            _logger.info("the rows of a dropped receipt return only when their lease runs out: %s", error)
        else:
            _logger.warning(
                "%d rows of partition %r were claimed by task %r, but their receipt was dropped without release: they "
                "can be claimed again",
                len(held.left), partition, task,
            )  # fmt: skip

    def _renew(self, lease_ids: tuple[int, ...]) -> tuple[int, ...]:
        request, timeout_s = requests.encode(requests.Renew(lease_ids)), self._lease_s / RENEWALS
        reply = requests.body_of(self.link.call("renew", request, timeout_s), "renew", 0.0)
        return messages.decode(reply, tuple[int, ...])


_renewals: set[weakref.ref[LeaseRenewal]] = set()
"""References to the objects of this process that a fork concerns."""


def _each(act: Callable[[LeaseRenewal], None]) -> None:
    for reference in tuple(_renewals):
        renewal = reference()
        if renewal is not None:
            act(renewal)


os.register_at_fork(
    before=functools.partial(_each, LeaseRenewal.before_fork),
    after_in_child=functools.partial(_each, LeaseRenewal.after_fork),
)
