"""Builds the loss of a step from the section `loss`, and defines the policy's term and the entropy bonus.

The policy's term takes an objective's token losses, weights them by an off-policy correction and aggregates them. The
entropy bonus rewards an uncertain policy (Williams & Peng 1991; Mnih et al. 2016, arXiv:1602.01783).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ...actors.columns import ColumnConfig
from .aggregation import Aggregation
from .config import SUPERVISED, LossConfig
from .correction import CORRECTION_METRICS, Correction, IcePop, MaskedSequences, TruncatedSequences, TruncatedTokens
from .distillation_config import DistillationConfig
from .kl import ReferenceKl, RewardKl
from .policy_objectives import Cispo, Gspo, Likelihood, Objective, PpoClip, Reinforce, build_own_objective, count
from .teacher_kl import TeacherAdvantage, TeacherKl, TopKl
from .terms import Denominator, LossInputs, LossTerm, PolicyLoss, TermSums

NO_TEACHER = DistillationConfig()
"""The section `distillation` of a run without teachers."""


@dataclass(frozen=True, slots=True)
class PolicyTerm:
    """Computes the policy's loss on a microbatch, `aggregation(correction * objective)`. If `reward_kl` or `teacher` is
    given, they change the advantages first."""

    objective: Objective
    aggregation: Aggregation = Aggregation()
    correction: Correction | None = None
    """Off-policy correction; None means no correction, so that the engine's policy is treated as the previous
    policy."""
    reward_kl: RewardKl | None = None
    """KL penalty on the advantages; None leaves them as they are."""
    teacher: TeacherAdvantage | None = None
    """Part of the advantages that teachers give; None without such a part."""

    @property
    def name(self) -> str:
        return self.objective.name

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    @property
    def metrics(self) -> tuple[str, ...]:
        correction = () if self.correction is None else CORRECTION_METRICS
        shaping = [shape.metrics for shape in (self.reward_kl, self.teacher) if shape is not None]
        return (*self.objective.metrics, *correction, *chain(*shaping))

    def __call__(self, inputs: LossInputs) -> TermSums:
        kl_metrics = dict[str, torch.Tensor]()
        for shape in (self.reward_kl, self.teacher):
            if shape is not None:
                inputs, sums = shape(inputs)
                kl_metrics |= sums
        losses = self.objective(inputs)
        values, metrics = losses.values, dict(losses.metrics)
        if self.correction is not None:
            weights = self.correction(inputs)
            values = weights.values * values
            sums = (weights.values.sum(), count(weights.cut))
            metrics.update(zip(CORRECTION_METRICS, sums, strict=True))
        return TermSums(self.aggregation(values, inputs), {**metrics, **kl_metrics})


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
            raise ValueError("loss.entropy_coef is not 0, but the microbatch has no entropy from the backend")
        assert inputs.entropy.requires_grad == inputs.logprobs.requires_grad, "an entropy without grad trains nothing"
        return TermSums(self.aggregation(-inputs.entropy, inputs), {})


def build_loss(
    config: LossConfig,
    columns: Sequence[ColumnConfig] = (),
    distillation: DistillationConfig = NO_TEACHER,
) -> PolicyLoss:
    """Build the step's loss: the policy term and, if configured, a KL term, an entropy bonus and a term of teachers.

    columns: user-defined columns that a user-defined loss reads. Raises ValueError, naming the key, when
    `sequence_sum` has no `length_norm`, when a kind is unknown, and when a user-defined loss cannot be imported or does
    not return a plain loss at each token.
    """
    aggregation = Aggregation(config.aggregation, config.length_norm)
    in_reward = config.kl_coef > 0 and config.kl_in == "reward"
    reward_kl = RewardKl(config.kl_kind, config.kl_coef, config.kl_max_log_ratio) if in_reward else None
    bound = distillation.max_log_ratio
    teacher = TeacherAdvantage(distillation.coef, bound) if distillation.in_advantage else None
    terms: list[tuple[float, LossTerm]] = [
        (1.0, PolicyTerm(_objective(config), aggregation, _correction(config), reward_kl, teacher))
    ]
    if distillation.in_loss:
        term = TopKl(aggregation) if distillation.top_k else TeacherKl(aggregation, bound)
        terms.append((distillation.coef, term))
    if config.kl_coef > 0 and not in_reward:
        by_row = config.kind == "gspo"
        terms.append((config.kl_coef, ReferenceKl(config.kl_kind, aggregation, config.kl_max_log_ratio, by_row)))
    if config.entropy_coef > 0:
        terms.append((config.entropy_coef, EntropyBonus(aggregation)))
    return PolicyLoss(terms, columns)


def _objective(config: LossConfig) -> Objective:
    if config.kind == "ppo_clip":
        return PpoClip(config.clip_low, config.clip_high, config.clip_dual)
    if config.kind == "gspo":
        return Gspo(config.clip_low, config.clip_high)
    if config.kind == "cispo":
        return Cispo(config.clip_low, config.clip_high)
    if config.kind == "reinforce":
        return Reinforce()
    if config.kind == SUPERVISED:
        return Likelihood()
    if ":" in config.kind:
        return build_own_objective(config.kind, config.options)
    raise ValueError(f"loss.kind: got {config.kind!r}, expected the name of an objective")


def _correction(config: LossConfig) -> Correction | None:
    if config.correction == "none":
        return None
    if config.correction == "tis":
        return TruncatedTokens(config.correction_bounds[1])
    if config.correction == "icepop":
        return IcePop(*config.correction_bounds)
    if config.correction == "sequence":
        return TruncatedSequences(config.correction_bounds[1])
    if config.correction == "sequence_mask":
        return MaskedSequences(*config.correction_bounds)
    raise ValueError(f"loss.correction: got {config.correction!r}, expected the name of a correction")
