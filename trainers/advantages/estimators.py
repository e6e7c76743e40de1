"""Computes one advantage per row from the rewards of grouped rows: GRPO, Dr. GRPO, RLOO, REINFORCE++ and GDPO.

The group-relative advantage is from Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from .config import AdvantageConfig


@dataclass(frozen=True, slots=True, eq=False)
class RewardRows:
    """Rewards and groups of N rows, the input of an advantage estimator; a row is one sampled response.

    Construction raises ValueError when the arrays have different lengths or when a valid row's reward is not finite.
    """

    rewards: np.ndarray
    """Total reward of each row: float `[N]`. Values of rows that are not valid are ignored."""
    valid: np.ndarray
    """Validity of each row: bool or 0/1 `[N]`. A row that is not valid has failed; it gets the advantage 0 and is
    left out of every mean."""
    group_ids: np.ndarray
    """Id of each row's group: int `[N]`, in any order. The rows of one prompt have the same id."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Unweighted values of the individual rewards: name of the reward -> float `[N]`. Every name in the estimator's
    `components` must be present."""

    def __post_init__(self) -> None:
        if not len(self.rewards) == len(self.valid) == len(self.group_ids):
            raise ValueError(
                f"advantages: got {len(self.rewards)} rewards, {len(self.valid)} valid marks and "
                f"{len(self.group_ids)} group ids, expected equal numbers"
            )
        for name, values in {"": self.rewards, **self.components}.items():
            if len(values) != len(self.rewards):
                raise ValueError(
                    f"advantages: got {len(values)} values of reward {name!r} for {len(self.valid)} rows, expected one "
                    "per row"
                )
            bad = np.flatnonzero(np.asarray(self.valid).astype(bool) & ~np.isfinite(values))
            if len(bad):
                which = f"reward {name!r}" if name else "reward"
                raise ValueError(
                    f"advantages: the {which} of valid row {bad[0]} is {values[bad[0]]}, expected a finite number"
                )

    @property
    def valid_rows(self) -> np.ndarray:
        """Indices of the V valid rows: int64 `[V]`."""
        return np.flatnonzero(self.valid)

    def scatter(self, advantages: np.ndarray) -> np.ndarray:
        """Return the advantages of all rows, float32 `[N]`, given those of the valid rows; failed rows get 0.
        `advantages` is `[V]` for the V valid rows."""
        result = np.zeros(len(self.rewards), np.float32)
        result[self.valid_rows] = advantages
        return result


class AdvantageEstimator(Protocol):
    """Computes one advantage per row. If all rows that the estimator compares with each other have the same reward,
    their advantages are exactly 0."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the individual rewards that the estimator needs in addition to the total reward."""
        ...

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """Return one advantage per row, float32 `[N]`, computed in float64."""
        ...


# ---------------- The estimators share the following arithmetic on groups. All of it is in float64.

STD_EPS = 1e-6
"""Small number added to standard deviations before dividing by them, as in other libraries."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedRewards:
    """The rewards of V valid rows in G groups, each minus the mean of its group."""

    centred: np.ndarray
    """Reward of each row minus its group's mean: float64 `[V]`, exactly 0 where all rewards of the group are equal."""
    group: np.ndarray
    """Index of the group that each row belongs to: int64 `[V]`, 0..G-1."""
    count: np.ndarray
    """Number of rows of each group: int64 `[G]`."""

    def normalised(self) -> np.ndarray:
        """Return `centred` divided by (the group's sample standard deviation + 1e-6), float64 `[V]`."""
        variance = np.bincount(self.group, self.centred**2) / np.maximum(self.count - 1, 1)
        return self.centred / (np.sqrt(variance) + STD_EPS)[self.group]


def group_rewards(rewards: np.ndarray, group_ids: np.ndarray) -> GroupedRewards:
    """Subtract from each of the rewards of V valid rows (float `[V]`) the mean reward of the row's group."""
    rewards = np.asarray(rewards, np.float64)
    _, group = np.unique(group_ids, return_inverse=True)
    count = np.bincount(group)
    centred = rewards - (np.bincount(group, rewards) / count)[group]
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, group, rewards)
    np.maximum.at(high, group, rewards)
    # Equality is checked on the rewards themselves: the mean of three times 0.1 is not exactly 0.1, and dividing by
    # such a tiny standard deviation would turn the noise into advantages.
    centred[(low == high)[group]] = 0.0
    return GroupedRewards(centred, group, count)


def over_std(centred: np.ndarray) -> np.ndarray:
    """Divide values whose mean is 0 by (their sample standard deviation + 1e-6). Returns float64 `[V]`."""
    return centred / (np.sqrt(np.sum(centred**2) / max(len(centred) - 1, 1)) + STD_EPS)


