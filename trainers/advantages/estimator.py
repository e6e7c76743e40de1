"""What an advantage estimator is: rewards by group in, one advantage per row out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RewardRows:
    """Rewarded rows. Raises ValueError when the lengths differ or a valid row's reward is not finite."""

    rewards: np.ndarray
    """float `[N]`: totals; those of rows that are not valid are not looked at."""
    valid: np.ndarray
    """bool or 0/1 `[N]`: 0 marks a failed row, whose advantage is 0 and which no other row is compared with."""
    group_ids: np.ndarray
    """int `[N]`: rows of one prompt share a number; in any order."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """float `[N]` each: rewards one by one, unweighted; at least those that the estimator names."""

    def __post_init__(self) -> None:
        if not len(self.rewards) == len(self.valid) == len(self.group_ids):
            raise ValueError(
                f"advantages: got {len(self.rewards)} rewards, {len(self.valid)} valid marks and "
                f"{len(self.group_ids)} group ids, expected as many of each"
            )
        for name, values in {"": self.rewards, **self.components}.items():
            if len(values) != len(self.rewards):
                raise ValueError(f"advantages: got {len(values)} values of reward {name!r} for {len(self.valid)} rows")
            bad = np.flatnonzero(np.asarray(self.valid).astype(bool) & ~np.isfinite(values))
            if len(bad):
                which = f"reward {name!r}" if name else "reward"
                raise ValueError(
                    f"advantages: the {which} of valid row {bad[0]} is {values[bad[0]]}, expected a finite number"
                )

    @property
    def valid_rows(self) -> np.ndarray:
        """int64 `[V]`: indices of the valid rows."""
        return np.flatnonzero(self.valid)

    def scatter(self, advantages: np.ndarray) -> np.ndarray:
        """float32 `[N]` from those of the valid rows, `[V]`; 0 elsewhere."""
        result = np.zeros(len(self.rewards), np.float32)
        result[self.valid_rows] = advantages
        return result


class AdvantageEstimator(Protocol):
    """Rows with equal rewards to compare with get exactly 0: nothing says which of them was better."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the rewards that it needs one by one."""
        ...

    @property
    def whole_step(self) -> bool:
        """Whether a row's advantage depends on other groups' rows, so that all rows of a step must come in one call.
        False: on its own group only, and rows may come group by group."""
        ...

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """float32 `[N]` advantages; float64 inside."""
        ...
