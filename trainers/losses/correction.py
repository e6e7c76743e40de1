"""Off-policy correction: weights for rows that the engine sampled from another policy than ratios are taken against.

Even at the same version an engine's numbers are not the trainer's, and stale rows come from an older version. With
`w = p_prev / p_rollout`, the token's probability under the previous policy over that under the engine's, as a weight,
the loss's expectation under the engine's policy becomes one under the previous policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from .terms import LossInputs

CORRECTION_METRICS = ("correction_weight", "correction_fraction")
"""The mean weight, and the share of tokens whose weight was truncated or set to 0."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """A correction over one microbatch, without grad."""

    values: torch.Tensor
    """float32 `[T]`, 0 or more: factors of the policy objective's losses."""
    cut: torch.Tensor
    """bool `[T]`: where the weight is not `w`, but a bound or 0."""


class Correction(Protocol):
    """Weights from `prev_logprobs` and `rollout_logprobs` alone. A token of weight 0 still counts in N."""

    def __call__(self, inputs: LossInputs) -> TokenWeights: ...


# ---------------- Truncated importance sampling per token.
#
# Ionides 2008, "Truncated Importance Sampling"; for the mismatch of engine and trainer: Yao et al. 2025, "Your
# Efficient RL Framework Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl).


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """`min(w, high)`."""

    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        weights = (inputs.prev_logprobs - inputs.rollout_logprobs).exp()
        return TokenWeights(weights.clamp(max=self.high), weights > self.high)


# ---------------- IcePop: tokens on which trainer and engine disagree too much, either way, are left out.
#
# Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (Ring-1T),
# arXiv:2510.18855.


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


# ---------------- Importance sampling of whole answers: one weight for all tokens of a row.
#
# Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", which
# compares it, truncated and masked, with weights per token.


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
