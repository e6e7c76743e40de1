"""Checks the functions that users wrote or chose by name: rewards, environments, losses and samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ....actors.environments.config import EnvironmentConfig
from ....actors.environments.factory import check_environment
from ....actors.rewards.config import RewardConfig, RewardFunctionConfig
from ....actors.rewards.rubric import check_rewards
from ....actors.rollout.config import RolloutConfig
from ....actors.rollout.data_config import DataConfig
from ....dataplane.config import DataPlaneConfig
from ....dataplane.directory.samplers import FOR_RANKS, RankShares, TaskConfig, build_sampler
from ...config.config import AlgorithmConfig
from ...losses.config import LossConfig

Check = Callable[[], list[str] | None]
"""Function that raises ValueError or ConfigError if a run cannot work. It returns a line for each check that only the
run itself can make."""


def checks_of_functions(
    rubrics: Mapping[str, RewardConfig],
    environment: EnvironmentConfig,
    loss: LossConfig,
    data: DataConfig,
    rollout: RolloutConfig,
) -> list[Check]:
    """Return the checks of a run's rewards, environment and loss. rubrics: see `Config.rubrics`."""
    functions = [(name, one) for name, rubric in rubrics.items() for one in rubric.functions]
    return [
        *(partial(_check_reward, name, function) for name, function in functions),
        lambda: check_environment(environment, rollout.endpoint),
        lambda: _check_loss(loss, data, rollout.max_new_tokens),
    ]


def _check_reward(name: str, function: RewardFunctionConfig) -> None:
    """Check one function of a rubric. name: name of the evaluation set that has the rubric, or "" for training."""
    try:
        check_rewards([function])
    except ValueError as error:
        if not name:
            raise
        raise ValueError(f"evaluation.{name}: {error}") from error


def _check_loss(loss: LossConfig, data: DataConfig, max_new_tokens: int) -> None:
    if ":" in loss.kind:
        from ....actors.protocols import row_schema  # This imports torch, which the other checks do not need.
        from ...losses.step_loss import build_loss

        row_schema(None, data.columns)
        build_loss(loss.with_length_norm(max_new_tokens), data.columns)


def check_sampler(sampler: str, algorithm: AlgorithmConfig, plane: DataPlaneConfig) -> None:
    """Raise ValueError if the sampler `sampler` does not exist or needs arguments that the driver does not have."""
    task = TaskConfig("train", sampler, algorithm.sampler_options)
    try:
        if task.sampler in FOR_RANKS:
            needed = RankShares.arguments
        else:
            needed = build_sampler(task, plane.with_sampler(sampler).samplers).arguments
    except ValueError as error:
        raise ValueError(f"algorithm.sampler: {error}") from error
    if needed:
        raise ValueError(
            f"algorithm.sampler: got {task.sampler!r}, whose claims need the arguments {list(needed)}; expected a "
            "sampler without arguments, because the driver claims for all ranks together"
        )
