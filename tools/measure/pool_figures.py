"""Reads what a pool and its tenants have written, and computes the figures of `tools/measure/pool.py`."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.gpu.train_run import StepFigures, metrics_start, step_figures
from headrace.trainers.observe.metrics import ELAPSED, read_metrics
from headrace.trainers.pool.server import gpu_trace
from headrace.trainers.pool.state.status import TRACE, PoolEvent

STAGES = {"rollout": ("drain", "sleep", "memory", "sync", "wake"), "train": ("onload", "offload")}
"""Role -> the stages of its switches."""
SHRINK, EXPAND = ("sleep", "memory"), ("sync", "wake")
"""Stages of a switch to sleep, draining apart, and of one out of it."""


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """Figures that one tenant has logged."""

    name: str
    records: tuple[Mapping[str, Any], ...]
    """Its metrics, one record for each step."""
    ends: tuple[float, ...]
    """Unix time at which each of these steps ended."""
    steps: tuple[StepFigures, ...]

    def within(self, since: float, until: float) -> list[int]:
        """Return the indices of the steps that ended between two Unix times, both included."""
        return [index for index, end in enumerate(self.ends) if since <= end <= until]

    def step_s(self, since: float, until: float) -> float | None:
        """Return the mean seconds between the ends of steps between two Unix times; None for fewer than two steps."""
        inside = self.within(since, until)
        return (self.ends[inside[-1]] - self.ends[inside[0]]) / (len(inside) - 1) if len(inside) > 1 else None

    def values(self, key: str, since: float, until: float) -> list[float]:
        """Return one metric of the steps that ended between two Unix times."""
        found = (self.records[index].get(key) for index in self.within(since, until))
        return [float(value) for value in found if value is not None]


def read_tenant(name: str, folder: Path) -> TenantFigures:
    """Return what the run in `folder` has logged; no step if it has not begun."""
    path = folder / "metrics.jsonl"
    records = read_metrics(path)[0] if path.exists() else []
    records = [record for record in records if record.get("time/step_s")]
    if not records:
        return TenantFigures(name, (), (), ())
    zero = metrics_start(path)
    return TenantFigures(
        name,
        tuple(records),
        tuple(zero + record[ELAPSED] for record in records),
        tuple(step_figures(records)),
    )


def read_timed_events(folder: Path) -> list[tuple[float, PoolEvent]]:
    """Return the pool's trace: Unix time of each event, event. It is empty if the pool has not written it. An
    incomplete last line is ignored."""
    if not (folder / "pool.json").exists() or not (folder / TRACE).exists():
        return []
    began = json.loads((folder / "pool.json").read_text())["began"]
    return [(began + event["t"], event) for event in gpu_trace.read_events(folder / TRACE)]


def shared_window(tenants: Sequence[TenantFigures]) -> tuple[float, float]:
    """Return the Unix times between which all tenants were at work. They run from the end of the first step of the last
    to begin until the first has made its last step. Without a step, that time is empty."""
    if not all(tenant.ends for tenant in tenants):
        return 0.0, 0.0
    return max(tenant.ends[0] for tenant in tenants), min(tenant.ends[-1] for tenant in tenants)


def stage_seconds(events: Iterable[tuple[float, PoolEvent]], tenants: Iterable[str]) -> dict[str, list[float]]:
    """Return the seconds of each stage of the tenants' switches, and of `shrink` and `expand`, sums of some of them.

    Only switches of one GPU count, as an order for several engines sends them their weights one after the other.
    """
    wanted, known = set(tenants), {role: set(stages) for role, stages in STAGES.items()}
    of_gpu: dict[tuple[str, int], list[tuple[str, float]]] = defaultdict(list)
    together: dict[tuple[float, Any, str], int] = defaultdict(int)
    listed = [
        (at, one) for at, one in events if one["tenant"] in wanted and one["event"] in known.get(one["role"] or "", ())
    ]
    for at, one in listed:
        together[at, one["tenant"], one["event"]] += 1
    for at, one in sorted(listed, key=lambda pair: pair[0]):
        if together[at, one["tenant"], one["event"]] == 1:
            of_gpu[str(one["tenant"]), one["gpu"]].append((one["event"], one.get("seconds", 0.0)))
    found: dict[str, list[float]] = defaultdict(list)
    for stages in of_gpu.values():
        for name, seconds in stages:
            found[name].append(seconds)
        for name, parts in (("shrink", SHRINK), ("expand", EXPAND)):
            pairs = zip(stages, stages[1:], strict=False)
            found[name] += [one[1] + other[1] for one, other in pairs if (one[0], other[0]) == parts]
    return {name: seconds for name, seconds in found.items() if seconds}


def switch_figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each stage, `{stage}_s`, the slowest shrink and expand, and the numbers of both."""
    figures = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    for name in ("shrink", "expand"):
        if values := seconds.get(name):
            figures |= {f"{name}_max_s": max(values), f"{name}s": float(len(values))}
    return figures


