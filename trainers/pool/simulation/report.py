"""Simulates a pool of GPUs under several policies, and writes a table, summary.json and a picture of the results."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ....version import __version__
from ..report.calls import PoolEvent
from ..report.picture import pool_report
from ..state.pool import Pool, PoolBounds
from .config import Policy, PoolFile
from .first_come import FirstComePool
from .simulate import PoolSimulation, TenantFigures
from .tenants import TenantSpec, partition, place_tenants

MAX_PICTURE_GPUS = 32
"""Largest number of GPUs of a pool whose events are kept and drawn."""

NAMES: dict[Policy, str] = {"gap_ratio": "gap ratio", "first_come": "first come", "fixed": "fixed part"}


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool simulated under one policy."""

    num_gpus: int
    begin_s: float
    """Simulated time from which the figures count."""
    end_s: float
    """Simulated time at which the simulation ended."""
    tenants: list[TenantFigures]
    events: list[PoolEvent]
    """Events of each GPU; empty if they were not kept."""
    num_rejected: int
    """Number of plans that broke a check, and were not carried out."""


def simulate_pool(file: PoolFile, policy: Policy, *, keep_events: bool = False) -> SimulatedPool:
    """Simulate the tenants of a file under one policy.

    Raises ConfigError if a fixed partition leaves a tenant no engine.
    """
    # Simulated tenants do not fail, so that they need not show that they live.
    settings, bounds = file.pool, PoolBounds(starve_s=file.pool.starve_s, lease_s=math.inf)
    specs = place_tenants(file)
    pools: list[tuple[Pool, Sequence[TenantSpec]]]
    if policy == "fixed":
        pools = [(Pool(len(one.map.rollout_gpus), bounds), [one]) for one in partition(specs, settings.gpus)]
    else:
        pools = [((Pool if policy == "gap_ratio" else FirstComePool)(settings.gpus, bounds), specs)]
    events: list[PoolEvent] = []
    tenants: list[TenantFigures] = []
    for pool, own in pools:
        simulation = PoolSimulation(
            pool,
            own,
            seed=settings.seed,
            warmup_s=settings.warmup_s,
            by_step=policy == "first_come",
            trace=events.append if keep_events else None,
        )
        tenants += simulation.run(settings.seconds)
    end_s = settings.seconds or max(one.ended_s or 0.0 for one in tenants)
    num_rejected = sum(pool.num_rejected for pool, _ in pools)
    return SimulatedPool(settings.gpus, settings.warmup_s, end_s, tenants, events, num_rejected)


def run_pool_simulation(file: PoolFile, out: Path, tell: Callable[[str], None] = lambda _: None) -> dict[str, float]:
    """Simulate all policies of a file, write the results into `out` and return the summary.

    summary.json has `pool.{policy}.{utilisation | idle_share | ...}` and, below `tenants`, the figures of each tenant
    under each policy. A pool of at most MAX_PICTURE_GPUS GPUs also gets `pool_trace.{policy}.jsonl` and
    `pool.{policy}.html`. `tell` gets a line of progress before each policy.
    """
    keep = file.pool.gpus <= MAX_PICTURE_GPUS
    summary: dict[str, float] = {}
    of_tenants: dict[str, dict[str, Any]] = {}
    started_s = time.process_time()
    out.mkdir(parents=True, exist_ok=True)
    for policy in dict.fromkeys(file.pool.policies):
        tell(NAMES[policy])
        pool = simulate_pool(file, policy, keep_events=keep)
        summary |= {f"pool.{policy}.{key}": value for key, value in pool_figures(pool).items()}
        of_tenants[policy] = {one.name: tenant_figures(one) for one in pool.tenants}
        if keep:
            lines = "".join(json.dumps(event) + "\n" for event in pool.events)
            (out / f"pool_trace.{policy}.jsonl").write_text(lines)
            (out / f"pool.{policy}.html").write_text(pool_report(pool.events, f"Pool, {NAMES[policy]}"), "utf-8")
    summary |= _beside_fixed(summary, of_tenants)
    conditions = {
        "headrace": __version__,
        "took_cpu_s": round(time.process_time() - started_s, 3),
        "file": file.model_dump(mode="json"),
    }
    text = json.dumps({**summary, "tenants": of_tenants, "conditions": conditions}, indent=1, allow_nan=False)
    (out / "summary.json").write_text(text + "\n")
    return summary


# ---------------------------------------------------------------- figures


