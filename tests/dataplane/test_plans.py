"""plan_shards: every row once, equal microbatch counts, balance, budgets, groups."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.plans import Budget, ShardPlan, plan_shards
from headrace.dataplane.topology import Topology


def lognormal(num_rows: int, seed: int = 0, cap: int = 8192) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6.5, 0.8, num_rows).clip(1, cap).astype(np.int64)


def max_over_mean(plan: ShardPlan, cost: np.ndarray, dp: int) -> float:
    loads = np.array([cost[plan.shard(rank)[0]].sum() for rank in range(dp)])
    return float(loads.max() / loads.mean())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 100), max_size=60),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(100, 400),
)
def test_each_row_once_equal_counts_within_budget(lengths, dp, tp, group, budget):
    lengths = np.array(lengths, dtype=np.int64)
    groups = np.arange(len(lengths)) // group
    topology = Topology(dp=dp, tp=tp)
    plan = plan_shards(lengths, topology, Budget(budget + 2), groups)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    assert plan.sizes.shape == (dp, plan.num_microbatches)
    assert plan.sizes.sum() == len(lengths)
    for rank in range(dp):
        rows, sizes = plan.shard(rank)
        for part in np.split(rows, np.cumsum(sizes)[:-1]):
            padded = -(-lengths[part] // topology.pad_multiple) * topology.pad_multiple
            assert padded.sum() <= budget + 2


def test_groups_stay_whole_when_balance_allows():
    lengths = np.full(64, 100)
    groups = np.repeat(np.arange(16), 4)
    plan = plan_shards(lengths, Topology(dp=4), Budget(10_000), groups)
    for rank in range(4):
        rows, _ = plan.shard(rank)
        assert all(np.isin(np.flatnonzero(groups == group), rows).all() for group in np.unique(groups[rows]))


def test_groups_are_split_when_whole_ones_cannot_balance():
    lengths = np.concatenate([np.full(8, 1000), np.full(24, 10)])
    groups = np.repeat(np.arange(4), 8)
    plan = plan_shards(lengths, Topology(dp=4), Budget(10_000), groups)
    assert max_over_mean(plan, lengths.astype(float), 4) <= 1.1


@pytest.mark.parametrize(("rows", "dp", "bound"), [(512, 8, 1.05), (2048, 64, 1.15)])
def test_quadratic_balance_with_groups_of_eight(rows, dp, bound):
    for seed in range(5):
        lengths = lognormal(rows, seed, cap=4096)  # a longer row alone can outweigh a 64th of the batch
        budget = Budget(16_384, linear_cost=0.0, quadratic_cost=1.0)
        plan = plan_shards(lengths, Topology(dp=dp), budget, np.arange(rows) // 8)
        assert max_over_mean(plan, lengths.astype(float) ** 2, dp) <= bound


def test_same_input_same_digest_other_input_other_digest():
    lengths = lognormal(256)
    first = plan_shards(lengths, Topology(dp=4), Budget(16_384))
    again = plan_shards(lengths, Topology(dp=4), Budget(16_384))
    other = plan_shards(lengths[::-1].copy(), Topology(dp=4), Budget(16_384))
    assert first.digest == again.digest != other.digest


def test_row_over_the_budget_is_named():
    with pytest.raises(ValueError, match=r"tokens_per_microbatch: got 100, but row 1 alone takes 101 tokens"):
        plan_shards(np.array([5, 101]), Topology(dp=1), Budget(100))


def test_no_rows_is_one_empty_microbatch_a_rank():
    plan = plan_shards(np.zeros(0, dtype=np.int64), Topology(dp=3), Budget(10))
    assert plan.sizes.tolist() == [[0], [0], [0]]
