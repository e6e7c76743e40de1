"""PPO's clipped surrogate with separate lower and upper bounds, and optionally a second one for bad samples.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7. The asymmetric clip
("clip-higher") is DAPO's: Yu et al. 2025, arXiv:2503.14476, section 3. The dual clip: Ye et al. 2019, "Mastering
Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv:1912.09729.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import DRIFT_METRICS, TokenLosses, check_clip, count, drift
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class PpoClip:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r being the token's probability over its previous one.

    With `clip_dual` c, where A < 0: `-max(min(...), c A)`, so that one token that became much more probable since it
    was sampled (r A has no lower bound) does not rule the step.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    """None: no second clip."""

    name = "ppo_clip"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: r; clip_fraction: 1 where a bound cuts the gradient off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if self.clip_dual is not None and not self.clip_dual > 1:
            raise ValueError(f"loss.clip_dual: got {self.clip_dual}, expected a number above 1, or null for none")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = (inputs.logprobs - inputs.prev_logprobs).exp()
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        values = torch.minimum(gain, bounded)
        cut = bounded < gain
        if self.clip_dual is not None:
            floor = self.clip_dual * inputs.advantages
            low = (inputs.advantages < 0) & (values < floor)
            values, cut = torch.where(low, floor, values), cut | low
        metrics = {"ratio_mean": ratio.detach().sum(), "clip_fraction": count(cut)}
        return TokenLosses(-values, {**metrics, **drift(inputs)})
