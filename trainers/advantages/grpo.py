"""Group-relative advantages: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .estimator import RewardRows
from .groups import group_rewards


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
