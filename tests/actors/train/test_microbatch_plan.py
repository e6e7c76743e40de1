"""plan_shards: every row once, equal microbatch counts, balance, budgets, groups."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.train.microbatch_plan import Budget, RowHosts, ShardPlan, plan_shards
from headrace.actors.train.picture_plan import PatchBudget
from headrace.actors.train.topology import Topology


def lognormal(num_rows: int, seed: int = 0, cap: int = 8192) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6.5, 0.8, num_rows).clip(1, cap).astype(np.int64)


def max_over_mean(plan: ShardPlan, cost: np.ndarray, dp: int) -> float:
    loads = np.array([cost[plan.shard(rank)[0]].sum() for rank in range(dp)])
    return float(loads.max() / loads.mean())


@settings(max_examples=60)
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


@settings(max_examples=80)
@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 5), st.integers(1, 2), st.integers(100, 500))
def test_padded_microbatches_fit_the_budget(lengths, dp, cp, budget):
    lengths, topology = np.array(lengths, dtype=np.int64), Topology(dp=dp, cp=cp)
    for packing in ("none", "dynamic"):
        plan = plan_shards(lengths, topology, Budget(budget + 4, packing=packing))
        assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
        assert plan.sizes.shape == (dp, plan.num_microbatches)
        for rank in range(dp):
            rows, sizes = plan.shard(rank)
            assert sizes.sum() == len(rows)
            for part in np.split(rows, np.cumsum(sizes)[:-1]):
                padded = -(-lengths[part] // topology.pad_multiple) * topology.pad_multiple
                assert len(part) * padded.max(initial=0) <= budget + 4


def padded_over_valid(plan, lengths, dp):
    parts = [part for rank in range(dp) for rows, sizes in [plan.shard(rank)]
             for part in np.split(rows, np.cumsum(sizes)[:-1])]  # fmt: skip
    return sum(len(part) * lengths[part].max(initial=0) for part in parts) / lengths.sum()


def test_sorting_by_length_leaves_little_padding():
    lengths = lognormal(1024)
    plain, dynamic = (plan_shards(lengths, Topology(dp=4), Budget(16_384, packing=p)) for p in ("none", "dynamic"))
    assert padded_over_valid(plain, lengths, 4) > 1.8
    assert padded_over_valid(dynamic, lengths, 4) < 1.15
    assert dynamic.num_microbatches < plain.num_microbatches


def test_packed_counts_tokens_and_balances_them():
    lengths = np.array([900] + [10] * 90)
    packed = plan_shards(lengths, Topology(dp=1), Budget(1000, packing="packed"))
    assert packed.num_microbatches == 2
    plain = plan_shards(lengths, Topology(dp=1), Budget(1000, packing="dynamic"))
    assert plain.sizes.tolist() == [[1, 90]]


def test_rows_keep_their_order_when_not_packed():
    lengths = lognormal(64, cap=500)
    plan = plan_shards(lengths, Topology(dp=1), Budget(2000))
    assert plan.rows.tolist() == list(range(64)) and plan.num_microbatches > 1


def test_ranks_short_of_microbatches_split_their_heaviest():
    lengths = np.array([100] * 6 + [10] * 6)
    groups = np.array([0] * 6 + [1] * 6)
    plan = plan_shards(lengths, Topology(dp=2), Budget(100, group_tolerance=9.0), groups)
    assert sorted(map(tuple, plan.sizes.tolist())) == [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)]
    with pytest.raises(ValueError, match="trainer.packing: got 'tight', expected 'none', 'packed' or 'dynamic'"):
        Budget(100, packing="tight")  # type: ignore[arg-type]


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


def whole(plan: ShardPlan, unit: np.ndarray, dp: int) -> np.ndarray:
    """The rank of each row; every group must be on one."""
    rank_of = np.empty(len(unit), np.int64)
    for rank in range(dp):
        rank_of[plan.shard(rank)[0]] = rank
    for number in set(unit.tolist()):
        assert len(set(rank_of[unit == number].tolist())) == 1
    return rank_of


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.lists(st.integers(-1, 2), min_size=7, max_size=7),
    st.lists(st.integers(0, 2), min_size=2, max_size=3),
    st.sampled_from(["none", "packed"]),
)
def test_nearness_breaks_ties_and_never_costs_balance(lengths, home, ranks, packing):
    """All assignments of up to seven groups to two or three ranks are tried."""
    dp, lengths, home = len(ranks), np.array(lengths), np.array(home[: len(lengths)])
    unit, tokens, ranks = np.repeat(np.arange(len(lengths)), 2), np.repeat(lengths, 2), np.array(ranks)
    budget = Budget(200, packing=packing, group_tolerance=99.0)
    plain = plan_shards(tokens, Topology(dp=dp), budget, unit)
    near = plan_shards(tokens, Topology(dp=dp), budget, unit, RowHosts(np.repeat(home, 2), ranks))

    def judged(plan: ShardPlan) -> tuple[float, int]:
        rank_of = whole(plan, unit, dp)
        loads = np.bincount(rank_of, weights=tokens, minlength=dp)
        return loads.max(), int(tokens[ranks[rank_of] == home[unit]].sum())

    (worst, few), (other, many) = judged(plain), judged(near)
    limit = max(worst, 1.01 * tokens.sum() / dp)
    assert other <= limit + 1e-9 and many >= few and near.num_microbatches <= plain.num_microbatches
    assert many > few or near.digest == plain.digest
    if len(set(ranks.tolist())) < dp:
        return
    # One rank a host: if each row can be on its own host within the balance, it is.
    best = max(
        (2 * lengths[ranks[list(dealt)] == home].sum(), dealt)
        for dealt in product(range(dp), repeat=len(lengths))
        if np.bincount(dealt, weights=2 * lengths, minlength=dp).max() <= limit
    )[0]
    if best == 2 * lengths.sum() and near.num_microbatches == plain.num_microbatches == 1:
        assert many == best


def test_a_large_plan_reads_almost_all_rows_on_their_host():
    rng = np.random.default_rng(3)
    lengths, groups = lognormal(2048), np.arange(2048) // 8
    hosts = RowHosts(rng.integers(0, 4, 256)[groups], np.array([0, 0, 1, 1, 2, 2, 3, 3]))
    plans = [plan_shards(lengths, Topology(dp=8), Budget(16_384, packing="packed"), groups, at) for at in (None, hosts)]
    share = [
        sum(
            lengths[rows][hosts.rows[rows] == hosts.ranks[rank]].sum()
            for rank in range(8)
            for rows in [plan.shard(rank)[0]]
        )
        / lengths.sum()
        for plan in plans
    ]
    assert share[0] < 0.35 and share[1] > 0.8 and plans[0].num_microbatches == plans[1].num_microbatches
    assert max_over_mean(plans[1], lengths, 8) <= 1.01 + 1e-9
    assert (
        plans[0].digest == plan_shards(lengths, Topology(dp=8), Budget(16_384, packing="packed"), groups, None).digest
    )


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6), st.booleans()), max_size=15),
    st.integers(1, 3),
    st.integers(60, 200),
    st.integers(20, 60),
    st.sampled_from(["none", "packed"]),
)
def test_microbatches_keep_the_limits_of_tokens_and_patches(made, dp, budget, patches, packing):
    """made: rows, picture tokens and whether the first row has a picture more, of each group."""
    groups = np.repeat(np.arange(len(made)), [count for count, _, _ in made])
    first = np.r_[True, groups[1:] != groups[:-1]][: len(groups)]
    shown = np.array([[made[group][1], 3 * made[group][2]] for group in groups.tolist()]).reshape(-1, 2)
    own = np.where(first, shown[:, 1], 0) if len(groups) else np.zeros(0, np.int64)
    tokens = (shown[:, 0] + own).astype(np.float32)
    lengths = tokens.astype(np.int64) + np.arange(len(groups)) % 20 + 1
    limits = Budget(budget, packing=packing, pictures=PatchBudget(patches, 2.0, 0.5))
    plan = plan_shards(lengths, Topology(dp), limits, groups, picture_tokens=tokens)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    for rank in range(dp):
        rows, sizes = plan.shard(rank)
        for part in np.split(rows, np.cumsum(sizes)[:-1]):
            total = lengths[part].sum() if packing == "packed" else len(part) * lengths[part].max(initial=0)
            assert total <= budget
            distinct = {(group, made[group][1]) for group in groups[part].tolist()}
            assert 2 * (sum(size for _, size in distinct) + own[part].sum()) <= patches


def test_a_group_stays_together_where_it_fits() -> None:
    groups = np.repeat(np.arange(6), 4)
    lengths, tokens = np.full(24, 10), np.full(24, 8.0)
    for packing in ("packed", "none"):
        for patches, expected in ((None, [8, 8, 8]), (32, [8, 8, 8]), (31, [4] * 6)):
            limits = Budget(100, packing=packing, pictures=PatchBudget(patches, 2.0, 0.5))
            plan = plan_shards(lengths, Topology(1), limits, groups, picture_tokens=tokens)
            assert plan.sizes.tolist() == [expected] and plan.rows.tolist() == list(range(24))
    assert plan_shards(lengths, Topology(1), Budget(100, packing="packed"), groups).sizes.tolist() == [[8, 8, 8]]
    with pytest.raises(ValueError, match="trainer.patches_per_microbatch: got 15, but the pictures of one row have 16"):
        plan_shards(lengths, Topology(1), Budget(100, pictures=PatchBudget(15, 2.0)), groups, picture_tokens=tokens)


def test_ranks_are_balanced_by_tokens_and_patches() -> None:
    """One group has large pictures, which cost as much as the tokens of four groups."""
    groups = np.repeat(np.arange(6), 4)
    tokens = np.where(groups == 0, 8.0, 0.0)
    limits = Budget(1000, packing="packed", pictures=PatchBudget(None, 4.0, 5.0))
    plan = plan_shards(np.full(24, 10), Topology(2), limits, groups, picture_tokens=tokens)
    shares = [sorted(set(groups[plan.shard(rank)[0]].tolist())) for rank in range(2)]
    assert sorted(map(len, shares)) == [1, 5]
    assert plan.sizes.shape == (2, 1)
