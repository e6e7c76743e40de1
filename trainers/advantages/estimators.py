"""Group-relative advantages: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .estimator import RewardRows

# ---------------- Rewards against those of their group: the arithmetic that the estimators share. All in float64.

STD_EPS = 1e-6
"""Added to standard deviations, as peers do."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRewards:
    """Rewards minus their group's mean."""

    centred: np.ndarray
    """float64 `[V]`; exactly 0 where all rewards of the group are equal."""
    group: np.ndarray
    """int64 `[V]`: 0..G-1."""
    count: np.ndarray
    """int64 `[G]`: rows of each group."""

    def normalised(self) -> np.ndarray:
        """`centred` over (the group's sample standard deviation + 1e-6), float64 `[V]`."""
        variance = np.bincount(self.group, self.centred**2) / np.maximum(self.count - 1, 1)
        return self.centred / (np.sqrt(variance) + STD_EPS)[self.group]


def group_rewards(rewards: np.ndarray, group_ids: np.ndarray) -> GroupedRewards:
    """`rewards` float `[V]` of valid rows, against the means of their groups."""
    rewards = np.asarray(rewards, np.float64)
    _, group = np.unique(group_ids, return_inverse=True)
    count = np.bincount(group)
    centred = rewards - (np.bincount(group, rewards) / count)[group]
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    # Decided on the rewards themselves: the mean of three times 0.1 is not 0.1, and eps lets such noise through.
    centred[(low == high)[group]] = 0.0
    return GroupedRewards(centred, group, count)


def over_std(centred: np.ndarray) -> np.ndarray:
    """`centred`, whose mean is 0, over (its sample standard deviation + 1e-6), float64 `[V]`."""
    return centred / (np.sqrt(np.sum(centred**2) / max(len(centred) - 1, 1)) + STD_EPS)


@dataclass(frozen=True, slots=True)
class GrpoAdvantage:
    """`(reward - mean of its group) / (std of its group + 1e-6)`, both over the group's valid rows.

    The standard deviation is the sample's (n - 1). Exactly 0 for failed rows, for groups with fewer than two valid rows
    and for groups whose rewards are all equal: none of them says which row was better.
    """

    normalize_std: bool = True
    """False: no division, which weighs easy and hard prompts up: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)."""

    components = ()
    whole_step = False

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        grouped = group_rewards(rows.rewards[index], rows.group_ids[index])
        return rows.scatter(grouped.normalised() if self.normalize_std else grouped.centred)


# ---------------- Leave-one-out advantages: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style
# Optimization for
#
# Learning from Human Feedback in LLMs", arXiv:2402.14740; the estimator is Kool et al.'s (2019).


@dataclass(frozen=True, slots=True)
class RlooAdvantage:
    """Reward minus the mean of the *other* valid rows of its group, an unbiased baseline; not divided by anything.

    That is `n / (n - 1)` times the distance to the mean of all n. 0 for a row that is alone.
    """

    components = ()
    whole_step = False

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        grouped = group_rewards(rows.rewards[index], rows.group_ids[index])
        scale = grouped.count / np.maximum(grouped.count - 1, 1)
        return rows.scatter(grouped.centred * scale[grouped.group])


# ---------------- REINFORCE++: rewards normalised over the whole step. Hu et al. 2025, arXiv:2501.03262.

Baseline = Literal["step", "group"]


@dataclass(frozen=True, slots=True)
class ReinforcePpAdvantage:
    """`(reward - baseline) / (std + 1e-6)`, std being that of the step's valid rows after the baseline is taken off.

    baseline `step`: their mean. `group`: the mean of the row's own group, which leaves a mean of 0 over the step
    (REINFORCE++-baseline). Every row weighs the same, whatever its length; the KL of the paper's reward is
    `loss.kl_in=reward`. 0 for a step whose rewards do not differ.
    """

    baseline: Baseline = "step"

    components = ()
    whole_step = True

    def __post_init__(self) -> None:
        if self.baseline not in ("step", "group"):
            raise ValueError(f"advantage.baseline: got {self.baseline!r}, expected 'step' or 'group'")

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        groups = np.zeros(len(index), np.int64) if self.baseline == "step" else rows.group_ids[index]
        return rows.scatter(over_std(group_rewards(rows.rewards[index], groups).centred))


# ---------------- GDPO, group reward-decoupled normalisation: several rewards, each normalised on its own. Liu et al.
# 2026,
#
# arXiv:2601.05242.


@dataclass(frozen=True, slots=True)
class GdpoAdvantage:
    """`A = sum over rewards k of w_k (r_k - mean_k of the group) / (std_k of the group + 1e-6)`, then
    `A / (std of A over the step's valid rows + 1e-6)`.

    Normalised after the sum, as in GRPO, a group answers alike for different mixes of rewards; so a reward that is
    easy to get drowns the others. The paper also takes A's mean over the step off; every group's is 0 already.
    """

    weights: Mapping[str, float]
    """Reward's name -> w_k, as in the rubric; those that count."""

    whole_step = True

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("advantage.kind: got 'gdpo' without a reward of a weight, expected at least one")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """Raises ValueError naming a reward that the rows do not have."""
        index = rows.valid_rows
        missing = [name for name in self.weights if name not in rows.components]
        if missing:
            raise ValueError(
                f"advantages: gdpo needs the reward {missing[0]!r} of each row, got {sorted(rows.components)}"
            )
        total = np.zeros(len(index))
        for name, weight in self.weights.items():
            total += weight * group_rewards(rows.components[name][index], rows.group_ids[index]).normalised()
        return rows.scatter(over_std(total))
