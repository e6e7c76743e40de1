"""Rewards against those of their group: the arithmetic that the estimators share. All in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
