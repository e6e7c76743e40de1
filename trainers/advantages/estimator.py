"""What an advantage estimator is: rewards by group in, one advantage per row out."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class AdvantageEstimator(Protocol):
    def __call__(self, rewards: np.ndarray, valid: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
        """float32 `[N]` advantages.

        rewards     float `[N]`; those of rows that are not valid are not looked at
        valid       bool or 0/1 `[N]`: 0 marks a failed row, whose advantage is 0
        group_ids   int `[N]`: rows of one prompt share a number; in any order

        A row's advantage depends on its own group only, so rows may come group by group.
        Raises ValueError when the lengths differ or a valid row's reward is not finite.
        """
        ...
