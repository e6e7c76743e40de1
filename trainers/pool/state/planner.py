"""Decides which tenant gets which GPU: requests for whole roles by priority and age first, then rollouts by their gap.

    state of the pool -> plan_cycle -> Plan (shrinks, then grants and expands)

The gap of a tenant is its share of the remaining rollout work minus its share of the GPUs. The planner moves one
shard at a time from the tenant with the smallest gap to the one with the largest. The planner is a pure function: equal
states give equal plans.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .plan import Grant, Plan, PoolState, Request, ShardId, TenantMap, TenantState

EPSILON = 1e-9
"""Smallest difference of shares that counts as a difference."""


@dataclass(slots=True)
class Gap:
    """One tenant's figures in the gap rule. The fields from `gap` on are computed from the others."""

    name: str
    share: float
    """Share of this tenant in the remaining work of the pool, from 0 to 1. The work of a tenant is groups x GPUs of an
    engine x weight."""
    awake_gpus: int
    """Number of GPUs on which the tenant's engines are awake."""
    budget: int
    """Number of GPUs of the pool that generate or are idle."""
    tp: int
    """Number of GPUs of one of the tenant's engines."""
    hungry: bool = False
    """True for a tenant that may take the last shard of another tenant while it has no shard (`TenantState.hungry`)."""
    gap: float = field(init=False)
    """Share of the work minus share of the GPUs: above 0 for a tenant with too few GPUs."""
    wanted: int = field(init=False)
    """Number of GPUs that corresponds to the share, in whole shards (at least one); halves are rounded up."""
    takes: bool = field(init=False)
    """True for a tenant that should get another shard."""
    to_give: int = field(init=False)
    """Number of shards that the tenant can give away: all without work left, otherwise the shards beyond its share.
    With work left, the tenant keeps at least one shard."""
    to_hungry: int = field(init=False)
    """Number of shards that the tenant can give to a hungry tenant. This includes its last shard, unless it is hungry
    itself."""

    def __post_init__(self) -> None:
        self.wanted = max(int(self.share * self.budget / self.tp + 0.5) * self.tp, self.tp)
        self.set_awake(self.awake_gpus)

    def set_awake(self, awake_gpus: int) -> None:
        """Set the number of awake GPUs, and recompute the fields that depend on it."""
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
    """Return the gap of every tenant that generates or waits to generate and knows how much work it has left.

    awake: number of awake shards of each tenant. num_idle: number of GPUs that no tenant holds or has reserved.
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
    """Return the number of remaining groups. A waiting request adds the number of groups that it expects."""
    return (tenant.remaining or 0) + (tenant.estimate or 0)


MAX_EXPANDS = 1_000
"""Largest number of shards that one cycle wakes. The next cycle continues."""

IDLE, TAKEN = -1, -2

_logger = logging.getLogger(__name__)


def plan_cycle(state: PoolState, *, starve_s: float) -> Plan:
    """Return the plan for the present state. starve_s: seconds of waiting after which a request comes before all others
    and reserves its GPUs, so that no other tenant gets them.
    """
    awake = {name: len(tenant.awake) for name, tenant in state.tenants.items()}
    free = {name: tenant for name, tenant in state.tenants.items() if name not in state.busy}
    ends = any(tenant.ending and tenant.awake for tenant in free.values())
    takes = any(gap.takes and gap.name in free for gap in gaps(state, awake, state.num_idle).values())
    if not (state.requests or ends or takes):
        return Plan()  # Most cycles of a large pool end here.
    draft = Draft(state)
    draft.shrink_ending()
    starving = {one: state.now_s - one.since_s >= starve_s for one in state.requests}
    turn = {one: (0 if late else 1 + one.priority, one.since_s, one.tenant, one.role) for one, late in starving.items()}
    for request in sorted(state.requests, key=turn.__getitem__):
        _serve(draft, request, starving=starving[request])
    _balance(draft)
    return draft.plan()


class Draft:
    """An unfinished plan, and the pool after the actions planned so far. Shards are numbered over all tenants."""

    def __init__(self, state: PoolState) -> None:
        self.state = state
        self.names = sorted(state.tenants)
        self.awake = {name: len(state.tenants[name].awake) for name in self.names}
        """Number of shards of each tenant that hold GPUs once the plan is done."""
        self.gpus = {name: shard_gpus(state.tenants[name].map) for name in self.names}
        """GPUs of each tenant's shards, `[shards, tp]`."""
        counts = np.array([len(self.gpus[name]) for name in self.names], dtype=np.int64)
        self._first = dict(zip(self.names, (np.cumsum(counts) - counts).tolist(), strict=True))
        self.tenant_of = np.repeat(np.arange(len(self.names)), counts)
        """Position in `names` of each shard's tenant, `[all shards]`."""
        self.holder = np.full(state.num_gpus, IDLE, dtype=np.int64)
        """The shard that generates on each GPU, IDLE, or TAKEN for one that cannot be had, `[GPUs]`."""
        self.touched = np.zeros(int(counts.sum()), dtype=bool)
        """Shards that this plan puts to sleep or wakes, and those left out; it leaves them alone. `[all shards]`."""
        self.awake_now = np.zeros_like(self.touched)
        for gpus in (state.blocked, *(grant.gpus for grant in state.grants)):
            self.holder[list(gpus)] = TAKEN
        for name in self.names:
            shards = np.array(sorted(state.tenants[name].awake), dtype=np.int64)
            self.holder[self.gpus[name][shards]] = (self._first[name] + shards)[:, None]
            self.awake_now[self._first[name] + shards] = True
            if name in state.busy:
                self.holder[self.gpus[name][shards]] = TAKEN
                self.touched[self.of_tenant(name)] = True
            for shard in state.tenants[name].left_out:
                self.touched[self._first[name] + shard] = True
        self.holder[list(state.frozen)] = TAKEN
        self._shrinks: list[int] = []
        self.expands: list[int] = []
        self.grants: list[Grant] = []

    def plan(self) -> Plan:
        return Plan(tuple(map(self.shard, self._shrinks)), tuple(self.grants), tuple(map(self.shard, self.expands)))

    @property
    def num_idle(self) -> int:
        return int((self.holder == IDLE).sum())

    def flat(self, shard: ShardId) -> int:
        return self._first[shard.tenant] + shard.shard

    def shard(self, flat: int) -> ShardId:
        name = self.names[self.tenant_of[flat]]
        return ShardId(name, flat - self._first[name])

    def shrink(self, flat: int) -> None:
        shard = self.shard(flat)
        self.holder[self.gpus[shard.tenant][shard.shard]] = IDLE
        self.awake[shard.tenant] -= 1
        self.awake_now[flat], self.touched[flat] = False, True
        self._shrinks.append(flat)

    def expand(self, flat: int) -> None:
        shard = self.shard(flat)
        self.holder[self.gpus[shard.tenant][shard.shard]] = flat
        self.awake[shard.tenant] += 1
        self.awake_now[flat], self.touched[flat] = True, True
        self.expands.append(flat)

    def shrink_ending(self) -> None:
        """Put all shards of ending tenants to sleep."""
        for name in self.names:
            if self.state.tenants[name].ending and name not in self.state.busy:
                for shard in sorted(self.state.tenants[name].awake):
                    self.shrink(self.flat(ShardId(name, shard)))

    def take(self, gpus: tuple[int, ...]) -> None:
        """Withhold these GPUs from all tenants for the rest of the plan. Shards that are awake on some of them stay
        awake."""
        idle = [gpu for gpu in gpus if self.holder[gpu] == IDLE]
        self.holder[idle] = TAKEN

    def of_tenant(self, name: str) -> slice:
        return slice(self._first[name], self._first[name] + len(self.gpus[name]))


