"""Defines by how many versions rollouts may run ahead of training, and how both overlap, in each `algorithm.mode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["sync", "streaming", "async", "async_streaming"]
StaleGroups = Literal["requeue", "drop"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far rollouts and training overlap. All code behind the configuration reads these numbers, and none of it
    reads the name of the mode."""

    window: int
    """Largest number of policy versions by which rollouts run ahead of training; 0 is strictly on-policy."""
    groups: int
    """Number of groups that a step trains on."""
    chunk: int
    """Least number of ready groups that are trained on together. Equal to `groups` if a step is trained on as a
    whole."""
    stale: StaleGroups
    """Treatment of groups that have become too old for `window`: `requeue` generates them again, `drop` generates other
    prompts in their place."""

    @property
    def by_chunk(self) -> bool:
        """True if a step is trained on in chunks, as its groups become ready."""
        return self.chunk < self.groups


def overlap_of(mode: Mode, *, max_staleness: int, groups: int, chunk: int, stale: StaleGroups) -> Overlap:
    """Return the numbers that `mode` names.

    max_staleness: window of the modes whose rollouts run ahead. groups: number of groups of a step. chunk: chunk of the
    modes that train on groups as they become ready.
    """
    ahead = mode in ("async", "async_streaming")
    by_chunk = mode in ("streaming", "async_streaming")
    return Overlap(max_staleness if ahead else 0, groups, min(chunk, groups) if by_chunk else groups, stale)
