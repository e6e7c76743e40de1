"""REINFORCE++: rewards normalised over the whole step. Hu et al. 2025, arXiv:2501.03262."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .estimator import RewardRows
from .groups import group_rewards, over_std

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
