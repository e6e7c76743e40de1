"""Builds reward functions, and the rubric that weights them, from the section `reward` of the configuration."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Sequence
from typing import Any, cast

from ...dataplane.imports import import_object
from ..process.user_processes import UserProcesses
from ..protocols import Prompt, Reward
from .answers import Boxed
from .apart import ApartReward, is_apart
from .arguments import wanted_by
from .builtin import EnvironmentReward, Format, Overlong, ReasoningGymReward, exact_match, per_position
from .config import RewardConfig, RewardFunctionConfig
from .math_equality import MathVerify
from .rubric import Rubric

NUM_PROCESSES = 4
"""Largest number of processes in which one reward function runs in a rollout actor."""
BUILT_REWARDS: dict[str, Any] = {
    "exact_match": exact_match,
    "boxed": Boxed,
    "math_verify": MathVerify,
    "per_position": per_position,
    "format": Format,
    "overlong": Overlong,
    "environment": EnvironmentReward,
    "reasoning_gym": ReasoningGymReward,
}


def build_rubric(config: RewardConfig, tagged: Collection[str] = (), voter: str | None = None) -> Rubric:
    """Build the rubric from the section `reward` of the configuration.

    tagged: names (`RewardFunctionConfig.label`) of the functions whose unweighted values are stored with each row as
    tags (metadata). voter: see `Rubric`. Raises ValueError for a path that cannot be imported, or for options that do
    not fit.
    """
    rewards, apart = [], []
    for function in config.functions:
        reward = None if function.runs == "process" else build_reward(function)
        if isinstance(reward, MathVerify) or is_apart(function, reward):
            if function.label == voter and not isinstance(reward, MathVerify):
                raise ValueError(
                    f"correct: got {voter!r}, which is computed apart, expected a reward that is called for one sample "
                    "in the rollout actor, because its answers are compared there"
                )
            apart.append(_apart(function, reward, config.timeout_s))
            reward = _computed_before
        rewards.append((function.label, reward, function.weight))
    tags = [function.label for function in config.functions if function.label in tagged]
    return Rubric(rewards, tags, scale=config.scale, clip=config.clip, voter=voter, apart=apart)


def check_rewards(functions: Sequence[RewardFunctionConfig]) -> None:
    """Check the configured reward functions without creating instances of users' classes, which may load a model.

    Raises ValueError for a path that cannot be imported, or for options that do not fit.
    """
    for config in functions:
        if config.kind in BUILT_REWARDS:
            build_reward(config)
        else:
            target = _target(config.kind)
            _check_options(config.kind, target, dict(config.options), inspect.isclass(target))
            called = target.__call__ if inspect.isclass(target) else target
            if not is_apart(config, called):
                try:
                    config.refuse_limits()
                except ValueError as error:
                    raise ValueError(f"reward.functions: {error}") from None


def _apart(config: RewardFunctionConfig, reward: Any, timeout_s: float) -> ApartReward:
    """Return how a reward is computed apart. timeout_s: time limit of a call in seconds if the reward has none."""
    called, bound_s = reward, config.timeout_s or timeout_s
    if isinstance(reward, MathVerify):
        called, bound_s = reward.in_processes(NUM_PROCESSES), reward.deadline_s
    elif reward is None:
        called = UserProcesses(config.kind, config.options, NUM_PROCESSES)
    return ApartReward(config.label, called, config.per == "group", bound_s, config.retries)


def build_reward(config: RewardFunctionConfig) -> Reward | MathVerify:
    """Build one reward function; math_verify is one that only processes of its own can compute.

    Raises ValueError for a path that cannot be imported, for options that do not fit, and for a class whose instances
    cannot be called.
    """
    target = _target(config.kind)
    options = dict(config.options)
    is_class = inspect.isclass(target)
    _check_options(config.kind, target, options, is_class)
    if not is_class:
        return functools.partial(target, **options) if options else target
    reward = target(**options)
    if not isinstance(reward, MathVerify) and not callable(reward):
        raise ValueError(f"reward: objects of {config.kind!r} cannot be called as (prompt, response, finish_reason)")
    return cast("Reward | MathVerify", reward)


def _computed_before(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Stands in the rubric for a reward that is computed apart."""
    raise ValueError("it is computed apart, but not for this sample")


def _target(kind: str) -> Any:
    """Return the function or class that `kind` names. Raises ValueError if it cannot be imported or is not callable."""
    if ":" not in kind:
        return BUILT_REWARDS[kind]
    target = import_object(kind, "reward")
    if not callable(target):
        raise ValueError(f"reward: {kind!r} is a {type(target).__name__}, expected a function or class")
    return target


def _check_options(kind: str, target: Any, options: dict[str, Any], is_class: bool) -> None:
    try:
        signature = inspect.signature(target)
    except ValueError:  # some built-in callables have no signature, so a wrong option only shows in the call
        return
    arguments = () if is_class else (None, None, None)
    given = {} if is_class else dict.fromkeys(wanted_by(target))
    try:
        signature.bind(*arguments, **given, **options)
    except TypeError as error:
        raise ValueError(f"reward {kind!r} with options {sorted(options)}: {error}") from error
