"""Computes the gap of each tenant: its share of the rollout work that is left, less its share of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import PoolState, TenantState

EPSILON = 1e-9
"""Smallest difference of shares that counts as one."""


@dataclass(slots=True)
class Gap:
    """One tenant's part in the gap rule. The fields from `gap` on follow from the others."""

    name: str
    share: float
    """Share of this tenant in the work that is left, from 0 to 1: groups x GPUs of an engine x the tenant's weight."""
    awake_gpus: int
    """Number of GPUs on which the tenant's engines are awake."""
    budget: int
    """Number of GPUs of the pool that generate or are idle."""
    tp: int
    """Number of GPUs of one of the tenant's engines."""
    hungry: bool = False
    """True for a tenant that may take another's last shard while it has none itself (`TenantState.hungry`)."""
    gap: float = field(init=False)
    """Share of the work less the share of the GPUs: above 0 for a tenant that has too few GPUs."""
    wanted: int = field(init=False)
    """Number of GPUs that the share amounts to, in whole shards and at least one; halves are rounded up."""
    takes: bool = field(init=False)
    """True for a tenant that is to get another shard."""
    to_give: int = field(init=False)
    """Number of shards that the tenant can give away: all when it has no work left, otherwise those beyond its share,
    of which it keeps at least one."""
    to_hungry: int = field(init=False)
    """Number of shards that it can give to a hungry tenant: its last one, too, unless it is hungry itself."""

    def __post_init__(self) -> None:
        self.wanted = max(int(self.share * self.budget / self.tp + 0.5) * self.tp, self.tp)
        self.set_awake(self.awake_gpus)

    def set_awake(self, awake_gpus: int) -> None:
        """Set the number of awake GPUs, and all that follows from it."""
        self.awake_gpus = awake_gpus
        self.gap = self.share - (awake_gpus / self.budget if self.budget else 0.0)
        self.takes = self.gap > EPSILON and awake_gpus < self.wanted
        self.to_give = 0
        if self.gap < -EPSILON:
            awake = awake_gpus // self.tp
            self.to_give = awake if self.share <= 0 else max(0, awake - max(1, self.wanted // self.tp))
        self.to_hungry = self.to_give
        if self.gap < -EPSILON and awake_gpus and not self.hungry:
            self.to_hungry = max(1, self.to_give)


def gaps(state: PoolState, awake: Mapping[str, int], num_idle: int) -> dict[str, Gap]:
    """Return the gap of every tenant that takes part: it generates or waits to, and knows how much work it has left.

    awake: number of awake shards of each tenant. num_idle: number of GPUs that nobody holds or has reserved.
    """
    taking_part = {name: tenant for name, tenant in sorted(state.tenants.items()) if _takes_part(tenant, awake[name])}
    weights = {name: _work(tenant) * tenant.map.tp * tenant.map.weight for name, tenant in taking_part.items()}
    total = sum(weights.values())
    held = {name: awake[name] * tenant.map.tp for name, tenant in state.tenants.items()}
    budget = num_idle + sum(held.values())
    return {
        name: Gap(name, weights[name] / total if total else 0.0, held[name], budget, tenant.map.tp, tenant.hungry)
        for name, tenant in taking_part.items()
    }


def _takes_part(tenant: TenantState, awake: int) -> bool:
    known = tenant.remaining is not None or tenant.estimate is not None
    usable = len(tenant.left_out) < len(tenant.map.shards)
    return known and usable and not tenant.ending and (tenant.estimate is not None or awake > 0 or tenant.generates)


def _work(tenant: TenantState) -> int:
    """Return the number of groups that are left; a request that waits adds those that it expects."""
    return (tenant.remaining or 0) + (tenant.estimate or 0)
