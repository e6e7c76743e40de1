"""Truncated importance sampling per token.

Ionides 2008, "Truncated Importance Sampling"; for the mismatch of engine and trainer: Yao et al. 2025, "Your Efficient
RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .correction import TokenWeights
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """`min(w, high)`."""

    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        weights = (inputs.prev_logprobs - inputs.rollout_logprobs).exp()
        return TokenWeights(weights.clamp(max=self.high), weights > self.high)
