"""Counts how much rollout work a tenant has left, and decides when a change is worth a report to the pool."""

from __future__ import annotations

from dataclasses import dataclass

BUCKETS = 50
"""Number of progress reports that a tenant makes while it completes its target: one for every 2 % of it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Rollout work of one tenant, in groups (the rollouts of one prompt), as absolute numbers."""

    target: int
    """Number of groups of the step that is open, and of those that were admitted ahead of it."""
    completed: int
    """Number of these that are ready or have been claimed already."""

    def __post_init__(self) -> None:
        if self.target < 0 or self.completed < 0:
            raise ValueError(f"demand: got {self.completed} of {self.target} groups, expected numbers from 0")

    @property
    def remaining(self) -> int:
        """Number of groups that are still to be generated. Groups beyond the target count as none."""
        return self.target - min(self.completed, self.target)

    @property
    def bucket(self) -> int:
        """Position of the progress in steps of 2 %, from 0 to BUCKETS. A tenant reports when it changes."""
        return BUCKETS if self.target == 0 else BUCKETS * min(self.completed, self.target) // self.target
