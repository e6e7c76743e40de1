"""Measures in every train step how far the trainer's log-probs are from those of the engine that sampled the tokens.

When engine and trainer have the same weights, the log-probs differ only by numerics (kernels, precision, truncation by
top-p or top-k). An engine that received wrong weights, or a mask over the wrong tokens, shows in these metrics first.
"""

from __future__ import annotations

import torch

from .terms import LossInputs

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
    """Return the mismatch between the trainer's and the engine's log-probs over one microbatch's tokens. It has the
    form that `mismatch_of` returns.

    With `recomputed` the trainer's log-probs are `prev_logprobs`, which it computed before the step; otherwise they are
    those of the training forward pass. Both come from the policy that the step starts from. On-policy rows were sampled
    by this same policy. On older rows, or in a later step on the same rows, the difference therefore also includes what
    training has changed since.
    """
    return mismatch_of(inputs.prev_logprobs if recomputed else inputs.logprobs, inputs.rollout_logprobs)


@torch.no_grad()
def mismatch_of(trainer: torch.Tensor, engine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mismatch between two log-probs of the same tokens, float32 `[T]` each.

    The first result holds the sums of the metrics MISMATCH_SUMS (float64 `[3]`), the second the metric MISMATCH_MAX
    (float64 scalar, 0 if there are no tokens).
    """
    # In float64: where the two agree to 1e-4, k3 is smaller than what float32 loses in 1 + d.
    delta = trainer.double() - engine.double()
    distance = delta.abs()
    largest = distance.max() if len(delta) else delta.new_zeros(())
    return torch.stack([distance.sum(), (delta.expm1() - delta).sum(), distance.exp().sum()]), largest