def _serve(draft: Draft, request: Request, *, starving: bool) -> None:
    """Grant a request of other work than generation if all its GPUs are idle or belong to shards that generate.
    Otherwise shrink nothing for the request, so that no shard sleeps needlessly."""
    wanted = draft.state.tenants[request.tenant].map.gpus(request.role)
    holders = draft.holder[list(wanted)]
    if (holders != TAKEN).all():
        for flat in np.unique(holders[holders >= 0]).tolist():
            draft.shrink(flat)
        draft.grants.append(Grant(request.tenant, request.role, request.priority, wanted))
        draft.take(wanted)
    elif starving:
        draft.take(wanted)


def _balance(draft: Draft) -> None:
    """Wake one shard at a time for the tenant with the largest gap, and recompute the gaps after each."""
    found = gaps(draft.state, draft.awake, draft.num_idle)
    free = {name: gap for name, gap in found.items() if name not in draft.state.busy}
    givable = _givable(draft, {name: gap.to_give for name, gap in found.items()})
    in_vain: set[str] = set()
    while True:
        takers = [
            (-gap.gap / gap.share, -gap.gap, name) for name, gap in free.items() if gap.takes and name not in in_vain
        ]
        if not takers:
            return
        taker = found[min(takers)[-1]]
        if taker.hungry and not taker.awake_gpus:
            given = _wake_one(draft, taker, _givable(draft, {name: gap.to_hungry for name, gap in found.items()}))
        else:
            given = _wake_one(draft, taker, givable)
        if given is None:
            in_vain.add(taker.name)
            continue
        if given:
            in_vain.clear()  # A shard that was put to sleep can have left GPUs that others can use.
        for name in {taker.name, *given}:
            found[name].set_awake(draft.awake[name] * found[name].tp)
        givable = _givable(draft, {name: gap.to_give for name, gap in found.items()})
        if len(draft.expands) >= MAX_EXPANDS:
            _logger.warning("the pool's plan wakes %d shards; the next plan goes on", MAX_EXPANDS)
            return


