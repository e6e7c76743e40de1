"""Simulates a pool of GPUs under several policies, and writes a table, summary.json and timelines of the results.

The policies are the pool's own rule, a fixed partition, and first come, first served: the tenant that asks first gets
its GPUs and keeps them until its training has ended, or its rollouts of the step are complete. Only engines of the
tenant itself sleep for its training, as in a run alone.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Column, Table

from ....version import __version__
from ..server.gpu_trace import pool_trace, write_perfetto
from ..state.plan import Grant, Plan, PoolState, Request
from ..state.planner import IDLE, Draft
from ..state.pool import Pool, PoolBounds
from ..state.status import PoolEvent
from .config import Policy, PoolFile, TenantSpec, partition, place_tenants
from .simulated_tenants import PoolSimulation, TenantFigures


@dataclass(slots=True)
class FirstComePool(Pool):
    """Pool that serves tenants in the order of their requests. Tenants report their demand step by step."""

    since_s: dict[str, float] = field(default_factory=dict)
    """Time at which each tenant began to have rollouts of its current step to generate."""

    def plan(self, state: PoolState) -> Plan:
        """Return the plan that serves training and rollouts in the order of their requests. Training that cannot get
        all of its GPUs reserves the available ones. Rollouts take any available GPUs.
        """
        at_work = {name for name, one in state.tenants.items() if not one.ending and (one.remaining or one.estimate)}
        self.since_s = {name: self.since_s.get(name, state.now_s) for name in sorted(at_work)}
        draft = Draft(state)
        draft.shrink_ending()
        given_up = np.array([name not in at_work for name in draft.names], dtype=bool)
        can_have = _of_holders(draft, given_up)
        asks: list[tuple[float, int, str, Request | None]]
        asks = [(one.since_s, 0, one.tenant, one) for one in state.requests]
        asks += [(since_s, 1, name, None) for name, since_s in self.since_s.items()]
        for _, _, name, request in sorted(asks, key=lambda ask: ask[:3]):
            if request is not None:
                _serve(draft, request, can_have)
            else:
                _wake(draft, name, can_have)
        return draft.plan()


def _of_holders(draft: Draft, given_up: np.ndarray) -> np.ndarray:
    """Return for each GPU whether it is idle or held by an engine that its tenant no longer needs (bool `[GPUs]`)."""
    held = draft.holder >= 0
    can_have = draft.holder == IDLE
    can_have[held] = given_up[draft.tenant_of[draft.holder[held]]]
    return can_have


def _serve(draft: Draft, request: Request, can_have: np.ndarray) -> None:
    """Grant training its GPUs if each is idle, no longer needed, or held by an engine of the tenant itself. Otherwise
    reserve those GPUs of which this is true."""
    wanted = np.array(draft.state.tenants[request.tenant].map.gpus(request.role))
    own = draft.of_tenant(request.tenant)
    holders = draft.holder[wanted]
    by_itself = (holders >= own.start) & (holders < own.stop) & ~draft.touched[holders]
    if (can_have[wanted] | by_itself).all():
        for flat in np.unique(holders[holders >= 0]).tolist():
            draft.shrink(flat)
        draft.grants.append(Grant(request.tenant, request.role, request.priority, tuple(wanted.tolist())))
        draft.take(tuple(wanted.tolist()))
    can_have[wanted] = False


def _wake(draft: Draft, name: str, can_have: np.ndarray) -> None:
    own, gpus = draft.of_tenant(name), draft.gpus[name]
    asleep = ~(draft.awake_now[own] | draft.touched[own])
    for shard in np.flatnonzero(asleep & can_have[gpus].all(axis=1)).tolist():
        holders = draft.holder[gpus[shard]]
        for flat in np.unique(holders[holders >= 0]).tolist():
            draft.shrink(flat)
        draft.expand(own.start + shard)
        can_have[gpus[shard]] = False


MAX_TRACED_GPUS = 32
"""Largest number of GPUs of a pool whose events are kept and written."""

NAMES: dict[Policy, str] = {"gap_ratio": "gap ratio", "first_come": "first come", "fixed": "fixed part"}


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool simulated under one policy."""

    num_gpus: int
    begin_s: float
    """Simulated time in seconds at which the figures begin."""
    end_s: float
    """Simulated time in seconds at which the simulation ended."""
    tenants: list[TenantFigures]
    events: list[PoolEvent]
    """Events of each GPU; empty if they were not kept."""
    num_rejected: int
    """Number of plans that broke a check and were not carried out."""


def simulate_pool(file: PoolFile, policy: Policy, *, keep_events: bool = False) -> SimulatedPool:
    """Simulate the tenants of a file under one policy.

    Raises ConfigError if a tenant gets no engine in a fixed partition.
    """
    # Simulated tenants do not fail, so they send no signs of life.
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
    under each policy. A pool of at most MAX_TRACED_GPUS GPUs also gets `pool_trace.{policy}.jsonl` and
    `pool.{policy}.trace.json`, a timeline for Perfetto. `tell` gets a line of progress before each policy.
    """
    keep = file.pool.gpus <= MAX_TRACED_GPUS
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
            write_perfetto(pool_trace(pool.events), out / f"pool.{policy}.trace.json")
    summary |= _beside_fixed(summary, of_tenants)
    conditions = {
        "headrace": __version__,
        "took_cpu_s": round(time.process_time() - started_s, 3),
        "file": file.model_dump(mode="json"),
    }
    text = json.dumps({**summary, "tenants": of_tenants, "conditions": conditions}, indent=1, allow_nan=False)
    (out / "summary.json").write_text(text + "\n")
    return summary


# ---------------- These functions compute the figures of a simulation.


def pool_figures(pool: SimulatedPool) -> dict[str, float]:
    """Return the figures of a pool under one policy.

    `utilisation` is the share of all GPU seconds in which a GPU trained or generated, where an engine counts in
    proportion to its number of groups. `idle_share` is the share in which no tenant held the GPU. `train_wait_*` are
    seconds from the request for train GPUs to the grant. `rollout_wait_*` are seconds for which groups waited while no
    engine was awake. `fairness` is Jain's index of the GPU seconds that each tenant held for each unit of its weight
    (Jain, Chiu and Hawe, 1984): 1 if all have the same, 1 / tenants if one has all.
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
    """Return each policy's utilisation and the smallest number of steps of a tenant. Both are multiples of those of a
    fixed partition."""
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
    """Return the squared sum of `values`, divided by their number and their sum of squares; 1 if all are 0."""
    squares = math.fsum(value * value for value in values)
    return math.fsum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
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
    header = ("in use", "steps", "wait s", "p95", "max", "fairness", "switches")
    columns = ("policy", *(Column(name, justify="right") for name in header))
    table = Table(*columns, title="headrace simulate", title_justify="left", title_style="bold")
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
