"""Computes rewards apart from the others: coroutines, whole groups, and functions in processes of their own.

An LLM judge or a reward server is such a reward: an `async def` that asks it. A failure costs only its own rows.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from ..process.user_function_timeouts import UserProcesses, UserThreads
from ..protocols import Sample
from .config import RewardFunctionConfig

TOKENS, EPISODE = "response_tokens", "episode"
"""Names of the keyword arguments that a reward function may ask for; see TokenReward and EpisodeReward."""
MAX_TOGETHER = 64
"""Largest number of calls of rewards that run at the same time in a rollout actor."""
GRACE_S = 1.0
"""Seconds that a coroutine has to end when it is cancelled, before it is left alone."""


def wanted_by(reward: Any) -> tuple[str, ...]:
    """Return the names of the keyword arguments that a reward function asks for, of TOKENS and EPISODE."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # some built-in callables have no signature
        return ()
    return tuple(name for name in (TOKENS, EPISODE) if name in parameters)


@dataclass(frozen=True, slots=True)
class ApartReward:
    """A reward function that is computed apart, and how."""

    name: str
    function: Any
    """The function, or the UserProcesses that call it."""
    per_group: bool
    """True if one call scores all samples of a prompt: it gets lists of responses and finish reasons, and returns a
    list of numbers."""
    timeout_s: float
    """Time limit of one call in seconds."""
    retries: int
    """Number of times that a call that failed is tried again."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the keyword arguments that the function asks for (see `wanted_by`)."""
        return () if isinstance(self.function, UserProcesses) else wanted_by(self.function)


@dataclass(slots=True)
class ApartValues:
    """Values of one sample's rewards that were computed apart."""

    values: dict[str, float | str] = field(default_factory=dict)
    """Value of each reward by name; a text says why there is none."""
    answer: str | None = None
    """Answer that the sample votes for in a majority vote; None if no reward was asked for it, or none was found."""


def is_apart(config: RewardFunctionConfig, function: Any) -> bool:
    """Return whether a reward function is computed apart from the others. That is a coroutine function, one that scores
    whole groups, or one that runs in processes of its own."""
    return config.per == "group" or config.runs == "process" or is_coroutine_function(function)


class ApartRewards:
    """Computes the rewards that are computed apart, for samples of several prompts at once."""

    def __init__(self, rewards: Sequence[ApartReward], voter: str | None = None) -> None:
        """voter: name of the reward whose method `answer_of` finds the answers of a majority vote. It may be a reward
        that is not computed apart, or None."""
        self._rewards = rewards
        self._voter = voter
        self._places = asyncio.Semaphore(MAX_TOGETHER)
        self._threads = UserThreads("rewards", MAX_TOGETHER)
        self._left: set[asyncio.Future[Any]] = set()

    async def values(self, samples: Sequence[Sample]) -> list[ApartValues]:
        """Return the values of each sample. Samples that have failed get none.

        samples: those of a prompt one after another.
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
        """End the processes of the rewards. Idempotent."""
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
                    raise ValueError(f"it returned {len(values)} values for {len(chosen)} samples")
            except Exception as error:  # user code may raise anything; the rows are masked and the error reported
                words = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
                values = [words] * len(chosen)
        for at, value in zip(chosen, values, strict=True):
            known[at].values[reward.name] = value

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
            return list(value) if reward.per_group else [value]
        for attempt in range(reward.retries + 1):
            try:
                value = await self._bounded(reward, lambda: reward.function(*arguments, **given))
                return list(value) if reward.per_group else [value]
            except Exception:
                if attempt == reward.retries:
                    raise
        raise AssertionError("unreachable")

    async def _bounded(self, reward: ApartReward, call: Callable[[], Any]) -> Any:
        """Call a coroutine function here and any other in a thread, and wait no longer than the reward may take."""
        if not is_coroutine_function(reward.function):
            return await self._threads.call(f"reward {reward.name!r}", call, reward.timeout_s)
        task = asyncio.ensure_future(_awaited(call()))
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
        raise TimeoutError(f"it did not return within {reward.timeout_s:g} s")

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        with suppress(asyncio.CancelledError):
            task.exception()


def is_coroutine_function(function: Any) -> bool:
    """Return whether calling `function`, possibly a partial or an object, gives a coroutine."""
    inner = getattr(function, "func", function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
