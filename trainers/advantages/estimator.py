"""Defines the interface of advantage estimators, which turn rewards by group into one advantage per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RewardRows:
    """The rewards of N rows. Raises ValueError when lengths differ or a valid row's reward is not finite."""

    rewards: np.ndarray
    """Total reward of each row: float `[N]`; values of rows that are not valid are ignored."""
    valid: np.ndarray
    """Marks of the valid rows: bool or 0/1 `[N]`. 0 marks a failed row, which gets the advantage 0 and is left out of
    every mean."""
    group_ids: np.ndarray
    """Number that the rows of one prompt share: int `[N]`, in any order."""
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Unweighted reward components by name, at least those that the estimator names: float `[N]` each."""

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
        """Indices of the V valid rows: int64 `[V]`."""
        return np.flatnonzero(self.valid)

    def scatter(self, advantages: np.ndarray) -> np.ndarray:
        """Put the valid rows' `advantages` `[V]` in their places among all rows: float32 `[N]`, 0 for failed rows."""
        result = np.zeros(len(self.rewards), np.float32)
        result[self.valid_rows] = advantages
        return result


class AdvantageEstimator(Protocol):
    """Computes the advantages of rows. Rows whose rewards are all equal get exactly 0, as none of them was better."""

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the reward components that the estimator needs besides the totals."""
        ...

    @property
    def whole_step(self) -> bool:
        """True when a row's advantage depends on rows of other groups, so that one call must have all rows of a step.

        False when it depends on the row's own group only, so that rows may come group by group.
        """
        ...

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """Return one advantage per row, float32 `[N]`, computed in float64."""
        ...
