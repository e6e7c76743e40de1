"""PPO's clipped surrogate with separate lower and upper bounds.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7; the asymmetric clip
("clip-higher") and the token-level mean are DAPO's: Yu et al. 2025, arXiv:2503.14476, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .terms import Denominator, LossInputs, TermSums, aggregate


@dataclass(frozen=True, slots=True)
class PpoClip:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r being the token's probability over its previous one."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    denominator: Denominator = "tokens"

    name = "ppo_clip"
    metrics = ("ratio_mean", "clip_fraction", "approx_kl", "rollout_kl")
    """ratio_mean: r; clip_fraction: 1 where the bound cuts the gradient off; approx_kl: k3 of the previous policy to
    this one; rollout_kl: k3 of the engine's policy to this one (staleness and numerical mismatch together)."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"loss.clip_low: got {self.clip_low}, expected a number in (0, 1]")
        if not self.clip_high > 0:
            raise ValueError(f"loss.clip_high: got {self.clip_high}, expected a number above 0")

    def __call__(self, inputs: LossInputs) -> TermSums:
        log_ratio = inputs.logprobs - inputs.prev_logprobs
        ratio = log_ratio.exp()
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        loss = aggregate(-torch.minimum(gain, bounded), inputs, self.denominator)
        with torch.no_grad():
            rollout = inputs.logprobs - inputs.rollout_logprobs
            metrics = {
                "ratio_mean": ratio.sum(),
                "clip_fraction": (bounded < gain).sum(dtype=torch.float32),
                "approx_kl": (ratio - 1 - log_ratio).sum(),
                "rollout_kl": (rollout.exp() - 1 - rollout).sum(),
            }
        return TermSums(loss, metrics)
