"""Group Sequence Policy Optimization: one ratio for a whole answer, clipped as one.

Zheng et al. 2025, arXiv:2507.18071.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .objective import DRIFT_METRICS, TokenLosses, check_clip, count, drift
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class Gspo:
    """`-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` at each token, with `s = exp(mean over the row's tokens of
    log p / p_prev)`: the geometric mean of the row's ratios.

    With `loss.aggregation=sequence` a row's sum is the paper's loss of the row. s stays much closer to 1 than a token's
    ratio, so its bounds are small: 3e-4 and 4e-4 in the paper.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    name = "gspo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: s; clip_fraction: 1 at every token of a row that a bound cuts off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        log_ratios = inputs.row_sum(inputs.logprobs - inputs.prev_logprobs)
        ratio = (log_ratios / inputs.row_tokens.clamp(min=1)).exp()[inputs.row_ids]
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        metrics = {"ratio_mean": ratio.detach().sum(), "clip_fraction": count(bounded < gain)}
        return TokenLosses(-torch.minimum(gain, bounded), {**metrics, **drift(inputs)})
