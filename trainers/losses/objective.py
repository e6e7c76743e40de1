"""What a policy objective is: a loss at each token, from ratios and advantages, before weights and means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .terms import LossInputs

DRIFT_METRICS = ("approx_kl", "rollout_kl")
"""approx_kl: k3 of the previous policy to this one; rollout_kl: k3 of the engine's policy to this one (staleness and
numerical mismatch together)."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """An objective over one microbatch."""

    values: torch.Tensor
    """float32 `[T]`, with grad."""
    metrics: Mapping[str, torch.Tensor]
    """float32 scalars without grad, in the order of the objective's `metrics`: sums over tokens."""


class Objective(Protocol):
    """A policy-gradient surrogate. Looks beyond a token only through `LossInputs.row_sum`."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self, inputs: LossInputs) -> TokenLosses: ...


@torch.no_grad()
def drift(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """DRIFT_METRICS of a microbatch."""
    moved = inputs.logprobs - inputs.prev_logprobs
    rollout = inputs.logprobs - inputs.rollout_logprobs
    return {
        "approx_kl": (moved.exp() - 1 - moved).sum(),
        "rollout_kl": (rollout.exp() - 1 - rollout).sum(),
    }


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless `[1 - clip_low, 1 + clip_high]` bounds a ratio from both sides of 1."""
    if not 0 < clip_low <= 1:
        raise ValueError(f"loss.clip_low: got {clip_low}, expected a number in (0, 1]")
    if not clip_high > 0:
        raise ValueError(f"loss.clip_high: got {clip_high}, expected a number above 0")


def count(marks: torch.Tensor) -> torch.Tensor:
    """float32 scalar: how many of bool `[T]` hold."""
    return marks.sum(dtype=torch.float32)
