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

    def oldest(self, version: int) -> int:
        """Return the oldest policy version whose rows can be trained on while the policy has `version`."""
        return version - self.window

    def admitted(self, steps_left: int, claimed: int) -> int:
        """Return the largest number of groups that can be claimed or in flight at a time. They are those of the current
        step and of the later steps in the window.

        With chunks in a window, the room of one chunk stays free until the step has claimed as much. A claimed chunk
        then makes room for as many new prompts as it had, so prompts begin one after another. If all prompts of a step
        began together after a weight sync, they would compete in the engine with the prompts of the step before, and
        every second step would wait.

        steps_left: steps until the end of the run. claimed: groups that the current step has claimed.
        """
        admitted = min(1 + self.window, steps_left) * self.groups
        if self.window and self.by_chunk:
            return min(admitted, claimed + (1 + self.window) * self.groups - self.chunk)
        return admitted


def overlap_of(mode: Mode, *, max_staleness: int, groups: int, chunk: int, stale: StaleGroups) -> Overlap:
    """Return the overlap in `mode`. max_staleness: window in modes with rollouts that run ahead. groups: number of
    groups of a step. chunk: least number of groups in a chunk, for modes that train on groups as they become ready.
    """
    ahead = mode in ("async", "async_streaming")
    by_chunk = mode in ("streaming", "async_streaming")
    return Overlap(max_staleness if ahead else 0, groups, min(chunk, groups) if by_chunk else groups, stale)
