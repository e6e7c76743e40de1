"""GRPO advantages against the formula, row by row."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainers.advantages.factory import AdvantageConfig, build_advantages
from headrace.trainers.advantages.grpo import GrpoAdvantage


def reference(rewards: list[float], valid: list[bool], groups: list[int], normalize_std: bool) -> list[float]:
    result = []
    for reward, ok, group in zip(rewards, valid, groups, strict=True):
        peers = [r for r, v, g in zip(rewards, valid, groups, strict=True) if v and g == group]
        if not ok or len(peers) < 2 or min(peers) == max(peers):
            result.append(0.0)
            continue
        scale = statistics.stdev(peers) + 1e-6 if normalize_std else 1.0
        result.append((reward - statistics.fmean(peers)) / scale)
    return result


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.3, 0.75, 1.0, -2.0]), st.booleans(), st.integers(-2, 3)), max_size=30
)


@given(rows=ROWS, normalize_std=st.booleans())
def test_equals_the_formula(rows: list[tuple[float, bool, int]], normalize_std: bool) -> None:
    rewards, valid, groups = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    got = GrpoAdvantage(normalize_std)(np.array(rewards), np.array(valid, bool), np.array(groups, np.int64))
    assert got.dtype == np.float32 and got.shape == (len(rows),)
    np.testing.assert_allclose(got, reference(rewards, valid, groups, normalize_std), rtol=1e-5, atol=1e-6)


def test_failed_rows_are_not_looked_at() -> None:
    rewards = np.array([1.0, np.nan, 0.0, 1.0, 9.0, 5.0])
    valid = np.array([1, 0, 1, 1, 0, 1])
    groups = np.array([7, 7, 7, 7, 8, 8])
    got = build_advantages(AdvantageConfig())(rewards, valid, groups)
    alone = build_advantages(AdvantageConfig())(rewards[[0, 2, 3]], valid[[0, 2, 3]], groups[[0, 2, 3]])
    np.testing.assert_array_equal(got[[0, 2, 3]], alone)
    np.testing.assert_array_equal(got[[1, 4, 5]], 0.0)


def test_equal_rewards_give_exactly_zero() -> None:
    got = GrpoAdvantage()(np.full(3, 0.1), np.ones(3), np.zeros(3, np.int64))
    np.testing.assert_array_equal(got, 0.0)


def test_groups_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(0)
    rewards, valid, groups = rng.random(40), rng.random(40) > 0.2, rng.integers(0, 6, 40)
    whole = GrpoAdvantage()(rewards, valid, groups)
    for group in range(6):
        rows = groups == group
        np.testing.assert_array_equal(GrpoAdvantage()(rewards[rows], valid[rows], groups[rows]), whole[rows])


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="the reward of valid row 1 is nan"):
        GrpoAdvantage()(np.array([1.0, np.nan]), np.ones(2), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="got 2 rewards, 1 valid marks and 2 group ids"):
        GrpoAdvantage()(np.ones(2), np.ones(1), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="advantage.kind: got 'gae', expected 'grpo'"):
        AdvantageConfig(kind="gae")  # type: ignore[arg-type]
