"""Defines the interface of advantage estimators, which turn the rewards of grouped rows into one advantage per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


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
        """Return the advantages of all rows, float32 `[N]`, from those of the valid rows; failed rows have 0.
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

    @property
    def whole_step(self) -> bool:
        """True when a row's advantage depends on rows of other groups, so that one call must get all rows of a step.

        False when it depends only on the row's own group, so that groups may be passed one at a time.
        """
        ...

    def __call__(self, rows: RewardRows) -> np.ndarray:
        """Return one advantage per row, float32 `[N]`, computed in float64."""
        ...