@dataclass(frozen=True, slots=True)
class GrpoAdvantage:
    """The GRPO advantage is `(reward - mean of its group) / (std of its group + 1e-6)` over the group's valid rows.

    The standard deviation is that of a sample (divisor n - 1). The advantage is exactly 0 for failed rows, for groups
    with fewer than two valid rows, and for groups whose rewards are all equal, because such groups do not show which
    row was better.
    """

    normalize_std: bool = True
    """True to divide by the standard deviation. False for Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), because the
    division gives very easy and very hard prompts more weight."""

    components = ()

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        grouped = group_rewards(rows.rewards[index], rows.group_ids[index])
        return rows.scatter(grouped.normalised() if self.normalize_std else grouped.centred)


# ---------------- RLOO compares each reward with the mean of the other rewards.
#
# The source is Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human
# Feedback in LLMs", arXiv:2402.14740. The estimator is that of Kool et al. (2019).


@dataclass(frozen=True, slots=True)
class RlooAdvantage:
    """The RLOO advantage is the reward minus the mean of the *other* valid rows of its group, an unbiased baseline.

    It equals `n / (n - 1)` times the difference between the reward and the mean of all n valid rows. It is 0 for a row
    that is alone in its group. It is not divided by a standard deviation.
    """

    components = ()

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        grouped = group_rewards(rows.rewards[index], rows.group_ids[index])
        scale = grouped.count / np.maximum(grouped.count - 1, 1)
        return rows.scatter(grouped.centred * scale[grouped.group])


# ---------------- REINFORCE++ normalises rewards over the whole step (Hu et al. 2025, arXiv:2501.03262).

Baseline = Literal["step", "group"]


@dataclass(frozen=True, slots=True)
class ReinforcePpAdvantage:
    """The REINFORCE++ advantage is `(reward - baseline) / (std + 1e-6)`, normalised over the step's valid rows.

    With `step` the baseline is the mean reward of the step's valid rows. With `group` it is the mean reward of the
    row's own group; this variant is called REINFORCE++-baseline. In both cases the advantages of a step have mean 0.
    std is the standard deviation over the step after the baseline is subtracted. Every row weighs the same, whatever
    its length. Advantages are 0 for a step whose rewards are all equal. The paper's KL penalty in the reward is a
    separate setting, `loss.kl_in=reward`.
    """

    baseline: Baseline = "step"

    components = ()

    def __call__(self, rows: RewardRows) -> np.ndarray:
        index = rows.valid_rows
        groups = np.zeros(len(index), np.int64) if self.baseline == "step" else rows.group_ids[index]
        return rows.scatter(over_std(group_rewards(rows.rewards[index], groups).centred))


# ---------------- GDPO, group reward-decoupled normalisation, normalises each of several rewards separately.
#
# The source is Liu et al. 2026, arXiv:2601.05242.


@dataclass(frozen=True, slots=True)
class GdpoAdvantage:
    """The GDPO advantage normalises each reward within its group, sums them with weights, and normalises the sum.

    For each row, `A = sum over rewards k of w_k (r_k - mean_k of the group) / (std_k of the group + 1e-6)`, and the
    advantage is `A / (std of A over the step's valid rows + 1e-6)`. GRPO sums the rewards first. Different mixes of
    rewards can then give the same advantages, and a reward that is easy to get outweighs the others. The paper also
    subtracts the mean of A over the step. This mean is already 0, because it is 0 in every group.
    """

    weights: Mapping[str, float]
    """Weight w_k of each reward by its name in the rubric (the run's list of rewards). Rewards of weight 0 are left
    out."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("advantage.kind: got 'gdpo', expected at least one reward with a weight other than 0")

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.weights)

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """Return one advantage per row, float32 `[N]`. Raises ValueError, naming the reward, when `rows` has no values
        of a reward that the estimator needs."""
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


def build_advantages(config: AdvantageConfig, weights: Mapping[str, float]) -> AdvantageEstimator:
    """Build the advantage estimator that `config` names.

    weights: name of each reward in the run's list of rewards (the rubric) -> its weight. Only `gdpo` uses them. Raises
    ValueError when `gdpo` has no reward with a weight other than 0, or when the kind is unknown.
    """
    if config.kind == "grpo":
        return GrpoAdvantage()
    if config.kind == "dr_grpo":
        return GrpoAdvantage(normalize_std=False)
    if config.kind == "rloo":
        return RlooAdvantage()
    if config.kind == "reinforce_pp":
        return ReinforcePpAdvantage(config.baseline)
    if config.kind == "gdpo":
        return GdpoAdvantage({name: weight for name, weight in weights.items() if weight})
    raise ValueError(f"advantage.kind: got {config.kind!r}, expected the name of an estimator")
