"""Tests every advantage estimator against its formula, row by row."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainers.advantages.config import AdvantageConfig
from headrace.trainers.advantages.estimators import RewardRows, build_advantages
from headrace.trainers.config.checks import WHOLE_STEP_ADVANTAGES

EPS = 1e-6
WEIGHTS = {"exact": 0.7, "shape": -1.5, "only logged": 0.0}
CONFIGS = {
    "grpo": AdvantageConfig(),
    "dr_grpo": AdvantageConfig(kind="dr_grpo"),
    "rloo": AdvantageConfig(kind="rloo"),
    "reinforce_pp": AdvantageConfig(kind="reinforce_pp"),
    "reinforce_pp group": AdvantageConfig(kind="reinforce_pp", baseline="group"),
    "gdpo": AdvantageConfig(kind="gdpo"),
}
LEVELS = st.sampled_from([0.0, 0.1, 0.3, 0.75, 1.0, -2.0])
ROWS = st.lists(st.tuples(LEVELS, st.booleans(), st.integers(-2, 3), LEVELS), max_size=30)


def reward_rows(table: Sequence[tuple[float, bool, int, float]]) -> RewardRows:
    """Make rows whose total and reward `exact` are the first column and whose reward `shape` is the last."""
    first, valid, groups, last = (list(column) for column in zip(*table, strict=True)) if table else ([], [], [], [])
    components = {"exact": np.array(first), "shape": np.array(last)}
    return RewardRows(np.array(first), np.array(valid, bool), np.array(groups, np.int64), components)


def peers(rows: RewardRows, values: np.ndarray, row: int) -> list[float]:
    """Return the values of the valid rows of `row`'s group, including `row`."""
    return [
        float(values[other]) for other in np.flatnonzero(rows.valid) if rows.group_ids[other] == rows.group_ids[row]
    ]


def group_score(rows: RewardRows, values: np.ndarray, row: int) -> float:
    """Return (value - group's mean) / (group's std + eps)."""
    own = peers(rows, values, row)
    if len(own) < 2 or min(own) == max(own):
        return 0.0
    return (values[row] - statistics.fmean(own)) / (statistics.stdev(own) + EPS)


def normalised(values: list[float]) -> list[float]:
    """Return (value - mean) / (std + eps) over the list."""
    if len(values) < 2:
        return [0.0] * len(values)
    return [(value - statistics.fmean(values)) / (statistics.stdev(values) + EPS) for value in values]


def formula(kind: str, rows: RewardRows, row: int) -> float:
    """Return the formula of an estimator that uses one group only."""
    own = peers(rows, rows.rewards, row)
    if kind == "grpo":
        return group_score(rows, rows.rewards, row)
    if kind == "rloo":
        return rows.rewards[row] - (sum(own) - rows.rewards[row]) / (len(own) - 1) if len(own) > 1 else 0.0
    return rows.rewards[row] - statistics.fmean(own)


def reference(kind: str, rows: RewardRows) -> list[float]:
    valid = np.flatnonzero(rows.valid).tolist()
    if kind == "reinforce_pp":
        values = normalised([float(rows.rewards[row]) for row in valid])
    elif kind == "reinforce_pp group":
        values = normalised([formula("dr_grpo", rows, row) for row in valid])
    elif kind == "gdpo":
        values = normalised(
            [
                sum(w * group_score(rows, rows.components[name], row) for name, w in WEIGHTS.items() if w)
                for row in valid
            ]
        )
    else:
        values = [formula(kind, rows, row) for row in valid]
    result = [0.0] * len(rows.rewards)
    for row, value in zip(valid, values, strict=True):
        result[row] = value
    return result


