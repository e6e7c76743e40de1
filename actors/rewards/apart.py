"""Computes some rewards apart from the others: coroutines, group scorers, and functions in separate processes.

An LLM judge or a reward server, for example, is called from an `async def`. A failed call invalidates only the rows
that it scores.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from ..process.user_errors import awaited, contained, described
from ..process.user_function_timeouts import UserProcesses, UserThreads
from ..protocols import Sample
from .config import RewardFunctionConfig
from .returned import NOT_APPLICABLE, finite, listed

TOKENS, EPISODE = "response_tokens", "episode"
"""Names of the optional keyword arguments of a reward function; see TokenReward and EpisodeReward."""
MAX_TOGETHER = 64
"""Largest number of reward calls that run at the same time in one rollout actor."""
GRACE_S = 1.0
"""Seconds that a cancelled coroutine has to end; after that it is left running."""


def wanted_by(reward: Any) -> tuple[str, ...]:
    """Return the names of the optional keyword arguments (TOKENS, EPISODE) that a reward function takes."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # Some built-in callables have no signature.
        return ()
    return tuple(name for name in (TOKENS, EPISODE) if name in parameters)


@dataclass(frozen=True, slots=True)
class ApartReward:
    """A reward function that is computed apart from the others, with its limits."""

    name: str
    function: Any
    """The function itself, or the worker processes that call it."""
    per_group: bool
    """True if one call scores all samples of a prompt. The call gets lists of responses and finish reasons, and returns
    a list of numbers."""
    timeout_s: float
    """Time limit of one call in seconds."""
    retries: int
    """Number of times that a failed call is repeated."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the optional keyword arguments that the function takes (see `wanted_by`)."""
        return () if isinstance(self.function, UserProcesses) else wanted_by(self.function)


class Failure(str):
    """Text of the error of a reward that failed. A text that a reward returns is not one."""


@dataclass(slots=True)
class ApartValues:
    """Values of one sample's rewards that were computed apart."""

    values: dict[str, Any] = field(default_factory=dict)
    """Value of each reward by name: a number, NOT_APPLICABLE, or a Failure if the reward failed."""
    answer: str | None = None
    """Answer that the sample votes for in a majority vote; None if no answer was looked for or found."""


def is_apart(config: RewardFunctionConfig, function: Any) -> bool:
    """Return whether a reward function is computed apart from the others. This is so for coroutine functions, for
    functions that score whole groups, and for functions that run in separate processes."""
    return config.per == "group" or config.runs == "process" or is_coroutine_function(function)


class ApartRewards:
    """Computes the rewards that run apart from the others, for samples of several prompts at once."""

    def __init__(self, rewards: Sequence[ApartReward], voter: str | None = None) -> None:
        """voter: name of the reward whose method `answer_of` finds the answers of a majority vote. It may be a reward
        that is not computed apart, or None."""
        self._rewards = rewards
        self._voter = voter
        self._places = asyncio.Semaphore(MAX_TOGETHER)
        self._threads = UserThreads("rewards", MAX_TOGETHER)
        self._left: set[asyncio.Future[Any]] = set()

    async def values(self, samples: Sequence[Sample]) -> list[ApartValues]:
        """Return the reward values of each sample. Failed samples get no values.

        samples: samples of one or more prompts; the samples of a prompt are adjacent.
        """
        known = [ApartValues() for _ in samples]
        usable = [at for at, sample in enumerate(samples) if not sample.error and sample.finish_reason != "abort"]
        groups = [list(group) for _, group in groupby(usable, key=lambda at: samples[at].prompt.uid)]
        calls = []
        for reward in self._rewards:
            for chosen in groups if reward.per_group else [[at] for at in usable]:
                calls.append(self._compute(reward, samples, chosen, known))
        await asyncio.gather(*calls)
        return known

    async def close(self) -> None:
        """End the processes that compute rewards. Idempotent."""
        for reward in self._rewards:
            if isinstance(reward.function, UserProcesses):
                await reward.function.close()

    async def _compute(
        self, reward: ApartReward, samples: Sequence[Sample], chosen: Sequence[int], known: Sequence[ApartValues]
    ) -> None:
        async with self._places:
            try:
                if reward.name == self._voter:
                    known[chosen[0]].answer = await self._answer(reward, samples[chosen[0]])
                values = await self._with_retries(reward, [samples[at] for at in chosen])
                if len(values) != len(chosen):
                    raise ValueError(f"the function returned {len(values)} values for {len(chosen)} samples")
            except Exception as error:  # User code can raise anything. The rows are masked, and the error is reported.
                values = [Failure(f"raised {described(error)}")] * len(chosen)
        for at, value in zip(chosen, values, strict=True):
            known[at].values[reward.name] = _checked(reward.name, value)

    async def _answer(self, reward: ApartReward, sample: Sample) -> str | None:
        assert isinstance(reward.function, UserProcesses) and not reward.per_group
        return await reward.function.call([sample.text], reward.timeout_s, reward.retries, method="answer_of")

    async def _with_retries(self, reward: ApartReward, group: Sequence[Sample]) -> list[Any]:
        first = group[0]
        if reward.per_group:
            arguments = (first.prompt, [sample.text for sample in group], [sample.finish_reason for sample in group])
            tokens: Any = [int(np.count_nonzero(sample.response_mask)) for sample in group]
            extras: Mapping[str, Any] = {TOKENS: tokens, EPISODE: list(group)}
        else:
            arguments = (first.prompt, first.text, first.finish_reason)
            extras = {TOKENS: int(np.count_nonzero(first.response_mask)), EPISODE: first}
        given = {name: extras[name] for name in reward.wanted}
        if isinstance(reward.function, UserProcesses):
            value = await reward.function.call(arguments, reward.timeout_s, reward.retries)
            return listed(value) if reward.per_group else [value]
        for attempt in range(reward.retries + 1):
            try:
                value = await self._bounded(reward, lambda: reward.function(*arguments, **given))
                return listed(value) if reward.per_group else [value]
            except Exception:
                if attempt == reward.retries:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _bounded(self, reward: ApartReward, call: Callable[[], Any]) -> Any:
        """Call the reward within its time limit. A coroutine function runs in the event loop, any other function in a
        thread."""
        if not is_coroutine_function(reward.function):
            return await self._threads.call(f"reward {reward.name!r}", call, reward.timeout_s)
        task = asyncio.ensure_future(awaited(call))
        try:
            await asyncio.wait({task}, timeout=reward.timeout_s)
            if task.done():
                return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_S)
                self._left.add(task)
                task.add_done_callback(self._forget)
        raise TimeoutError(f"the function did not return within {reward.timeout_s:g} s")

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        with suppress(asyncio.CancelledError):
            task.exception()


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, Failure) or value is NOT_APPLICABLE:
        return value
    try:
        return finite(name, value)
    except BaseException as error:  # Methods of the user's object can raise anything.
        return Failure(f"raised {described(contained(error))}")


def is_coroutine_function(function: Any) -> bool:
    """Return whether a call of `function`, which can be a partial or an object, gives a coroutine."""
    inner = getattr(function, "func", function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004
