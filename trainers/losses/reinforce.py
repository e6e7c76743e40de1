"""The plain policy gradient: Williams 1992, "Simple statistical gradient-following algorithms" (REINFORCE)."""

from __future__ import annotations

from dataclasses import dataclass

from .objective import DRIFT_METRICS, TokenLosses, drift
from .terms import LossInputs


@dataclass(frozen=True, slots=True)
class Reinforce:
    """`-A log p`: right for rows that the current policy sampled, whatever the previous policy was."""

    name = "reinforce"
    metrics = DRIFT_METRICS

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.advantages * inputs.logprobs, drift(inputs))
