"""How far the trainer's log-probs are from those that the engine sampled with: reported on every run.

At one and the same version it is numerics alone (kernels, precision, truncation by top-p or top-k); a trainer that was
sent wrong weights, or masks other tokens than the engine made, shows here first.
"""

from __future__ import annotations

import torch

from .terms import LossInputs

MISMATCH_SUMS = ("mismatch_mean", "mismatch_kl")
"""Means over response tokens, with d = log p_trainer - log p_engine: of |d|, and of exp(d) - 1 - d, which estimates
the KL divergence of the engine's policy to the trainer's (k3: never negative; `kl` has the reference)."""
MISMATCH_MAX = "mismatch_max"
"""The largest |d|."""


@torch.no_grad()
def mismatch(inputs: LossInputs, *, recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(float64 `[2]`: MISMATCH_SUMS as sums over the microbatch's tokens; float64 scalar: its MISMATCH_MAX, 0 without
    tokens).

    recomputed: the trainer's log-probs are `prev_logprobs`, which it has computed before the step; else those of the
    train pass itself. Both are of the policy that the step starts from: the one that sampled, as far as rows are on
    policy. Of older rows, and in a step after the first on the same rows, it also has what training has changed since.
    """
    trainer = inputs.prev_logprobs if recomputed else inputs.logprobs
    # In float64: where the two agree to 1e-4, k3 is smaller than what float32 loses in 1 + d.
    delta = trainer.double() - inputs.rollout_logprobs.double()
    distance = delta.abs()
    largest = distance.max() if len(delta) else delta.new_zeros(())
    return torch.stack([distance.sum(), (delta.expm1() - delta).sum()]), largest
