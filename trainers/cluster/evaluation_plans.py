"""Derives, from the sections `validation` and `evaluation`, what each evaluation of a run generates and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...actors.engines.protocol import SamplingParams
from ...actors.rollout.actor import EvaluationSetup
from ...actors.rollout.evaluation import VALIDATION as VALIDATION_PREFIX
from ..config.config import Config
from ..config.evaluation import EvaluationConfig, evaluation_data

VALIDATION = "validation"
"""Name of the evaluation that the section `validation` describes."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """One evaluation of a run."""

    setup: EvaluationSetup
    """Settings with which rollout actors prepare it."""
    sampling: SamplingParams
    every: int
    """Number of steps between two evaluations; 0 if the run makes none."""
    awaited: Literal["at_once", "before_update", "never"]
    """When the run waits for an evaluation that has not ended: as soon as it has started, before the next update of the
    weights, or only at the run's end."""
    in_flight: int
    """Largest number of prompts that each rollout actor works on at a time; 0 means no limit."""

    @property
    def name(self) -> str:
        return self.setup.name


def evaluation_plans(config: Config) -> tuple[EvaluationPlan, ...]:
    """Return the evaluations that a run makes. Validation comes first, if `validation.every` is above 0, and then the
    named sets with `every` above 0."""
    plans = [_validation(config), *(_named(config, name, one) for name, one in config.evaluation.items())]
    return tuple(plan for plan in plans if plan.every)


def all_plans(config: Config) -> tuple[EvaluationPlan, ...]:
    """Return every evaluation that the configuration describes, including those that a run makes none of. Validation is
    among them if the data has held-out prompts."""
    data = config.data
    validates = data.validation or data.validation_split or data.generated
    return tuple(
        [_validation(config)] * bool(validates) + [_named(config, name, one) for name, one in config.evaluation.items()]
    )


def _validation(config: Config) -> EvaluationPlan:
    rollout, validation = config.rollout, config.validation
    greedy = validation.temperature == 0
    sampling = SamplingParams(
        n=validation.n,
        max_new_tokens=validation.max_new_tokens or rollout.max_new_tokens,
        temperature=validation.temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        seed=config.run.seed,
        stop=rollout.stop,
    )
    setup = EvaluationSetup(
        name=VALIDATION,
        prefix=VALIDATION_PREFIX,
        data=config.data,
        num_prompts=validation.num_prompts,
        reward=config.reward,
        correct=None,
    )
    awaited = "before_update" if validation.background else "at_once"
    return EvaluationPlan(setup, sampling, validation.every, awaited, 0)


def _named(config: Config, name: str, one: EvaluationConfig) -> EvaluationPlan:
    sampling = SamplingParams(
        n=one.n,
        max_new_tokens=one.max_new_tokens or config.rollout.max_new_tokens,
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        seed=config.run.seed,
        stop=config.rollout.stop,
    )
    reward = one.reward or config.reward
    setup = EvaluationSetup(
        name=f"evaluation.{name}",
        prefix=f"eval/{name}",
        data=evaluation_data(config.data, one.data),
        num_prompts=one.num_prompts,
        reward=reward,
        correct=one.correct or reward.functions[0].label,
    )
    awaited, in_flight = ("never", one.in_flight) if one.background else ("at_once", 0)
    return EvaluationPlan(setup, sampling, one.every, awaited, in_flight)
