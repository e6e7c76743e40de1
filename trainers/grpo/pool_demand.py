"""Counts how much rollout work a tenant has left, and decides when a change is worth a report to the pool."""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS = 50
"""Number of progress reports that a tenant makes until its target is complete: one for every 2 % of the target."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Rollout work of one tenant, in groups (the rollouts of one prompt), as absolute numbers."""

    target: int
    """Number of groups of the open step and of the steps that were admitted ahead of it."""
    completed: int
    """Number of the target's groups that are ready or have been claimed."""

    def __post_init__(self) -> None:
        if self.target < 0 or self.completed < 0:
            raise ValueError(f"demand: got {self.completed} of {self.target} groups, expected numbers of 0 or more")

    @property
    def remaining(self) -> int:
        """Number of groups that are still to be generated, at least 0."""
        return self.target - min(self.completed, self.target)

    @property
    def bucket(self) -> int:
        """Position of the progress in steps of 2 %, from 0 to BUCKETS. A tenant sends a report when this number
        changes."""
        return BUCKETS if self.target == 0 else BUCKETS * min(self.completed, self.target) // self.target
