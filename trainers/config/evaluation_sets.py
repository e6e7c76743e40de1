"""Declares the evaluations of a run: validation, and named sets with their own prompts, sampling and rewards."""

from __future__ import annotations

from ...actors.rewards.config import RewardConfig
from ...actors.rollout.data_config import REPLACED, DataConfig, SourceConfig, replaced
from ...actors.rollout.evaluation_metrics import REWARD
from ...dataplane.config import Count, CountOrZero, NonNegative, Section, Share


class ValidationConfig(Section):
    """Evaluation on prompts that are never trained on."""

    every: CountOrZero = 10
    """Number of steps between validations. Validation also runs before the first step and after the last. 0 turns
    validation off."""
    num_prompts: Count = 128
    """Number of prompts in each validation."""
    n: Count = 1
    """Number of samples of each prompt. `val/reward` and the other means are over all samples (avg@n). With more than
    one sample, `val/best@K` gives the expected reward of the best of K samples, and `val/pass@K` the probability that
    one of K samples is an exact match. K takes the powers of two from 2 to n, and n itself."""
    temperature: NonNegative = 0.0
    """Sampling temperature of validation; 0 decodes greedily. Above 0, `rollout.top_p`, `top_k` and `min_p` apply here,
    too."""
    metric: str = REWARD
    """Metric that judges a policy; higher is better. `run.keep_best`, `validation.stop_at`, the report and Prometheus
    use this metric. Valid values are `val/reward`, `val/exact_match` and the name of a reward function, and if
    `validation.n` is above 1 also `val/best@K`, `val/pass@K`, `val/maj@n` and `val/reward/NAME/best@K`."""
    max_new_tokens: Count | None = None
    """Largest number of tokens of an answer. Unset: `rollout.max_new_tokens`."""
    background: bool = False
    """Whether validation runs while the next step generates and trains, until its optimizer step. Its metrics are then
    logged with that step, and `val/version` is the version of the measured policy."""
    stop_at: float | None = None
    """Value of `validation.metric` at which the run ends; with `validation.background` it ends after the current step.
    Unset: the run ends after `algorithm.steps`."""


class EvaluationDataConfig(SourceConfig):
    """Source of the prompts of an evaluation set. An unset key, other than `split` and `subset`, takes its value from
    section `data`. A generated task provides its held-out part."""

    max_prompt_tokens: Count | None = None
    """Largest number of tokens of a prompt; see `data.max_prompt_tokens`."""


class EvaluationConfig(Section):
    """A named evaluation set. Its metrics begin with `eval/NAME/`. With n samples of each prompt, `avg@n` is the share
    of correct samples, `pass@K` the probability that one of K samples is correct, and `maj@n` the share of prompts
    whose most frequent answer is correct."""

    data: EvaluationDataConfig
    """Source of the prompts."""
    every: CountOrZero = 50
    """Number of steps between evaluations. The set is also evaluated before the first step and after the last. With 0
    only `headrace eval` evaluates the set."""
    num_prompts: Count | None = None
    """Largest number of prompts of an evaluation. Unset: all prompts of a file or dataset; a generated task needs a
    number."""
    n: Count = 1
    """Number of samples of each prompt."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: Share = 1.0
    """Nucleus sampling: each token is sampled from the most likely tokens with this total probability."""
    top_k: CountOrZero = 0
    """Number of most likely tokens from which each token is sampled; 0 means all."""
    max_new_tokens: Count | None = None
    """Largest number of tokens of an answer. Unset: `rollout.max_new_tokens`."""
    reward: RewardConfig | None = None
    """Reward functions that score the samples. Unset: the functions of section `reward`."""
    correct: str | None = None
    """Name of the reward function that decides which samples are correct: a sample is correct if its reward is at least
    1. Unset: the first function."""
    background: bool = True
    """Whether training continues during an evaluation. Its metrics are then logged with the step in which it ended.
    Weight syncs can change the policy during the evaluation; `version_first` and `version_last` give the range of
    versions that generated its samples. If false, training waits, and all samples come from one version."""
    in_flight: Count = 32
    """Largest number of prompts of a background evaluation that each rollout actor works on at a time. The limit keeps
    training samples from waiting."""


def evaluation_data(config: DataConfig, data: EvaluationDataConfig) -> DataConfig:
    """Return the section `data` for an evaluation set, with the set's source as the source of validation prompts.
    config: the run's section `data`, which provides the values that the set leaves unset."""
    places = {"validation": data.source, "validation_subset": data.subset, "validation_split": data.split}
    return DataConfig.model_validate(
        {**config.model_dump(), **replaced(data, (*REPLACED, "max_prompt_tokens")), **places}
    )
