"""Applies a plan to a copy of the pool's state, and names everything about it that is wrong.

The planner is checked before any of its plans is carried out: a wrong plan would put two processes on one GPU, or leave
a GPU to nobody. A plan that breaks a check is dropped, and its state is saved as a test case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from .plan import Plan, PoolState, Priority, ShardId


def broken_checks(state: PoolState, plan: Plan) -> list[str]:
    """Return a sentence for each condition that `plan` breaks in `state`; an empty list for a good plan."""
    return [*_state_faults(state), *_name_faults(state, plan), *_order_faults(state, plan)] or list(
        _gpu_faults(state, plan)
    )


def apply_plan(state: PoolState, plan: Plan) -> PoolState:
    """Return the state after all orders of a plan without faults have been carried out."""
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
    """Yield what is wrong with a state before any plan."""
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
    """Yield orders for tenants and shards that do not exist."""
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
    """Yield orders that contradict each other or what their shards do now."""
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
    """Yield GPUs that would be held twice, or woken upon before they are free. Called for a plan whose orders exist."""
    after = apply_plan(state, plan)
    yield from _state_faults(after)
    held = after.held()
    if len(held) + len(after.idle()) != state.num_gpus:
        yield f"{len(held)} GPUs are held and {len(after.idle())} idle of {state.num_gpus}"


def _name(shard: ShardId) -> str:
    return f"shard {shard.shard} of {shard.tenant}"
