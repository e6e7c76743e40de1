"""Importance sampling of whole answers: one weight for all tokens of a row.

Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", which
compares it, truncated and masked, with weights per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .correction import TokenWeights
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class TruncatedSequences:
    """`min(W, high)`, W being the row's probability under the previous policy over that under the engine's: the product
    of its tokens' `w`. Unbiased but for the bound, and of large variance on long answers."""

    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        log_weights = inputs.row_sum(inputs.prev_logprobs - inputs.rollout_logprobs)
        bound = math.log(self.high)
        weights = log_weights.clamp(max=bound).exp()  # bounded before exp: the product of a long row overflows
        return TokenWeights(weights[inputs.row_ids], (log_weights > bound)[inputs.row_ids])


@dataclass(frozen=True, slots=True)
class MaskedSequences:
    """W inside `[low, high]`, else 0: the whole row is left out."""

    low: float
    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        log_weights = inputs.row_sum(inputs.prev_logprobs - inputs.rollout_logprobs)
        lowest = math.log(self.low) if self.low > 0 else -math.inf
        cut = (log_weights < lowest) | (log_weights > math.log(self.high))  # a NaN is not cut; it skips the step
        return TokenWeights(log_weights.exp().masked_fill(cut, 0.0)[inputs.row_ids], cut[inputs.row_ids])
