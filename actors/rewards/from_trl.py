"""Wraps reward functions that were written for TRL, which score a batch of completions, as rewards of Headrace."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ..protocols import Prompt, Sample
from .returned import NOT_APPLICABLE, listed

ABSENT = ("log_extra", "log_metric", "environments")
"""Arguments that TRL gives to a reward, and Headrace does not."""


class TrlReward:
    """Scores the samples of one prompt with a function of TRL's signature."""

    per = "group"
    """Value of `per` in the section of this reward (see `RewardFunctionConfig`)."""

    def __init__(self, function: Callable[..., Any], answer: str) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._answer = answer
        parameters = inspect.signature(function).parameters
        self._names = None if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) else list(parameters)
        """Names of the arguments that the function takes; None if it takes any."""
        for name in ABSENT:
            if name in parameters and parameters[name].default is inspect.Parameter.empty:
                raise ValueError(
                    f"headrace.rewards.from_trl: {self.__name__!r} needs the argument {name!r}, expected a reward of "
                    "prompts, completions, completion_ids, trainer_state and columns of the data"
                )

    def __call__(
        self, prompt: Prompt, responses: list[str], finish_reasons: list[str], *, episode: list[Sample]
    ) -> list[Any]:
        return _values(self.function(**self._arguments(prompt, responses, episode)))

    def _arguments(self, prompt: Prompt, responses: Sequence[str], episodes: Sequence[Sample]) -> dict[str, Any]:
        chat = [dict(message) for message in prompt.messages]
        columns = {self._answer: prompt.answer, **prompt.fields}
        given = {name: [value] * len(responses) for name, value in columns.items() if name != "completion"}
        given |= {
            "prompts": [chat or prompt.text] * len(responses),
            "completions": [[{"role": "assistant", "content": one}] if chat else one for one in responses],
            "completion_ids": [one.input_ids[one.response_mask.astype(bool)].tolist() for one in episodes],
            "trainer_state": SimpleNamespace(global_step=max(0, *(one.version for one in episodes))),
        }
        return given if self._names is None else {name: given[name] for name in self._names if name in given}


class AsyncTrlReward(TrlReward):
    """Scores the samples of one prompt with an `async def` of TRL's signature."""

    async def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, prompt: Prompt, responses: list[str], finish_reasons: list[str], *, episode: list[Sample]
    ) -> list[Any]:
        return _values(await self.function(**self._arguments(prompt, responses, episode)))


def _values(returned: Any) -> list[Any]:
    """Return what a function returned, with NOT_APPLICABLE for None and NaN."""
    values = [one.item() if hasattr(one, "item") else one for one in listed(returned)]
    return [NOT_APPLICABLE if one is None or (isinstance(one, float) and math.isnan(one)) else one for one in values]


def from_trl(function: Callable[..., Any], *, answer: str = "answer") -> TrlReward:
    """Return a reward that calls a function of TRL's signature, once for the samples of each prompt.

    function: `function(prompts, completions, **columns)`, which may be an `async def`. It gets, by name and as far as
    it takes them, `prompts` and `completions` (texts, or chat messages if the prompt is chat messages),
    `completion_ids`, `trainer_state` with the policy's version as `global_step`, and every column of the data. It
    returns a number for each completion, or None for one that it does not apply to: the reward of that completion is
    the sum of its others, and it is not trained on if it has none.

    answer: name of the column of expected answers, `data.answer_field`. Raises ValueError for a function that needs an
    argument of TRL which Headrace does not have.
    """
    kind = AsyncTrlReward if inspect.iscoroutinefunction(function) else TrlReward
    return kind(function, answer)
