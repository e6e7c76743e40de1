"""`Rubric` combines named reward functions and their weights into one score for each sample.

`build_rubric` builds it, and its functions, from the section `reward` of the configuration.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from ...dataplane.imports import import_object
from ..process.user_errors import contained, described, made
from ..process.user_function_timeouts import UserProcesses
from ..protocols import Prompt, Reward, Sample, Score
from .apart import EPISODE, TOKENS, ApartReward, ApartRewards, ApartValues, Failure, is_apart, wanted_by
from .builtin import (
    Boxed,
    EnvironmentReward,
    Format,
    MathVerify,
    Overlong,
    ReasoningGymReward,
    exact_match,
    per_position,
)
from .config import RewardConfig, RewardFunctionConfig
from .returned import NOT_APPLICABLE, finite, fits
from .signatures import bind_options, check_signature

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


class TokenReward(Protocol):
    """Reward function that also takes the response's length in tokens, as the keyword argument `response_tokens`."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /, *, response_tokens: int) -> float: ...


class EpisodeReward(Protocol):
    """Reward function that depends on the whole episode, with its turns, tokens and the environment's own rewards. It
    gets the episode as the keyword argument `episode`."""

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, /, *, episode: Sample) -> float: ...


def reward_tag(name: str) -> str:
    """Return the name of the tag (metadata of a row) that holds the unweighted value of the reward `name`."""
    return f"reward/{name}"


class Rubric:
    """Scores responses with several reward functions. If one of them raises an exception, the sample becomes invalid
    and the exception is not passed on."""

    def __init__(
        self,
        rewards: Sequence[tuple[str, Reward | TokenReward | EpisodeReward, float]],
        *,
        scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        voter: str | None = None,
        apart: Sequence[ApartReward] = (),
    ) -> None:
        """rewards: name, function and weight of each reward. scale, clip: factor and bounds of the weighted sum (see
        `RewardConfig`). voter: name of the reward that finds the answer in a response for `Score.answer`, with its
        method `answer_of(response)`; without such a method, the whole response is the answer. None: answers are not
        looked for.

        Without rewards every score is 0. Raises ValueError if a name is given twice, or if a weight is not finite.
        """
        names = [name for name, _, _ in rewards]
        for name, _, weight in rewards:
            if names.count(name) > 1:
                raise ValueError(f"reward: {name!r} is given twice; give one of them another name")
            if not math.isfinite(weight):
                raise ValueError(f"reward {name!r}: got weight {weight}, expected a finite number")
        assert voter is None or voter in names
        self._rewards = [(name, reward, weight, wanted_by(reward)) for name, reward, weight in rewards]
        self._voter = voter
        self.apart = ApartRewards(apart, voter) if apart else None
        """Rewards that are computed before the others; None if there are none."""
        self._scale = scale
        self._low, self._high = (-math.inf, math.inf) if clip is None else clip

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self._rewards]

    def score(
        self,
        prompt: Prompt,
        response: str,
        finish_reason: str,
        response_tokens: int | None = None,
        episode: Sample | None = None,
        begin: Callable[[str], None] = lambda name: None,
        apart: ApartValues | None = None,
    ) -> Score:
        """Return the sample's score: the weighted sum of the rewards, scaled and clipped, and the value of each. The
        sample is invalid if a reward raises an exception or does not return a finite number.

        In that case `components` has the values of the other rewards, and `error` describes the first failure.
        response_tokens: number of tokens that the policy chose, stop token included. None means that the number is
        unknown; every reward that asks for it then fails. episode: the finished episode; None is treated in the same
        way. begin: callback that is called with the name of each reward before it runs. apart: values of the rewards
        that were computed apart.
        """
        components: dict[str, float] = {}
        errors: list[str] = []
        total, answer = 0.0, None if apart is None else apart.answer
        known = {TOKENS: response_tokens, EPISODE: episode}
        for name, reward, weight, wanted in self._rewards:
            begin(name)
            given = None if apart is None else apart.values.get(name)
            if given is NOT_APPLICABLE:
                continue
            if isinstance(given, Failure):
                errors.append(f"reward {name!r} {given}")
                continue
            try:
                if given is None:
                    given = reward(prompt, response, finish_reason, **_arguments(wanted, known))
                    if name == self._voter:
                        answer = _text(name, getattr(reward, "answer_of", str.strip)(response))
                value = finite(name, given)
            except BaseException as error:  # User code can raise anything. The row is masked, and the error reported.
                errors.append(f"reward {name!r} raised {described(contained(error))}")
                continue
            components[name] = value
            total += weight * value
        if self._rewards and not components and not errors:
            errors = ["none of the rewards applies to this sample, because each returned None for it"]
        if errors:
            return Score(reward=0.0, components=components, valid=False, error=errors[0])
        reward = min(max(self._scale * total, self._low), self._high)
        if not fits(reward):
            error = f"the weighted sum of the rewards is {reward!r}, expected a finite number that float32 can hold"
            return Score(reward=0.0, components=components, valid=False, error=error)
        return Score(reward=reward, components=components, valid=True, answer=answer)


