"""The loss term of the policy: an objective's token losses, weighted by an off-policy correction and aggregated."""

from __future__ import annotations

from dataclasses import dataclass

from .aggregation import Aggregation
from .correction import CORRECTION_METRICS, Correction
from .kl import RewardKl
from .objective import Objective, count
from .terms import Denominator, LossInputs, TermSums


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """Computes the policy's loss on a microbatch, `aggregation(correction * objective)`. If `reward_kl` is given, it
    lowers the advantages first."""

    objective: Objective
    aggregation: Aggregation = Aggregation()
    correction: Correction | None = None
    """Off-policy correction; None means no correction, so that the engine's policy is treated as the previous
    policy."""
    reward_kl: RewardKl | None = None
    """KL penalty on the advantages; None leaves them as they are."""

    @property
    def name(self) -> str:
        return self.objective.name

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    @property
    def metrics(self) -> tuple[str, ...]:
        correction = () if self.correction is None else CORRECTION_METRICS
        return (*self.objective.metrics, *correction, *(() if self.reward_kl is None else self.reward_kl.metrics))

    def __call__(self, inputs: LossInputs) -> TermSums:
        kl_metrics = {}
        if self.reward_kl is not None:
            inputs, kl_metrics = self.reward_kl(inputs)
        losses = self.objective(inputs)
        values, metrics = losses.values, dict(losses.metrics)
        if self.correction is not None:
            weights = self.correction(inputs)
            values = weights.values * values
            sums = (weights.values.sum(), count(weights.cut))
            metrics.update(zip(CORRECTION_METRICS, sums, strict=True))
        return TermSums(self.aggregation(values, inputs), {**metrics, **kl_metrics})
