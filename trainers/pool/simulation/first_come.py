"""Shares a pool by first come, first served: the rule that the pool's own rule is compared with in a simulation.

Whoever asks first gets its GPUs, and keeps them until it needs them no more: training until it ends, rollouts until
their step is complete. Only engines of the tenant itself sleep for its training, as in a run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..state.plan import Grant, Plan, PoolState, Request
from ..state.planner import IDLE, Draft
from ..state.pool import Pool


@dataclass(slots=True)
class FirstComePool(Pool):
    """A pool that serves tenants in the order in which they ask. Tenants tell their demand step by step."""

    since_s: dict[str, float] = field(default_factory=dict)
    """Time since which each tenant has rollouts of one step to generate."""

    def plan(self, state: PoolState) -> Plan:
        """Return the plan that serves training and rollouts in the order in which they were asked for.

        Training that cannot have all of its GPUs reserves those that it can have. Rollouts take what there is.
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
    """Return for each GPU whether it is idle or held by an engine of a tenant that needs it no more (bool `[GPUs]`)."""
    held = draft.holder >= 0
    can_have = draft.holder == IDLE
    can_have[held] = given_up[draft.tenant_of[draft.holder[held]]]
    return can_have


def _serve(draft: Draft, request: Request, can_have: np.ndarray) -> None:
    """Grant training its GPUs if all are free, given up, or held by engines of the tenant itself. Otherwise reserve
    those that are."""
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
    """Wake all engines of a tenant whose GPUs are free or given up."""
    own, gpus = draft.of_tenant(name), draft.gpus[name]
    asleep = ~(draft.awake_now[own] | draft.touched[own])
    for shard in np.flatnonzero(asleep & can_have[gpus].all(axis=1)).tolist():
        holders = draft.holder[gpus[shard]]
        for flat in np.unique(holders[holders >= 0]).tolist():
            draft.shrink(flat)
        draft.expand(own.start + shard)
        can_have[gpus[shard]] = False
