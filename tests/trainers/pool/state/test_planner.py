"""Tests the pool's planner: GPUs are conserved, shares are kept, requests come by priority and are never starved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tests.trainers.pool.state.pool_states import equal_tenants, pool_states, tenant_map
from headrace.trainers.grpo.pool_demand import BUCKETS, Demand
from headrace.trainers.pool.state.plan import (
    Grant,
    Plan,
    PoolState,
    Priority,
    Request,
    ShardId,
    TenantState,
    apply_plan,
    broken_checks,
)
from headrace.trainers.pool.state.planner import gaps, plan_cycle

STARVE_S = 60.0


def awake(state: PoolState) -> dict[str, int]:
    return {name: len(tenant.awake) for name, tenant in state.tenants.items()}


def after_cycle(state: PoolState) -> PoolState:
    return apply_plan(state, plan_cycle(state, starve_s=STARVE_S))


@given(pool_states())
def test_every_plan_passes_the_checks(state: PoolState) -> None:
    plan = plan_cycle(state, starve_s=STARVE_S)
    assert broken_checks(state, plan) == []
    assert plan == plan_cycle(state, starve_s=STARVE_S)


@given(pool_states())
def test_idle_gpus_are_those_that_nobody_holds(state: PoolState) -> None:
    held = [gpu for _, gpus in state.holders() for gpu in gpus]
    assert sorted(held) == sorted(state.held())
    assert state.idle() == set(range(state.num_gpus)) - set(held)
    assert state.num_idle == len(state.idle())


@given(pool_states())
def test_nobody_is_woken_beyond_its_share(state: PoolState) -> None:
    plan = plan_cycle(replace(state, requests=()), starve_s=STARVE_S)
    after = apply_plan(state, plan)
    before = apply_plan(state, Plan(tuple(shard for shard in plan.shrinks if state.tenants[shard.tenant].ending)))
    found = gaps(before, awake(before), len(before.idle()))
    for name in {shard.tenant for shard in plan.expands}:
        assert len(after.tenants[name].awake) * found[name].tp <= found[name].wanted


@given(pool_states())
def test_plans_come_to_an_end(state: PoolState) -> None:
    plans = [plan_cycle(state, starve_s=STARVE_S)]
    while plans[-1] and len(plans) < 20:
        state = apply_plan(state, plans[-1])
        plans.append(plan_cycle(state, starve_s=STARVE_S))
    assert not plans[-1]


@pytest.mark.parametrize(
    ("hungry", "shrinks", "expands"),
    [("", [], []), ("b", [ShardId("a", 1)], [ShardId("b", 1)]), ("ab", [], []), ("a", [], [])],
)
def test_a_hungry_tenant_gets_the_last_shard_of_one_that_is_not(
    hungry: str, shrinks: list[ShardId], expands: list[ShardId]
) -> None:
    """Tenant a trains on one of two GPUs and generates on the other one, so that each tenant's share is half a GPU."""
    state = equal_tenants(2, estimate=None, generates=True)
    tenants = {
        name: replace(tenant, awake=frozenset({1} if name == "a" else ()), hungry=name in hungry)
        for name, tenant in state.tenants.items()
    }
    state = replace(state, tenants=tenants, grants=(Grant("a", "train", Priority.TRAINING, (0,)),))
    plan = plan_cycle(state, starve_s=STARVE_S)
    assert (list(plan.shrinks), list(plan.expands)) == (shrinks, expands)
    assert broken_checks(state, plan) == []


@given(st.integers(2, 33), st.sampled_from(["ab", "abc"]))
def test_equal_tenants_end_within_one_shard_of_each_other(num_gpus: int, names: str) -> None:
    state = equal_tenants(num_gpus, names)
    first = "a"
    others = {name: replace(state.tenants[name], remaining=None, estimate=None) for name in names if name != first}
    state = replace(state, tenants=state.tenants | others)
    state = after_cycle(state)
    assert awake(state)[first] == num_gpus  # alone, it gets all
    late = {name: replace(state.tenants[name], estimate=100) for name in others}
    state = replace(state, tenants=state.tenants | late)
    state = after_cycle(state)
    counts = awake(state).values()
    if num_gpus >= len(names):
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == num_gpus


def test_weights_count() -> None:
    state = equal_tenants(8)
    heavy = replace(state.tenants["b"], map=tenant_map("b", range(8), 1, 4, weight=3.0))
    after = apply_plan(state, plan_cycle(replace(state, tenants=state.tenants | {"b": heavy}), starve_s=STARVE_S))
    assert awake(after) == {"a": 2, "b": 6}


def test_a_request_takes_gpus_from_generation_and_its_shards_come_back() -> None:
    state = after_cycle(equal_tenants(4, "a"))
    request = Request("a", "train", Priority.TRAINING, 5.0)
    plan = plan_cycle(replace(state, requests=(request,)), starve_s=STARVE_S)
    assert plan.shrinks == (ShardId("a", 0), ShardId("a", 1))
    assert plan.grants == (Grant("a", "train", Priority.TRAINING, (0, 1)),)
    training = apply_plan(replace(state, requests=(request,)), plan)
    assert not plan_cycle(training, starve_s=STARVE_S)
    assert plan_cycle(replace(training, grants=()), starve_s=STARVE_S).expands == plan.shrinks


