"""Computes the gap of each tenant: its share of the rollout work that is left, less its share of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .plan import PoolState, TenantState

EPSILON = 1e-9
"""Smallest difference of shares that counts as one."""


@dataclass(frozen=True, slots=True)
class Gap:
    """One tenant's part in the gap rule."""

    name: str
    share: float
    """Share of this tenant in the work that is left, from 0 to 1: groups x GPUs of an engine x the tenant's weight."""
    awake_gpus: int
    """Number of GPUs on which the tenant's engines are awake."""
    budget: int
    """Number of GPUs of the pool that generate or are idle."""
    tp: int
    """Number of GPUs of one of the tenant's engines."""

    @property
    def gap(self) -> float:
        """Share of the work less the share of the GPUs: above 0 for a tenant that has too few GPUs."""
        return self.share - (self.awake_gpus / self.budget if self.budget else 0.0)

    @property
    def wanted(self) -> int:
        """Number of GPUs that the share amounts to, in whole shards and at least one; halves are rounded up."""
        return max(int(self.share * self.budget / self.tp + 0.5) * self.tp, self.tp)

    @property
    def takes(self) -> bool:
        """True for a tenant that is to get another shard."""
        return self.gap > EPSILON and self.awake_gpus < self.wanted

    @property
    def to_give(self) -> int:
        """Number of shards that the tenant can give away: all when it has no work left, otherwise those beyond its
        share, of which it keeps at least one."""
        if self.gap >= -EPSILON:
            return 0
        awake = self.awake_gpus // self.tp
        return awake if self.share <= 0 else max(0, awake - max(1, self.wanted // self.tp))

    def with_awake(self, awake_gpus: int) -> Gap:
        """Return the gap with another number of awake GPUs."""
        return replace(self, awake_gpus=awake_gpus)


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
        name: Gap(name, weights[name] / total if total else 0.0, held[name], budget, tenant.map.tp)
        for name, tenant in taking_part.items()
    }


def _takes_part(tenant: TenantState, awake: int) -> bool:
    known = tenant.remaining is not None or tenant.estimate is not None
    usable = len(tenant.left_out) < len(tenant.map.shards)
    return known and usable and not tenant.ending and (tenant.estimate is not None or awake > 0 or tenant.generates)


def _work(tenant: TenantState) -> int:
    """Return the number of groups that are left; a request that waits adds those that it expects."""
    return (tenant.remaining or 0) + (tenant.estimate or 0)