def pool_figures(pool: SimulatedPool) -> dict[str, float]:
    """Return the figures of a pool under one policy.

    `utilisation` is the share of all GPU seconds in which a GPU trained or generated, where an engine counts by the
    groups that it has of those that it has room for. `idle_share` is that in which nobody held it. `train_wait_*` are
    seconds from the question for train GPUs to the grant, `rollout_wait_*` those of groups for a first engine that is
    awake. `fairness` is Jain's index of the GPU seconds that each tenant held for each unit of its weight (Jain, Chiu
    and Hawe, 1984): 1 if all have the same, 1 / tenants if one has all.
    """
    total = pool.num_gpus * (pool.end_s - pool.begin_s)
    train_waits = [wait for one in pool.tenants for wait in one.train_waits_s]
    rollout_waits = [wait for one in pool.tenants for wait in one.rollout_waits_s]
    return {
        "seconds": pool.end_s - pool.begin_s,
        "steps": float(sum(one.steps for one in pool.tenants)),
        "utilisation": math.fsum(one.busy_gpu_s for one in pool.tenants) / total,
        "train_share": math.fsum(one.train_gpu_s for one in pool.tenants) / total,
        "rollout_share": math.fsum(one.rollout_gpu_s for one in pool.tenants) / total,
        "idle_share": max(0.0, 1 - math.fsum(one.held_gpu_s for one in pool.tenants) / total),
        "fairness": jain_index([one.held_gpu_s / one.weight for one in pool.tenants]),
        "switches": float(sum(one.switches for one in pool.tenants)),
        "rejected_plans": float(pool.num_rejected),
        **_spread("train_wait", train_waits),
        **_spread("rollout_wait", rollout_waits),
    }


def _beside_fixed(summary: Mapping[str, float], tenants: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return, for each policy beside a fixed partition, its utilisation as a multiple of the partition's, and the
    smallest such multiple of any tenant's steps."""
    found: dict[str, float] = {}
    fixed = tenants.get("fixed", {})
    for policy, own in tenants.items():
        if policy == "fixed" or not fixed:
            continue
        found[f"pool.{policy}.utilisation_vs_fixed"] = (
            summary[f"pool.{policy}.utilisation"] / summary["pool.fixed.utilisation"]
        )
        ratios = [own[name]["steps"] / alone["steps"] for name, alone in fixed.items() if alone["steps"]]
        if ratios:
            found[f"pool.{policy}.least_steps_vs_fixed"] = min(ratios)
    return found


def tenant_figures(tenant: TenantFigures) -> dict[str, float]:
    """Return the figures of one tenant."""
    return {
        "weight": tenant.weight,
        "steps": float(tenant.steps),
        "held_gpu_s": tenant.held_gpu_s,
        "train_gpu_s": tenant.train_gpu_s,
        "rollout_gpu_s": tenant.rollout_gpu_s,
        "switches": float(tenant.switches),
        **_spread("train_wait", tenant.train_waits_s),
        **_spread("rollout_wait", tenant.rollout_waits_s),
    }


def jain_index(values: Sequence[float]) -> float:
    """Return the square of the sum of `values`, divided by their number and the sum of their squares; 1 if all are
    0."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the number, median, 95th percentile and largest of some waits in seconds; 0 where there is none."""
    middle, late, longest = np.quantile(seconds, (0.5, 0.95, 1.0)).tolist() if seconds else (0.0, 0.0, 0.0)
    return {
        f"{name}s": float(len(seconds)),
        f"{name}_median_s": middle,
        f"{name}_p95_s": late,
        f"{name}_max_s": longest,
    }


def pool_table(summary: Mapping[str, float]) -> Table:
    """Format the summary as a table with one line for each policy, at most 80 columns wide. Its waits are those for
    train GPUs: the median, the 95th percentile and the longest."""
    table = Table(title="headrace simulate", title_justify="left", title_style="bold")
    header = ("policy", "in use", "steps", "wait s", "p95", "max", "fairness", "switches")
    for name in header:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, name in NAMES.items():
        at = f"pool.{policy}"
        if f"{at}.steps" not in summary:
            continue
        table.add_row(
            name,
            f"{summary[f'{at}.utilisation']:.1%}",
            f"{summary[f'{at}.steps']:.0f}",
            *(f"{summary[f'{at}.train_wait_{kind}_s']:.1f}" for kind in ("median", "p95", "max")),
            f"{summary[f'{at}.fairness']:.3f}",
            f"{summary[f'{at}.switches']:.0f}",
        )
    return table
