"""Sums up the data-plane calls of all processes for the driver, and measures how busy actors are."""

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
)
"""Fields of the directory's status that become metrics of each step, as `dataplane/<name>`."""


class DataPlaneWatch:
    """Sums up the data-plane calls that processes report to the driver. Thread-safe, because a metrics endpoint reads
    while the driver adds.

    Processes report the calls since their last report in messages that they send the driver anyway, so a step's metrics
    count exactly the calls that were made for the step.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        """Start with no calls. client: the driver's own data-plane client."""
        self._client = client
        self._lock = threading.Lock()
        self._step = Traffic()
        self._total = Traffic()
        self._seen_bytes = 0

    def add(self, report: bytes) -> None:
        """Add the calls that another process made since its last report. report: result of
        `ClientStats.take().to_bytes()`.

        Raises ValueError for other bytes.
        """
        traffic = Traffic.from_bytes(report)
        with self._lock:
            self._step.merge(traffic)
            self._total.merge(traffic)

    def end_step(self, group_size: int) -> tuple[dict[str, float], int]:
        """Return the metrics of the calls since the last `end_step`, and the number of bytes that the driver's own
        calls exchanged with the directory since then.

        group_size: number of rows of a group, which are put together. Calls the directory once for what is in the data
        plane now. Raises DataPlaneError when that fails.
        """
        status = self._client.status()
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
        """Return the sum of all calls reported so far, including the driver's own up to the end of the last step."""
        copy = Traffic()
        with self._lock:
            copy.merge(self._total)
        return copy

    def status(self, timeout_s: float) -> DataPlaneStatus:
        """Ask the directory what is in the data plane now. Raises DataPlaneError when it does not answer in time."""
        return self._client.status(timeout_s=timeout_s)


def call_metrics(step: Traffic, total: Traffic) -> dict[str, float]:
    """Return the metrics of a step's calls.

    The cost lines are fitted to `total`, all calls of the run, because a step has too few.
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
    """Return the number of rows that the train task could claim now."""
    written = min(status.ready.get(name, 0) for name in TRAIN_FIELDS)
    return max(0, written - status.leased_rows - status.stale_rows)


def status_metrics(status: DataPlaneStatus) -> dict[str, float]:
    """Return the metrics of what is in the data plane now."""
    return {f"dataplane/{name}": float(getattr(status, name)) for name in STATUS_FIELDS}


# ---------------- Busy time: the share of a time interval in which actors were at work.


@dataclass(frozen=True, slots=True)
class Busy:
    """One piece of work of an actor, such as a rollout call; several may overlap."""

    actor: str
    start_s: float
    """Time at which the work started, by the driver's `time.monotonic`."""
    end_s: float
    """Time at which the work ended, by the same clock; infinite while it goes on."""


def covered_s(work: Iterable[Busy], start_s: float, end_s: float) -> float:
    """Return the seconds between `start_s` and `end_s` in which at least one of `work` was in progress."""
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
