"""Measures how far the trainer's log-probs are from those of the engine that sampled the tokens, on every run.

When engine and trainer have the same weights, only numerics differ (kernels, precision, truncation by top-p or top-k).
An engine that received wrong weights, or a mask over the wrong tokens, shows in these metrics first.
"""

from __future__ import annotations

import torch

from .terms import LossInputs

MISMATCH_SUMS = ("mismatch_mean", "mismatch_kl")
"""Metrics that are means over response tokens of |d| and of exp(d) - 1 - d, where d = log p_trainer - log p_engine.

The second estimates the KL divergence of the engine's policy to the trainer's, and is never negative (k3, see `kl`).
"""
MISMATCH_MAX = "mismatch_max"
"""Metric that is the largest |d| of the step."""


@torch.no_grad()
def mismatch(inputs: LossInputs, *, recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return MISMATCH_SUMS of a microbatch as sums over its tokens (float64 `[2]`), and its MISMATCH_MAX (float64
    scalar, 0 without tokens).

    `recomputed` takes `prev_logprobs` as the trainer's log-probs, which it computed before the step; otherwise those of
    the training forward pass are taken. Both come from the policy that the step starts from, which sampled the rows as
    long as they are on policy. On older rows, or in a later step on the same rows, the difference also includes what
    training has changed since.
    """
    trainer = inputs.prev_logprobs if recomputed else inputs.logprobs
    # In float64: where the two agree to 1e-4, k3 is smaller than what float32 loses in 1 + d.
    delta = trainer.double() - inputs.rollout_logprobs.double()
    distance = delta.abs()
    largest = distance.max() if len(delta) else delta.new_zeros(())
    return torch.stack([distance.sum(), (delta.expm1() - delta).sum()]), largest
