"""Measures and corrects the difference between the trainer's log-probs and those of the engine that sampled the tokens.

Engine and trainer compute slightly different numbers even with the same version of the weights, and rows that were
sampled earlier come from an older version. The weight of a token is `w = p_prev / p_rollout`: the token's probability
under the previous policy, which is the denominator of the objective's ratios, divided by its probability under the
engine's policy. It turns the loss's expectation under the engine's policy into one under the previous policy.

The metrics of the mismatch are measured in every train step. When engine and trainer have the same weights, the
log-probs differ only by numerics (kernels, precision, truncation by top-p or top-k). An engine that received wrong
weights, or a mask over the wrong tokens, appears in these metrics first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from .terms import LossInputs

CORRECTION_METRICS = ("correction_weight", "correction_fraction")
"""Names of the metrics of every correction: the mean weight, and the share of tokens whose weight was truncated or set
to 0."""


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """The weights that a correction gives to the tokens of one microbatch. No gradient flows through them."""

    values: torch.Tensor
    """Weight by which each token's loss is multiplied: float32 `[T]`, 0 or more."""
    cut: torch.Tensor
    """True for each token whose weight `w` was replaced by a bound or by 0: bool `[T]`."""


class Correction(Protocol):
    """Computes token weights from `prev_logprobs` and `rollout_logprobs` alone. A token of weight 0 still counts in N,
    the denominator of the step's mean loss."""

    def __call__(self, inputs: LossInputs) -> TokenWeights: ...


# ---------------- Truncated importance sampling bounds the weight of each token.
#
# The method is from Ionides 2008, "Truncated Importance Sampling". Yao et al. 2025, "Your Efficient RL Framework
# Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl), apply it to the mismatch of engine
# and trainer.


@dataclass(frozen=True, slots=True)
class TruncatedTokens:
    """Weights each token by `min(w, high)`, where w is its importance weight; this is truncated importance sampling."""

    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        weights = (inputs.prev_logprobs - inputs.rollout_logprobs).exp()
        return TokenWeights(weights.clamp(max=self.high), weights > self.high)


# ---------------- IcePop leaves out tokens on which trainer and engine disagree too much, in either direction.
#
# The source is Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
# (Ring-1T), arXiv:2510.18855.


@dataclass(frozen=True, slots=True)
class IcePop:
    """Weights each token by its importance weight `w` if w is inside `[low, high]`. Other tokens are left out (weight
    0)."""

    low: float
    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        weights = (inputs.prev_logprobs - inputs.rollout_logprobs).exp()
        # These comparisons are false for a NaN. The NaN stays and makes the step skip, instead of counting as masked.
        cut = (weights < self.low) | (weights > self.high)
        return TokenWeights(weights.masked_fill(cut, 0.0), cut)


# ---------------- Importance sampling of whole answers gives all tokens of a row the same weight.
#
# Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch", compare
# both variants, truncated and masked, with weights per token.


@dataclass(frozen=True, slots=True)
class TruncatedSequences:
    """Weights every token of a row by `min(W, high)`, where W is the product of the row's token weights `w`.

    W is the row's probability under the previous policy over its probability under the engine's policy. W itself is
    unbiased, but its variance is large on long answers; the bound adds a bias.
    """

    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        log_weights = inputs.row_sum(inputs.prev_logprobs - inputs.rollout_logprobs)
        bound = math.log(self.high)
        # The bound precedes exp, because the product of a long row overflows.
        weights = log_weights.clamp(max=bound).exp()
        return TokenWeights(weights[inputs.row_ids], (log_weights > bound)[inputs.row_ids])


@dataclass(frozen=True, slots=True)
class MaskedSequences:
    """Weights every token of a row by the row's weight W if W is inside `[low, high]`, and by 0 otherwise.

    A weight of 0 leaves the row out. W is the product of the row's token weights, as in `TruncatedSequences`.
    """

    low: float
    high: float

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> TokenWeights:
        log_weights = inputs.row_sum(inputs.prev_logprobs - inputs.rollout_logprobs)
        lowest = math.log(self.low) if self.low > 0 else -math.inf
        cut = (log_weights < lowest) | (log_weights > math.log(self.high))  # A NaN is not cut; it makes the step skip.
        return TokenWeights(log_weights.exp().masked_fill(cut, 0.0)[inputs.row_ids], cut[inputs.row_ids])


MISMATCH_SUMS = ("mismatch_mean", "mismatch_kl", "ratio_error")
"""Names of the metrics that average |d|, exp(d) - 1 - d and exp(|d|) over response tokens; d = log p_trainer - log
p_engine.

The second one estimates the KL divergence between the engine's policy and the trainer's and is never negative. It is
the estimator k3 of `losses.kl`. The third is the mean factor by which a probability ratio is wrong, 1 at best; a run
whose `ratio_error` stays below about 1.02 is sound.
"""
MISMATCH_MAX = "mismatch_max"
"""Name of the metric for the largest |d| of the step, where d = log p_trainer - log p_engine at a response token."""


@torch.no_grad()
def mismatch(inputs: LossInputs, *, recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mismatch between the trainer's and the engine's log-probs over one microbatch's tokens. The result has
    the form of `mismatch_of`.

    With `recomputed` the trainer's log-probs are `prev_logprobs`, which the trainer computed before the step; otherwise
    they come from the training forward pass. Both belong to the policy at the start of the step. On-policy rows were
    sampled by this same policy. On older rows, or in a later step on the same rows, the difference therefore also
    includes the effect of training since then.
    """
    return mismatch_of(inputs.prev_logprobs if recomputed else inputs.logprobs, inputs.rollout_logprobs)


@torch.no_grad()
def mismatch_of(trainer: torch.Tensor, engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mismatch between two log-probs of the same tokens, float32 `[T]` each.

    The first result holds the sums of the metrics MISMATCH_SUMS (float64 `[3]`), the second the metric MISMATCH_MAX
    (float64 scalar, 0 if there are no tokens).
    """
    # In float32, 1 + d would lose more than k3 where the two agree to 1e-4, so d is in float64.
    delta = trainer.double() - engine.double()
    distance = delta.abs()
    largest = distance.max() if len(delta) else delta.new_zeros(())
    return torch.stack([distance.sum(), (delta.expm1() - delta).sum(), distance.exp().sum()]), largest