@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=100)
@given(table=ROWS)
def test_equals_the_formula(kind: str, table: list[tuple[float, bool, int, float]]) -> None:
    rows = reward_rows(table)
    got = build_advantages(CONFIGS[kind], WEIGHTS)(rows)
    assert got.dtype == np.float32 and got.shape == (len(table),)
    np.testing.assert_allclose(got, reference(kind, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_failed_rows_are_not_looked_at(kind: str) -> None:
    rewards = np.array([1.0, np.nan, 0.0, 1.0, 9.0, 5.0])
    valid = np.array([1, 0, 1, 1, 0, 1])
    groups = np.array([7, 7, 7, 7, 8, 8])
    keep = np.flatnonzero(valid)
    estimate = build_advantages(CONFIGS[kind], WEIGHTS)
    got = estimate(RewardRows(rewards, valid, groups, {"exact": rewards, "shape": rewards}))
    few = {name: rewards[keep] for name in ("exact", "shape")}
    alone = estimate(RewardRows(rewards[keep], valid[keep], groups[keep], few))
    np.testing.assert_array_equal(got[keep], alone)
    np.testing.assert_array_equal(got[[1, 4]], 0.0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_equal_rewards_give_exactly_zero(kind: str) -> None:
    same = np.full(3, 0.1)
    got = build_advantages(CONFIGS[kind], WEIGHTS)(
        RewardRows(same, np.ones(3), np.zeros(3, np.int64), {"exact": same, "shape": same})
    )
    np.testing.assert_array_equal(got, 0.0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_order_of_rows_does_not_matter(kind: str) -> None:
    rng = np.random.default_rng(3)
    rows = random_rows(rng)
    order = rng.permutation(40)
    estimate = build_advantages(CONFIGS[kind], WEIGHTS)
    np.testing.assert_allclose(estimate(taken(rows, order)), estimate(rows)[order], rtol=1e-6, atol=1e-12)


def random_rows(rng: np.random.Generator) -> RewardRows:
    components = {"exact": rng.random(40), "shape": rng.random(40)}
    return RewardRows(rng.random(40), rng.random(40) > 0.2, rng.integers(0, 6, 40), components)


def taken(rows: RewardRows, index: np.ndarray) -> RewardRows:
    components = {name: values[index] for name, values in rows.components.items()}
    return RewardRows(rows.rewards[index], rows.valid[index], rows.group_ids[index], components)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_checks_know_whether_groups_may_come_one_by_one(kind: str) -> None:
    rows, estimate = random_rows(np.random.default_rng(0)), build_advantages(CONFIGS[kind], WEIGHTS)
    whole, alone = estimate(rows), np.zeros(40, np.float32)
    for group in range(6):
        index = np.flatnonzero(rows.group_ids == group)
        alone[index] = estimate(taken(rows, index))
    assert (
        np.array_equal(alone, whole) == np.allclose(alone, whole) == (CONFIGS[kind].kind not in WHOLE_STEP_ADVANTAGES)
    )


def test_gdpo_tells_mixes_apart_that_a_total_does_not() -> None:
    """In the paper's example two rewards that trade off leave every total, and so GRPO's advantage, the same."""
    exact, shape = np.array([1.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0, 0.0])
    rows = RewardRows(exact + shape, np.ones(4), np.zeros(4, np.int64), {"exact": exact, "shape": shape})
    grpo = build_advantages(AdvantageConfig(), {})(rows)
    gdpo = build_advantages(AdvantageConfig(kind="gdpo"), {"exact": 1.0, "shape": 1.0})(rows)
    assert grpo[0] == grpo[1] and gdpo[0] < gdpo[1]


def test_mistakes() -> None:
    ones, groups = np.ones(2), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="the reward of valid row 1 is nan, expected a finite number"):
        RewardRows(np.array([1.0, np.nan]), ones, groups)
    with pytest.raises(ValueError, match="the reward 'x' of valid row 0 is inf"):
        RewardRows(ones, ones, groups, {"x": np.array([np.inf, 1.0])})
    with pytest.raises(ValueError, match="got 2 rewards, 1 valid marks and 2 group ids"):
        RewardRows(ones, np.ones(1), groups)
    with pytest.raises(ValueError, match="got 3 values of reward 'x' for 2 rows"):
        RewardRows(ones, ones, groups, {"x": np.ones(3)})
    with pytest.raises(ValueError, match="advantage.kind: got 'gae', expected the name of an estimator"):
        build_advantages(AdvantageConfig.model_construct(kind="gae"), {})
    with pytest.raises(ValueError, match="Input should be 'step' or 'group'"):
        AdvantageConfig(kind="reinforce_pp", baseline="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'gdpo', expected at least one reward with a weight"):
        build_advantages(AdvantageConfig(kind="gdpo"), {"exact": 0.0})
    with pytest.raises(ValueError, match="gdpo needs the reward 'shape' of each row, got"):
        build_advantages(CONFIGS["gdpo"], WEIGHTS)(RewardRows(ones, ones, groups, {"exact": ones}))