def _arguments(wanted: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    for name in wanted:
        if known[name] is None:
            raise ValueError(f"the reward needs {name}, which the caller did not give")
    return {name: known[name] for name in wanted}


def _text(name: str, answer: object) -> str | None:
    if not isinstance(answer, str | None):
        raise ValueError(f"the answer_of of {name!r} returned a {type(answer).__name__}, expected text or None")
    return answer


def build_rubric(config: RewardConfig, voter: str | None = None) -> Rubric:
    """Build the rubric from the section `reward` of the configuration.

    voter: see `Rubric`. Raises ValueError for a path that cannot be imported, or for options that do
    not fit.
    """
    rewards, apart = [], []
    for function in config.functions:
        reward = None if function.runs == "process" else build_reward(function)
        if isinstance(reward, MathVerify) or is_apart(function, reward):
            if function.label == voter and not isinstance(reward, MathVerify):
                raise ValueError(
                    f"correct: got {voter!r}, expected a reward that is called for one sample in the rollout actor, "
                    "because its answers are compared there"
                )
            apart.append(_apart(function, reward, config.timeout_s))
            reward = _computed_before
        rewards.append((function.label, reward, function.weight))
    return Rubric(rewards, scale=config.scale, clip=config.clip, voter=voter, apart=apart)


def check_rewards(functions: Sequence[RewardFunctionConfig]) -> None:
    """Check the configured reward functions without creating instances of users' classes, which may load a model.

    Raises ValueError for a path that cannot be imported, or for options that do not fit.
    """
    for config in functions:
        if config.kind in BUILT_REWARDS:
            build_reward(config)
        else:
            target = _target(config.kind)
            check_signature(config, target)
            called = target.__call__ if inspect.isclass(target) else target
            if not is_apart(config, called):
                try:
                    config.refuse_limits()
                except ValueError as error:
                    raise ValueError(f"reward.functions: {error}") from None


def _apart(config: RewardFunctionConfig, reward: Any, timeout_s: float) -> ApartReward:
    """Return the settings of a reward that is computed apart. timeout_s: default time limit of a call in seconds."""
    called, bound_s = reward, config.timeout_s or timeout_s
    if isinstance(reward, MathVerify):
        called, bound_s = reward.in_processes(NUM_PROCESSES), reward.deadline_s
    elif reward is None:
        called = UserProcesses(config.kind, config.options, NUM_PROCESSES)
    return ApartReward(config.label, called, config.per == "group", bound_s, config.retries)


def build_reward(config: RewardFunctionConfig) -> Reward | MathVerify:
    """Build one reward function. For `math_verify` it is a MathVerify, which is computed only in separate processes.

    Raises ValueError for a path that cannot be imported, for options that do not fit, and for a class whose instances
    cannot be called.
    """
    target = _target(config.kind)
    options = dict(config.options)
    if ":" in config.kind:
        check_signature(config, target)
    else:
        bind_options(config, target)
    if not inspect.isclass(target):
        return functools.partial(target, **options) if options else target
    reward = made(target, options, f"reward.functions: {config.kind!r}")
    if not isinstance(reward, MathVerify) and not callable(reward):
        raise ValueError(f"reward.functions: objects of {config.kind!r} cannot be called, expected `__call__`")
    return cast("Reward | MathVerify", reward)


def _computed_before(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Placeholder in the rubric for a reward that is computed apart; a call raises ValueError."""
    raise ValueError(
        "this reward is computed before the others, in its own process, asynchronously or for a group, and it has no "
        "value for this sample"
    )


def _target(kind: str) -> Any:
    if ":" not in kind:
        return BUILT_REWARDS[kind]
    target = import_object(kind, "reward.functions")
    if not callable(target):
        raise ValueError(f"reward.functions: {kind!r} is a {type(target).__name__}, expected a function or class")
    return target
