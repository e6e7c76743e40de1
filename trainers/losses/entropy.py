"""The entropy bonus rewards an undecided policy (Williams & Peng 1991; Mnih et al. 2016, arXiv:1602.01783)."""

from __future__ import annotations

from dataclasses import dataclass

from .aggregation import Aggregation
from .terms import Denominator, LossInputs, TermSums


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """Lowers the loss by the entropy of the policy at each trained token, taken over the whole vocabulary."""

    aggregation: Aggregation = Aggregation()

    name = "entropy_bonus"
    metrics = ()
    """This term reports no metrics: the train step reports `train/entropy` whenever the backend computes it."""

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Raises ValueError when the inputs have no `entropy`."""
        if inputs.entropy is None:
            raise ValueError("loss.entropy_coef is not 0, but the microbatch has no entropy; the backend computes it")
        assert inputs.entropy.requires_grad == inputs.logprobs.requires_grad, "an entropy without grad trains nothing"
        return TermSums(self.aggregation(-inputs.entropy, inputs), {})
