"""Checks the section `distillation`, and a run without rewards, against the other sections of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from ...actors.rewards.config import RewardConfig
from ...actors.rollout.config import RolloutConfig
from ..backends.config import TrainerConfig
from ..losses.distillation_config import DistillationConfig
from .config import AlgorithmConfig
from .evaluation_sets import EvaluationConfig, ValidationConfig


def teacher_problems(
    distillation: DistillationConfig, rollout: RolloutConfig, trainer: TrainerConfig, *, pooled: bool
) -> Iterator[str]:
    """Yield one sentence for each teacher that cannot run where it should. pooled: whether the run borrows GPUs."""
    for index, one in enumerate(distillation.teachers):
        got = f"distillation.teachers.{index}.where: got {one.where!r}"
        if one.where == "train" and trainer.pp > 1:
            yield (
                f"{got} with trainer.pp={trainer.pp}, expected trainer.pp=1 or where='engine', because the train "
                "workers run other models than the policy with the backend fsdp, which has no pipeline"
            )
        if one.where == "train":
            continue
        if rollout.engine == "scripted":
            yield f"{got} with rollout.engine='scripted', expected 'hf' or 'vllm', because a script scores no tokens"
        if rollout.engine == "vllm" and rollout.temperature != 1.0:
            yield (
                f"{got} with rollout.engine='vllm' and rollout.temperature={rollout.temperature:g}, expected 'train' "
                "or the temperature 1, because vLLM gives log-probs of given tokens at no other temperature"
            )
        if pooled:
            yield f"{got} with pool.address set, expected 'train', because the pool grants no GPUs for teachers"


def reward_problems(
    reward: RewardConfig,
    distillation: DistillationConfig,
    algorithm: AlgorithmConfig,
    validation: ValidationConfig,
    evaluation: dict[str, EvaluationConfig],
) -> Iterator[str]:
    """Yield one sentence for each setting that needs rewards in a run that has none."""
    for name, one in evaluation.items():
        if not (one.reward or reward).functions:
            yield (
                f"evaluation.{name}.reward: got no functions, expected at least one, because an evaluation consists "
                "of rewards"
            )
    if reward.functions:
        return
    if not distillation.teachers:
        yield "reward.functions: got [], expected at least one function (or teachers in distillation.teachers)"
        return
    if algorithm.dynamic_sampling.enabled:
        yield (
            "algorithm.dynamic_sampling.enabled: got true with reward.functions=[], expected false, because all "
            "rewards are equal"
        )
    if validation.every:
        yield (
            f"validation.every: got {validation.every} with reward.functions=[], expected 0, or functions, which do "
            "not train with algorithm.group_size=1 or weight 0, because a validation consists of rewards"
        )
