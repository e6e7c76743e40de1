"""The run's data plane as its driver sees it: the calls of all processes, added up, and what stands in it now."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ...actors.protocols import TRAIN_FIELDS
from ...dataplane.client import DataPlaneClient
from ...dataplane.status import DataPlaneStatus
from ...dataplane.traffic import Traffic

SHARES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
STANDING = (
    "rows",
    "bytes_used",
    "bytes_reserved",
    "leased_rows",
    "oldest_lease_s",
    "waiting_claims",
    "waiting_puts",
)
"""Figures of the directory's status that a step's record has, as `dataplane/<name>`."""


class DataPlaneWatch:
    """Adds up what the processes report. Thread-safe: a metrics endpoint reads it while the driver adds.

    Processes report the calls since their last report in messages that they send the driver anyway, so a step's
    figures are of the very calls that were made for it.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        """client: the driver's own."""
        self._client = client
        self._lock = threading.Lock()
        self._step = Traffic()
        self._total = Traffic()
        self._seen_bytes = 0

    def add(self, report: bytes) -> None:
        """Another process' calls since its last report, as `ClientStats.take().to_bytes()`. Raises ValueError."""
        traffic = Traffic.from_bytes(report)
        with self._lock:
            self._step.merge(traffic)
            self._total.merge(traffic)

    def end_step(self, group_size: int) -> tuple[dict[str, float], int]:
        """(figures of the calls since this was last called, directory bytes of the driver's own ones among them).

        group_size: rows of a group, which are put together. One directory call, for what stands in the data plane now.
        Raises DataPlaneError when it fails.
        """
        status = self._client.status()
        own = self._client.stats.take()
        with self._lock:
            self._step.merge(own)
            self._total.merge(own)
            step, self._step = self._step, Traffic()
            figures = {**call_figures(step, self._total), **standing_figures(status)}
        figures["queue/groups_ready"] = float(ready_rows(status) // group_size)
        seen, self._seen_bytes = self._seen_bytes, self._client.stats.directory_bytes
        return figures, self._seen_bytes - seen

    def total(self) -> Traffic:
        """All calls reported so far, and the driver's own up to its last step's end."""
        copy = Traffic()
        with self._lock:
            copy.merge(self._total)
        return copy

    def status(self, timeout_s: float) -> DataPlaneStatus:
        """What stands in the data plane now. Raises DataPlaneError when the directory does not answer in time."""
        return self._client.status(timeout_s=timeout_s)


def call_figures(step: Traffic, total: Traffic) -> dict[str, float]:
    """Flat figures of a step's calls; the cost lines are of `total`, all calls of the run, as a step has too few."""
    figures = {
        "dataplane/calls": float(step.calls),
        "dataplane/bytes_put": float(step.bytes_put),
        "dataplane/bytes_got": float(step.bytes_got),
    }
    for op, calls in step.ops.items():
        figures[f"dataplane/{op}/calls"] = float(calls.calls)
        figures[f"dataplane/{op}/seconds"] = calls.seconds
        figures |= {f"dataplane/{op}/{name}_ms": 1e3 * calls.percentile(share) for name, share in SHARES}
        if calls.nbytes:
            line = total.of(op).cost_line()
            figures[f"dataplane/{op}/bytes"] = float(calls.nbytes)
            figures[f"dataplane/{op}/fixed_us"] = 1e6 * line.fixed_s if line else math.nan
            figures[f"dataplane/{op}/gb_per_s"] = line.bytes_per_s / 1e9 if line else math.nan
    return figures


def ready_rows(status: DataPlaneStatus) -> int:
    """Rows that the train task could claim now."""
    written = min(status.ready.get(name, 0) for name in TRAIN_FIELDS)
    return max(0, written - status.leased_rows - status.stale_rows)


def standing_figures(status: DataPlaneStatus) -> dict[str, float]:
    return {f"dataplane/{name}": float(getattr(status, name)) for name in STANDING}


# ---------------- Busy time: when actors were at work, and how much of a stretch of time that fills.


@dataclass(frozen=True, slots=True)
class Busy:
    """One piece of work. Those of an actor may overlap."""

    actor: str
    start_s: float
    """`time.monotonic` of the driver, like `end_s`."""
    end_s: float
    """Infinite while it goes on."""


def covered_s(work: Iterable[Busy], start_s: float, end_s: float) -> float:
    """Seconds between `start_s` and `end_s` in which at least one of `work` was under way."""
    total, reached = 0.0, start_s
    for piece in sorted(work, key=lambda piece: piece.start_s):
        stop = min(piece.end_s, end_s)
        total += max(0.0, stop - max(piece.start_s, reached))
        reached = max(reached, stop)
    return total


def mean_covered_s(work: Iterable[Busy], num_actors: int, start_s: float, end_s: float) -> float:
    """`covered_s` of each of `num_actors` actors, on average; an actor without work has 0."""
    by_actor: dict[str, list[Busy]] = {}
    for piece in work:
        by_actor.setdefault(piece.actor, []).append(piece)
    return sum(covered_s(pieces, start_s, end_s) for pieces in by_actor.values()) / max(1, num_actors)
