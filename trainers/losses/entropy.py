"""The entropy bonus: reward for a policy that stays undecided (Williams & Peng 1991; Mnih et al. 2016,
arXiv:1602.01783)."""

from __future__ import annotations

from dataclasses import dataclass

from .aggregation import Aggregation
from .terms import Denominator, LossInputs, TermSums


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """Minus the entropy of the policy's whole distribution at each trained token (not of the sampled token alone)."""

    aggregation: Aggregation = Aggregation()

    name = "entropy_bonus"
    metrics = ()
    """None: the train step reports `train/entropy` whenever the backend computes it."""

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Raises ValueError when the inputs have no `entropy`."""
        if inputs.entropy is None:
            raise ValueError("loss.entropy_coef is not 0, but the microbatch has no entropy; the backend computes it")
        assert inputs.entropy.requires_grad == inputs.logprobs.requires_grad, "an entropy without grad changes nothing"
        return TermSums(self.aggregation(-inputs.entropy, inputs), {})
