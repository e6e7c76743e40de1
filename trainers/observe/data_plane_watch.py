"""Adds up the data-plane calls of all processes for the driver, and measures how busy actors are."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...actors.protocols import TRAIN_FIELDS
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.status import DataPlaneStatus
from ...dataplane.traffic import Traffic

SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
STATUS_FIELDS = (
    "rows",
    "bytes_used",
    "bytes_reserved",
    "bytes_unfreed",
    "leased_rows",
    "oldest_lease_s",
    "waiting_claims",
    "waiting_puts",
    "puts_elsewhere",
    "directory_cpu_s",
)
"""Fields of the status that the data plane's directory reports. Each becomes a metric of each step,
`dataplane/<name>`."""


class DataPlaneWatch:
    """Adds up the data-plane calls that processes report to the driver. Thread-safe, because a metrics endpoint reads
    while the driver adds.

    Each process reports its latest calls in its usual messages to the driver, so a step's metrics count exactly the
    calls made for that step.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        """Start with no calls. client: the driver's own data-plane client."""
        self._client = client
        self._lock = threading.Lock()
        self._step = Traffic()
        self._total = Traffic()
        self._seen_bytes = 0
        self.lost_rows = 0
        """Number of rows that had been lost with a process of the store at the last `end_step`. Claims pass over
        them."""

    def add(self, report: bytes) -> None:
        """Add the calls that another process made since its last report. report: result of
        `ClientStats.take().to_bytes()` in that process.

        Raises ValueError for other bytes.
        """
        traffic = Traffic.from_bytes(report)
        with self._lock:
            self._step.merge(traffic)
            self._total.merge(traffic)

    def end_step(self, group_size: int) -> tuple[dict[str, float], int]:
        """Return the metrics of the calls since the last `end_step`, and the bytes of the driver's own calls. The bytes
        are those that the driver exchanged with the data plane's directory since then.

        group_size: number of rows of a group. Makes one call to the directory for the current content of the data
        plane. Raises DataPlaneError if that call fails.
        """
        status = self._client.status()
        self.lost_rows = status.lost_rows
        own = self._client.stats.take()
        with self._lock:
            self._step.merge(own)
            self._total.merge(own)
            step, self._step = self._step, Traffic()
            metrics = {**call_metrics(step, self._total), **status_metrics(status)}
        metrics["queue/groups_ready"] = float(ready_rows(status) // group_size)
        seen, self._seen_bytes = self._seen_bytes, self._client.stats.directory_bytes
        return metrics, self._seen_bytes - seen

    def total(self) -> Traffic:
        """Return the sum of all calls reported so far, with the driver's own calls up to the last step's end."""
        copy = Traffic()
        with self._lock:
            copy.merge(self._total)
        return copy

    def status(self, timeout_s: float) -> DataPlaneStatus:
        """Ask the directory for the current content of the data plane. Raises DataPlaneError if it does not answer
        within `timeout_s` seconds."""
        return self._client.status(timeout_s=timeout_s)


def call_metrics(step: Traffic, total: Traffic) -> dict[str, float]:
    """Return the metrics of the data-plane calls of one step.

    The linear cost models (seconds per call and per byte) are fitted to `total`, all calls of the run, because one step
    has too few calls.
    """
    metrics = {
        "dataplane/calls": float(step.calls),
        "dataplane/bytes_put": float(step.bytes_put),
        "dataplane/bytes_got": float(step.bytes_got),
    }
    for op, calls in step.ops.items():
        metrics[f"dataplane/{op}/calls"] = float(calls.calls)
        metrics[f"dataplane/{op}/seconds"] = calls.seconds
        metrics |= {f"dataplane/{op}/{name}_ms": 1e3 * calls.percentile(share) for name, share in SHARES}
        if calls.nbytes:
            line = total.of(op).cost_line()
            metrics[f"dataplane/{op}/bytes"] = float(calls.nbytes)
            metrics[f"dataplane/{op}/fixed_us"] = 1e6 * line.fixed_s if line else math.nan
            metrics[f"dataplane/{op}/gb_per_s"] = line.bytes_per_s / 1e9 if line else math.nan
    return metrics


def ready_rows(status: DataPlaneStatus) -> int:
    """Return the number of rows that the driver could claim for training now."""
    written = min(status.ready.get(name, 0) for name in TRAIN_FIELDS)
    return max(0, written - status.leased_rows - status.stale_rows)


def status_metrics(status: DataPlaneStatus) -> dict[str, float]:
    """Return metrics of the current content of the data plane, such as its rows and leases."""
    return {f"dataplane/{name}": float(getattr(status, name)) for name in STATUS_FIELDS}


# ---------------- Busy time is the time during which actors were working.


@dataclass(frozen=True, slots=True)
class Busy:
    """Period in which an actor worked on one task, such as a rollout call. Periods of the same actor may overlap."""

    actor: str
    start_s: float
    """Time at which the work started, on the driver's `time.monotonic` clock."""
    end_s: float
    """Time at which the work ended, on the same clock; infinite while it continues."""


def covered_s(work: Iterable[Busy], start_s: float, end_s: float) -> float:
    """Return for how many seconds between `start_s` and `end_s` at least one of the periods in `work` was active."""
    total, reached = 0.0, start_s
    for piece in sorted(work, key=lambda piece: piece.start_s):
        stop = min(piece.end_s, end_s)
        total += max(0.0, stop - max(piece.start_s, reached))
        reached = max(reached, stop)
    return total


def mean_covered_s(work: Iterable[Busy], num_actors: int, start_s: float, end_s: float) -> float:
    """Return the mean of `covered_s` over `num_actors` actors, where an actor without work counts as 0."""
    by_actor: dict[str, list[Busy]] = {}
    for piece in work:
        by_actor.setdefault(piece.actor, []).append(piece)
    return sum(covered_s(pieces, start_s, end_s) for pieces in by_actor.values()) / max(1, num_actors)
