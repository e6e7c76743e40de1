"""Defines the maps, grants, requests and plans of a pool of GPUs, and the conditions for a valid plan.

GPUs are numbered through the pool from 0. A tenant is one run; a shard is one of its engines, with the GPUs of that
engine. Shrinking puts shards to sleep, expanding wakes them.

A plan is checked before any of it is carried out, by applying it to a copy of the state: a wrong plan would put two
processes on one GPU, or leave a GPU unused. A plan that breaks a check is dropped, and its state is saved as a test
case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

Role = Literal["train", "rollout"]
"""Side of a tenant that holds GPUs. Only `rollout` can be made to give GPUs back."""


class Priority(IntEnum):
    """Kind of work that GPUs are requested for. Smaller numbers come first. One grant of training can cover the kinds
    from TRAINING to VALUES."""

    INITIALIZATION = 0
    TRAINING = 1
    CRITIC = 2
    OLD_LOGPROBS = 3
    REFERENCE_LOGPROBS = 4
    VALUES = 5
    GENERATION = 6


@dataclass(frozen=True, slots=True)
class TenantMap:
    """Map of the GPUs that one tenant can be granted."""

    name: str
    weight: float
    """Share of the pool relative to other tenants with as much work; above 0."""
    train_gpus: tuple[int, ...]
    """GPUs of the train ranks, in the order of the ranks."""
    shards: tuple[tuple[int, ...], ...]
    """GPUs of each engine. All engines have the same number of GPUs, and no two engines share a GPU."""

    def __hash__(self) -> int:
        """Return a hash of the name alone, because maps are keys of a cache and can have thousands of GPUs."""
        return hash(self.name)

    @property
    def tp(self) -> int:
        """Number of GPUs of an engine; 0 for a tenant without engines of its own."""
        return len(self.shards[0]) if self.shards else 0

    @property
    def rollout_gpus(self) -> tuple[int, ...]:
        """GPUs of all engines."""
        return tuple(gpu for shard in self.shards for gpu in shard)

    def gpus(self, role: Role) -> tuple[int, ...]:
        """Return all GPUs of a role."""
        return self.train_gpus if role == "train" else self.rollout_gpus


@dataclass(frozen=True, slots=True)
class Grant:
    """GPUs that a role holds as a whole and releases by itself, for any work other than generation."""

    tenant: str
    role: Role
    priority: Priority
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """Waiting request of a role for all of its GPUs, for any work other than generation."""

    tenant: str
    role: Role
    priority: Priority
    since_s: float
    """Time in seconds of the request, by the pool's clock."""


