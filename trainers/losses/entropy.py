"""The entropy bonus rewards an uncertain policy (Williams & Peng 1991; Mnih et al. 2016, arXiv:1602.01783)."""

from __future__ import annotations

from dataclasses import dataclass

from .aggregation import Aggregation
from .terms import Denominator, LossInputs, TermSums


@dataclass(frozen=True, slots=True)
class EntropyBonus:
    """Loss term that subtracts the policy's entropy from the loss at each trained token. The entropy is taken over the
    whole vocabulary."""

    aggregation: Aggregation = Aggregation()

    name = "entropy_bonus"
    metrics = ()
    """Names of the metrics of this term: none, because the train step itself reports `train/entropy` whenever the
    backend computes an entropy."""

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Return the negative entropies of a microbatch, summed with the weights of `aggregation`. Raises ValueError
        when `inputs` has no `entropy`."""
        if inputs.entropy is None:
            raise ValueError("loss.entropy_coef is not 0, but the microbatch has no entropy; the backend computes it")
        assert inputs.entropy.requires_grad == inputs.logprobs.requires_grad, "an entropy without grad trains nothing"
        return TermSums(self.aggregation(-inputs.entropy, inputs), {})
