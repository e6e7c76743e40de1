"""Leave-one-out advantages: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for
Learning from Human Feedback in LLMs", arXiv:2402.14740; the estimator is Kool et al.'s (2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .estimator import RewardRows
from .groups import group_rewards


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