@dataclass(frozen=True, slots=True)
class TenantState:
    """The state of one tenant from which the pool makes a plan."""

    map: TenantMap
    awake: frozenset[int] = frozenset()
    """Numbers of the shards that hold their GPUs for generation."""
    remaining: int | None = None
    """Number of groups that are still to be generated; None while that is unknown."""
    estimate: int | None = None
    """Number of groups that the waiting generation request expects to generate; None if no request waits."""
    generates: bool = False
    """True from the first granted generation request until the tenant's end."""
    ending: bool = False
    """True when all shards of the tenant are being put to sleep permanently."""
    left_out: frozenset[int] = frozenset()
    """Numbers of the shards that failed to wake too often and are no longer woken."""
    hungry: bool = False
    """True if the tenant has waited so long with work but no shard awake that it may take another tenant's last
    shard."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of a pool from which the planner makes a plan."""

    num_gpus: int
    tenants: dict[str, TenantState]
    grants: tuple[Grant, ...] = ()
    requests: tuple[Request, ...] = ()
    now_s: float = 0.0
    """Time in seconds by the pool's clock."""
    blocked: frozenset[int] = frozenset()
    """GPUs without a holder that cannot be granted yet, such as the GPUs of processes that are being ended."""
    frozen: frozenset[int] = frozenset()
    """GPUs that plans in progress touch. The next plan leaves them to their holders, or without one."""
    busy: frozenset[str] = frozenset()
    """Names of the tenants that carry out orders, or will soon. The next plan leaves their shards alone."""

    def holders(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (holder, GPUs) for all GPUs that are held or blocked."""
        for grant in self.grants:
            yield f"{grant.tenant} ({grant.role})", grant.gpus
        for name, tenant in self.tenants.items():
            for shard in sorted(tenant.awake):
                yield f"{name} (shard {shard})", tenant.map.shards[shard]
        if self.blocked:
            yield "no tenant (blocked)", tuple(sorted(self.blocked))

    def held(self) -> list[int]:
        """Return the GPUs that are held or blocked, in no particular order. GPUs with two holders occur twice."""
        gpus = [gpu for grant in self.grants for gpu in grant.gpus]
        for tenant in self.tenants.values():
            for shard in tenant.awake:
                gpus.extend(tenant.map.shards[shard])
        return [*gpus, *self.blocked]

    def idle(self) -> frozenset[int]:
        """Return the GPUs that no tenant holds."""
        return frozenset(range(self.num_gpus)).difference(self.held())

    @property
    def num_idle(self) -> int:
        """Number of GPUs that no tenant holds, if none is held twice."""
        awake = sum(len(tenant.awake) * tenant.map.tp for tenant in self.tenants.values())
        return self.num_gpus - awake - sum(len(grant.gpus) for grant in self.grants) - len(self.blocked)


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """One engine of one tenant."""

    tenant: str
    shard: int
    """Number of the engine within its tenant."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The actions of one cycle of the pool. All shrinks are acknowledged before grants take effect and expands
    begin."""

    shrinks: tuple[ShardId, ...] = ()
    """Shards to put to sleep."""
    grants: tuple[Grant, ...] = ()
    """Requests to grant."""
    expands: tuple[ShardId, ...] = ()
    """Shards to wake."""

    def __bool__(self) -> bool:
        return bool(self.shrinks or self.grants or self.expands)


def broken_checks(state: PoolState, plan: Plan) -> list[str]:
    """Return a sentence for each condition that `plan` breaks in `state`; an empty list for a good plan."""
    return [*_state_faults(state), *_name_faults(state, plan), *_order_faults(state, plan)] or list(
        _gpu_faults(state, plan)
    )


def apply_plan(state: PoolState, plan: Plan) -> PoolState:
    """Return the state after all orders of a valid plan have been carried out."""
    tenants = dict(state.tenants)
    for shard in plan.shrinks:
        tenant = tenants[shard.tenant]
        tenants[shard.tenant] = replace(tenant, awake=tenant.awake - {shard.shard})
    for shard in plan.expands:
        tenant = tenants[shard.tenant]
        tenants[shard.tenant] = replace(tenant, awake=tenant.awake | {shard.shard}, estimate=None, generates=True)
    granted = {(grant.tenant, grant.role) for grant in plan.grants}
    requests = tuple(one for one in state.requests if (one.tenant, one.role) not in granted)
    return replace(state, tenants=tenants, grants=(*state.grants, *plan.grants), requests=requests)


def _state_faults(state: PoolState) -> Iterator[str]:
    held = state.held()
    if len(set(held)) == len(held) and (not held or (min(held) >= 0 and max(held) < state.num_gpus)):
        return
    counts = Counter(held)
    for gpu, count in sorted(counts.items()):
        if count > 1:
            names = [name for name, gpus in state.holders() if gpu in gpus]
            yield f"GPU {gpu} is held by {' and by '.join(names)}"
        if not 0 <= gpu < state.num_gpus:
            yield f"GPU {gpu} is held, but the pool has GPUs 0 to {state.num_gpus - 1}"


def _name_faults(state: PoolState, plan: Plan) -> Iterator[str]:
    for shard in (*plan.shrinks, *plan.expands):
        tenant = state.tenants.get(shard.tenant)
        if tenant is None:
            yield f"an order is for {shard.tenant}, which is no tenant"
        elif not 0 <= shard.shard < len(tenant.map.shards):
            yield f"an order is for shard {shard.shard} of {shard.tenant}, which has {len(tenant.map.shards)}"
    for grant in plan.grants:
        tenant = state.tenants.get(grant.tenant)
        if tenant is None:
            yield f"a grant is for {grant.tenant}, which is no tenant"
        elif tuple(grant.gpus) != tenant.map.gpus(grant.role):
            yield f"a grant gives {grant.tenant} GPUs {list(grant.gpus)}, not those of its {grant.role} role"


def _order_faults(state: PoolState, plan: Plan) -> Iterator[str]:
    for what, orders in (("put to sleep", plan.shrinks), ("woken", plan.expands)):
        for shard, count in Counter(orders).items():
            if count > 1:
                yield f"{_name(shard)} is {what} {count} times"
    for shard in sorted(set(plan.shrinks) & set(plan.expands)):
        yield f"{_name(shard)} is both put to sleep and woken"
    for shard in plan.shrinks:
        if (tenant := state.tenants.get(shard.tenant)) and shard.shard not in tenant.awake:
            yield f"{_name(shard)} is put to sleep, but is not awake"
    for shard in plan.expands:
        if tenant := state.tenants.get(shard.tenant):
            if shard.shard in tenant.awake:
                yield f"{_name(shard)} is woken, but is awake"
            if shard.shard in tenant.left_out:
                yield f"{_name(shard)} is woken, but is left out"
            if tenant.ending:
                yield f"{_name(shard)} is woken, but its tenant ends"
    waiting = {(one.tenant, one.role, one.priority) for one in state.requests}
    held = {(one.tenant, one.role) for one in state.grants}
    for grant in plan.grants:
        if (grant.tenant, grant.role, grant.priority) not in waiting:
            yield f"{grant.tenant} ({grant.role}) gets a grant that it has not requested"
        if (grant.tenant, grant.role) in held:
            yield f"{grant.tenant} ({grant.role}) gets a grant while it holds one"
        if grant.priority is Priority.GENERATION:
            yield f"{grant.tenant} gets a grant of generation, which goes by shards"
    for (tenant, role), count in Counter((one.tenant, one.role) for one in plan.grants).items():
        if count > 1:
            yield f"{tenant} ({role}) gets {count} grants"


def _gpu_faults(state: PoolState, plan: Plan) -> Iterator[str]:
    """Yield a fault for each GPU that would be held twice, or used by a waking shard before it is free. All shards and
    requests of the plan must exist."""
    for shard in (*plan.shrinks, *plan.expands):
        if shard.tenant in state.busy:
            yield f"{_name(shard)} gets an order while its tenant has one"
    for grant in plan.grants:
        if touched := sorted(state.frozen.intersection(grant.gpus)):
            yield f"{grant.tenant} ({grant.role}) gets GPU {touched[0]}, which another plan touches"
    after = apply_plan(state, plan)
    yield from _state_faults(after)
    held = after.held()
    if len(held) + len(after.idle()) != state.num_gpus:
        yield f"{len(held)} GPUs are held and {len(after.idle())} idle of {state.num_gpus}"


def _name(shard: ShardId) -> str:
    return f"shard {shard.shard} of {shard.tenant}"
