"""Off-policy correction: weights for rows that the engine sampled from another policy than ratios are taken against.

Even at the same version an engine's numbers are not the trainer's, and stale rows come from an older version. With
`w = p_prev / p_rollout`, the token's probability under the previous policy over that under the engine's, as a weight,
the loss's expectation under the engine's policy becomes one under the previous policy.
"""

from __future__ import annotations

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