def test_nothing_is_shrunk_for_a_request_that_cannot_be_granted() -> None:
    state = after_cycle(equal_tenants(4))
    first = state.tenants["a"].map
    blocked = Grant("a", "train", Priority.TRAINING, first.train_gpus)
    state = equal_tenants(4)
    state = replace(state, grants=(blocked,))
    state = after_cycle(state)
    request = Request("b", "train", Priority.TRAINING, 99.0)
    assert not plan_cycle(replace(state, requests=(request,), now_s=100.0), starve_s=STARVE_S)


def test_requests_come_by_priority_and_then_by_age() -> None:
    state = equal_tenants(4, "abc", remaining=None, estimate=None)
    requests = [
        Request("a", "train", Priority.TRAINING, 1.0),
        Request("b", "train", Priority.TRAINING, 0.5),
        Request("c", "train", Priority.INITIALIZATION, 9.0),
    ]
    random.Random(3).shuffle(requests)
    for expected in "cba":
        plan = plan_cycle(replace(state, requests=tuple(requests), now_s=10.0), starve_s=STARVE_S)
        assert [grant.tenant for grant in plan.grants] == [expected]
        requests = [one for one in requests if one.tenant != expected]


def test_a_wide_request_is_never_starved() -> None:
    """A request for four GPUs waits while requests for two come and go; once it has waited long enough, they wait."""
    narrow = {name: TenantState(tenant_map(name, range(i, i + 2), 1, 2)) for name, i in (("n0", 0), ("n1", 2))}
    state = PoolState(4, narrow | {"wide": TenantState(tenant_map("wide", range(4), 1, 4))})
    wide = Request("wide", "train", Priority.TRAINING, 0.0)
    granted_at = None
    held: list[Grant] = [Grant("n0", "train", Priority.TRAINING, (0, 1))]
    for second in range(100):
        turn = f"n{second % 2}"
        requests = (wide, Request(turn, "train", Priority.INITIALIZATION, float(second)))
        now = replace(state, grants=tuple(held), requests=requests, now_s=float(second))
        plan = plan_cycle(now, starve_s=30.0)
        if any(grant.tenant == "wide" for grant in plan.grants):
            granted_at = second
            break
        held = [*held[-1:], *plan.grants][-1:] if plan.grants else held[1:]
    assert granted_at is not None
    assert granted_at <= 33


def test_a_tenant_that_ends_gives_all_shards_back() -> None:
    state = after_cycle(equal_tenants(6))
    ending = replace(state.tenants["a"], ending=True)
    plan = plan_cycle(replace(state, tenants=state.tenants | {"a": ending}), starve_s=STARVE_S)
    assert {shard.shard for shard in plan.shrinks if shard.tenant == "a"} == state.tenants["a"].awake
    assert all(shard.tenant == "b" for shard in plan.expands)


def test_unknown_progress_is_skipped() -> None:
    state = equal_tenants(4)
    unknown = replace(state.tenants["b"], remaining=None, estimate=None)
    state = replace(state, tenants=state.tenants | {"b": unknown})
    assert {shard.tenant for shard in plan_cycle(state, starve_s=STARVE_S).expands} == {"a"}


BAD_PLANS = {
    "GPU 0 is held by": Plan(expands=(ShardId("a", 0), ShardId("b", 0))),
    "no tenant": Plan(expands=(ShardId("z", 0),)),
    "which has 4": Plan(expands=(ShardId("a", 9),)),
    "is not awake": Plan(shrinks=(ShardId("a", 0),)),
    "woken 2 times": Plan(expands=(ShardId("a", 0), ShardId("a", 0))),
    "but is awake": Plan(expands=(ShardId("a", 3),)),
    "both put to sleep and woken": Plan(shrinks=(ShardId("a", 3),), expands=(ShardId("a", 3),)),
    "its tenant ends": Plan(expands=(ShardId("e", 0),)),
    "not requested": Plan(grants=(Grant("b", "train", Priority.TRAINING, (0, 1)),)),
    "not those of its train role": Plan(grants=(Grant("a", "train", Priority.TRAINING, (1,)),)),
    "gets 2 grants": Plan(grants=(Grant("a", "train", Priority.TRAINING, (0, 1)),) * 2),
    "gets a grant of generation": Plan(grants=(Grant("a", "train", Priority.GENERATION, (0, 1)),)),
}


@pytest.mark.parametrize("sentence", BAD_PLANS)
def test_broken_plans_are_refused(sentence: str) -> None:
    state = equal_tenants(4, "abe")
    tenants = state.tenants | {
        "a": replace(state.tenants["a"], awake=frozenset({3})),
        "e": replace(state.tenants["e"], ending=True),
    }
    state = replace(state, tenants=tenants, requests=(Request("a", "train", Priority.TRAINING, 0.0),))
    assert broken_checks(state, plan_cycle(state, starve_s=STARVE_S)) == []
    faults = broken_checks(state, BAD_PLANS[sentence])
    assert any(sentence in fault for fault in faults), faults


def test_a_state_that_is_wrong_already_is_told() -> None:
    state = equal_tenants(4)
    both = {name: replace(one, awake=frozenset({1})) for name, one in state.tenants.items()}
    assert broken_checks(replace(state, tenants=both), Plan()) == ["GPU 1 is held by a (shard 1) and by b (shard 1)"]


def test_demand_counts_what_is_left() -> None:
    assert [Demand(50, done).remaining for done in (0, 20, 50, 60)] == [50, 30, 0, 0]
    assert len({Demand(1000, done).bucket for done in range(1001)}) == BUCKETS + 1
    assert Demand(0, 0).bucket == BUCKETS
    with pytest.raises(ValueError, match="expected numbers of 0 or more"):
        Demand(-1, 0)