def tenant_figures(tenants: Sequence[TenantFigures], since: float, until: float) -> dict[str, float]:
    """Return the figures that tenants logged between two Unix times. They are medians of what switches moved, maxima of
    what processes held, its growth from the first half of the time to the second, and sums of what happened to
    requests."""
    figures: dict[str, float] = {}
    moved = [f"{way}_{what}" for way in ("offload", "onload") for what in ("gib", "copy_s", "memory_s", "groups_s")]
    for name in (*moved, "train_wait_s"):
        if values := [value for tenant in tenants for value in tenant.values(f"pool/{name}", since, until)]:
            figures[name] = statistics.median(values)
    for name in ("engine_gib_asleep", "trainer_gib_offloaded"):
        series = [values for tenant in tenants if (values := tenant.values(f"pool/{name}", since, until))]
        if series:
            figures[name] = max(map(max, series))
            figures[f"{name}_growth"] = max(growth(values) for values in series)
    for name in ("lost_tokens", "moved_requests", "kept_tokens", "resizes"):
        figures[name] = sum(tenant.records[-1].get(f"pool/{name}", 0.0) for tenant in tenants if tenant.records)
    for name, key in (("mismatch_mean", "logprob/mismatch_mean"), ("mismatch_max", "logprob/mismatch_max")):
        if values := [value for tenant in tenants for value in tenant.values(key, since, until)]:
            figures[name] = max(values)
    return figures


def growth(values: Sequence[float]) -> float:
    """Return by how much the largest value of the second half exceeds that of the first; 0.0 for fewer than two."""
    half = len(values) // 2
    return max(values[half:]) - max(values[:half]) if half else 0.0


def against_link(figures: Mapping[str, float], weight_bytes: int, to_host: float, to_device: float) -> dict[str, float]:
    """Return figures relative to those of a bare copy. Of `offload` and `onload` they are the seconds of their copies
    and of the device's memory as a multiple of that of the same bytes, and of `expand` the seconds beyond that of the
    weights.

    to_host, to_device: measured bytes per second of the host link.
    """
    found = {"link.to_host_gb_per_s": to_host / 1e9, "link.to_device_gb_per_s": to_device / 1e9}
    for name, rate in (("offload", to_host), ("onload", to_device)):
        if figures.get(f"{name}_gib"):
            taken_s = figures[f"{name}_copy_s"] + figures[f"{name}_memory_s"]
            found[f"{name}_vs_link"] = taken_s / (figures[f"{name}_gib"] * 2**30 / rate)
    if "expand_s" in figures:
        found["expand_over_link_s"] = figures["expand_s"] - weight_bytes / to_device
    return found


def double_grants(events: Iterable[tuple[float, PoolEvent]]) -> list[str]:
    """Return a sentence for each GPU that was granted while another tenant held it."""
    holder: dict[int, str] = {}
    wrong = []
    for _, event in events:
        gpu, who = event["gpu"], f"{event['tenant']} ({event['role']})"
        if event["event"] == "grant":
            if gpu in holder:
                wrong.append(f"GPU {gpu} was granted to {who} while {holder[gpu]} held it")
            holder[gpu] = who
        elif event["event"] == "release":
            holder.pop(gpu, None)
    return wrong
