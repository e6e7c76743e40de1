"""GDPO, group reward-decoupled normalisation: several rewards, each normalised on its own. Liu et al. 2026,
arXiv:2601.05242."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .estimator import RewardRows
from .groups import group_rewards, over_std


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
