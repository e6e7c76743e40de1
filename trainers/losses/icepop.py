"""IcePop: tokens on which trainer and engine disagree too much, either way, are left out.

Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (Ring-1T),
arXiv:2510.18855.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .correction import TokenWeights
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class IcePop:
    """`w` inside `[low, high]`, else 0."""

    low: float
    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        weights = (inputs.prev_logprobs - inputs.rollout_logprobs).exp()
        # Asked this way round, a NaN stays NaN and skips the step, instead of passing for a masked token.
        cut = (weights < self.low) | (weights > self.high)
        return TokenWeights(weights.masked_fill(cut, 0.0), cut)
