"""CISPO: the importance weight is clipped, not the token, so that every token keeps a gradient.

MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv:2506.13585.
"""

from __future__ import annotations

from dataclasses import dataclass

from .objective import DRIFT_METRICS, TokenLosses, check_clip, count, drift
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class Cispo:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p`, sg meaning that no gradient flows through the weight.

    The paper bounds r from above only: `clip_low=1` is no lower bound.
    """

    clip_low: float = 1.0
    clip_high: float = 0.2

    name = "cispo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: r, before the clip; clip_fraction: 1 where it clips."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = (inputs.logprobs - inputs.prev_logprobs).detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"ratio_mean": ratio.sum(), "clip_fraction": count(weight != ratio)}
        return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {**metrics, **drift(inputs)})
