"""Leases: who holds which rows of a task, and until when."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ..codecs.integers import distinct_counts


@dataclass(slots=True)
class Lease:
    """One claim's right to its rows."""

    lease_id: int
    partition: str
    task: str
    rows: np.ndarray
    """int64 `[N]` as claimed; those still held have `lease_id` in the task's cursor."""
    held: int
    """Rows still held."""
    granted: float
    deadline: float


class LeaseBook:
    """All leases of a run; ids are never reused."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._next_id = 1

    def grant(self, partition: str, task: str, rows: np.ndarray, now: float, lease_s: float) -> Lease:
        lease = Lease(self._next_id, partition, task, rows, len(rows), now, now + lease_s)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.lease_id))
        return lease

    def drop_rows(self, lease_ids: np.ndarray) -> None:
        """One row less for each id in `lease_ids` (repeats count); a lease without rows ends."""
        for lease_id, count in zip(*distinct_counts(lease_ids), strict=True):
            lease = self._leases[int(lease_id)]
            lease.held -= int(count)
            if lease.held == 0:
                del self._leases[lease.lease_id]

    def take_expired(self, now: float) -> list[Lease]:
        """Leases whose time has run out; they are still in the book until their rows are dropped."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.get(heapq.heappop(self._deadlines)[1])
            if lease is not None:
                expired.append(lease)
        return expired

    def next_deadline(self) -> float | None:
        """When the first live lease ends."""
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def of(self, partition: str | None = None) -> list[Lease]:
        """Live leases, oldest first."""
        return [lease for lease in self._leases.values() if partition in (None, lease.partition)]