_ALL = np.iinfo(np.int64).max


def _givable(draft: Draft, to_give: Mapping[str, int]) -> np.ndarray:
    """Return for each GPU the number of shards that its holder can give, int64 `[GPUs]`. The number is 0 if the GPU is
    not available, and _ALL if it is idle. to_give: number of shards that each tenant gives; tenants without an entry
    give none."""
    given = np.array([to_give.get(name, 0) for name in draft.names], dtype=np.int64)
    of_shard = np.where(draft.touched, 0, given[draft.tenant_of])
    return np.append(of_shard, [0, _ALL])[draft.holder]  # TAKEN and IDLE are indices from the end.


def _wake_one(draft: Draft, taker: Gap, givable: np.ndarray) -> list[str] | None:
    """Wake one shard of `taker`, after shrinking the donors' shards on its GPUs. Returns the donors' names, one for
    each shard, or None if no shard is available. A shard with idle GPUs is preferred, then the shard with the donors
    that have most to give, then the lowest number.
    """
    own, gpus = draft.of_tenant(taker.name), draft.gpus[taker.name]
    spare = givable[gpus].min(axis=1)
    spare[draft.awake_now[own] | draft.touched[own]] = 0
    shards = np.flatnonzero(spare)
    for shard in shards[np.argsort(-spare[shards], kind="stable")].tolist():
        of_gpus = zip(draft.holder[gpus[shard]].tolist(), givable[gpus[shard]].tolist(), strict=True)
        limits = {flat: to_give for flat, to_give in of_gpus if flat != IDLE}
        donors = [draft.names[draft.tenant_of[flat]] for flat in sorted(limits)]
        if all(donors.count(name) <= limits[flat] for flat, name in zip(sorted(limits), donors, strict=True)):
            for flat in sorted(limits):
                draft.shrink(flat)
            draft.expand(own.start + shard)
            return donors
    return None


@functools.lru_cache(maxsize=1024)
def shard_gpus(own: TenantMap) -> np.ndarray:
    """Return the GPUs of a tenant's shards, int64 `[shards, tp]`."""
    return np.array(own.shards, dtype=np.int64).reshape(len(own.shards), own.tp)
