"""Defines, for each `algorithm.mode`, how far rollouts can run ahead of training and how the two overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["sync", "streaming", "async", "async_streaming"]
StaleGroups = Literal["requeue", "drop"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How far rollouts and training overlap. All code outside the configuration reads these numbers instead of the name
    of the mode."""

    window: int
    """Largest number of policy versions by which rollouts can run ahead of training; 0 is strictly on-policy."""
    groups: int
    """Number of groups that a step trains on."""
    chunk: int
    """Least number of ready groups that are trained on together. Equal to `groups` if a step is trained on as a
    whole."""
    stale: StaleGroups
    """Treatment of groups that have become too old for `window`: `requeue` generates them again, `drop` generates
    groups of other prompts instead."""

    @property
    def by_chunk(self) -> bool:
        """True if a step is trained on in chunks, as its groups become ready."""
        return self.chunk < self.groups


def overlap_of(mode: Mode, *, max_staleness: int, groups: int, chunk: int, stale: StaleGroups) -> Overlap:
    """Return the overlap in `mode`. max_staleness: window in modes with rollouts that run ahead. groups: number of
    groups of a step. chunk: least number of groups in a chunk, for modes that train on groups as they become ready.
    """
    ahead = mode in ("async", "async_streaming")
    by_chunk = mode in ("streaming", "async_streaming")
    return Overlap(max_staleness if ahead else 0, groups, min(chunk, groups) if by_chunk else groups, stale)
