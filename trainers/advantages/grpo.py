"""Group-relative advantages: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

STD_EPS = 1e-6
"""Added to the standard deviation, as peers do."""


@dataclass(frozen=True, slots=True)
class GrpoAdvantage:
    """`(reward - mean of its group) / (std of its group + 1e-6)`, both over the group's valid rows.

    The standard deviation is the sample's (n - 1). Exactly 0 for failed rows, for groups with fewer than two valid rows
    and for groups whose rewards are all equal: none of them says which row was better.
    """

    normalize_std: bool = True
    """False: no division, as in Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): easy and hard prompts."""

    def __call__(self, rewards: np.ndarray, valid: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        """See `AdvantageEstimator`. float64 inside, float32 `[N]` out."""
        rewards, valid = np.asarray(rewards, np.float64), np.asarray(valid).astype(bool)
        if not len(rewards) == len(valid) == len(group_ids):
            raise ValueError(
                f"advantages: got {len(rewards)} rewards, {len(valid)} valid marks and {len(group_ids)} group ids, "
                "expected as many of each"
            )
        bad = np.flatnonzero(valid & ~np.isfinite(rewards))
        if len(bad):
            raise ValueError(
                f"advantages: the reward of valid row {bad[0]} is {rewards[bad[0]]}, expected a finite number"
            )
        advantages = np.zeros(len(rewards), np.float32)
        rows = np.flatnonzero(valid)
        if len(rows):
            advantages[rows] = self._of_valid(rewards[rows], np.asarray(group_ids)[rows])
        return advantages

    def _of_valid(self, rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        _, group = np.unique(group_ids, return_inverse=True)
        count = np.bincount(group)
        centred = rewards - (np.bincount(group, rewards) / count)[group]
        low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
        np.minimum.at(low, group, rewards)
        np.maximum.at(high, group, rewards)
        # Decided on the rewards themselves: the mean of three times 0.1 is not 0.1, and eps lets such noise through.
        centred[(low == high)[group]] = 0.0
        if not self.normalize_std:
            return centred
        variance = np.bincount(group, centred**2) / np.maximum(count - 1, 1)
        return centred / (np.sqrt(variance) + STD_EPS)[group]
