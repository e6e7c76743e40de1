"""`Rubric` combines named reward functions and their weights into one score for each sample."""

from __future__ import annotations

import math
import numbers
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..protocols import Prompt, Reward, Sample, Score
from .apart import ApartReward, ApartRewards, ApartValues
from .arguments import EPISODE, TOKENS, wanted_by


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
        tagged: Sequence[str] = (),
        *,
        scale: float = 1.0,
        clip: tuple[float, float] | None = None,
        voter: str | None = None,
        apart: Sequence[ApartReward] = (),
    ) -> None:
        """rewards: name, function and weight of each reward. tagged: names of the rewards whose unweighted values are
        stored with each row as tags (metadata). scale, clip: factor and bounds of the weighted sum (see
        `RewardConfig`). voter: name of the reward that finds the answer in a response for `Score.answer`, with its
        method `answer_of(response)`; if it has none, the whole response is the answer. None: no answers are found.

        Raises ValueError if there are no rewards, if a name is given twice, or if a weight is not finite.
        """
        if not rewards:
            raise ValueError("reward: got no functions, expected at least one")
        names = [name for name, _, _ in rewards]
        for name, _, weight in rewards:
            if names.count(name) > 1:
                raise ValueError(f"reward: {name!r} is given twice; give one of them another name")
            if not math.isfinite(weight):
                raise ValueError(f"reward {name!r}: weight {weight}, expected a finite number")
        assert {*tagged, *([] if voter is None else [voter])} <= set(names)
        self._rewards = [(name, reward, weight, wanted_by(reward)) for name, reward, weight in rewards]
        self.tagged = tuple(tagged)
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
        unknown; every reward that asks for it then fails. episode: the finished episode, with the same treatment.
        begin: callback that is called with the name of each reward before it runs. apart: values of the rewards that
        were computed apart.
        """
        components: dict[str, float] = {}
        errors: list[str] = []
        total, answer = 0.0, None if apart is None else apart.answer
        known = {TOKENS: response_tokens, EPISODE: episode}
        for name, reward, weight, wanted in self._rewards:
            begin(name)
            given = None if apart is None else apart.values.get(name)
            if isinstance(given, str):
                errors.append(f"reward {name!r} {given}")
                continue
            try:
                if given is None:
                    given = reward(prompt, response, finish_reason, **_arguments(wanted, known))
                    if name == self._voter:
                        answer = getattr(reward, "answer_of", str.strip)(response)
                value = _finite(name, given)
            except Exception as error:  # user code may raise anything; the row is masked and the error reported
                said = " ".join(str(error).split())
                errors.append(f"reward {name!r} raised {type(error).__name__}: {said}{_place(error)}")
                continue
            components[name] = value
            total += weight * value
        if errors:
            return Score(reward=0.0, components=components, valid=False, error=errors[0])
        reward = min(max(self._scale * total, self._low), self._high)
        return Score(reward=reward, components=components, valid=True, answer=answer)


def _arguments(wanted: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    for name in wanted:
        if known[name] is None:
            raise ValueError(f"it asks for {name}, which the caller does not know")
    return {name: known[name] for name in wanted}


def _place(error: Exception) -> str:
    """Return where the user's code raised `error`, as text for the end of a message; "" if this module raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return "" if frame.filename == __file__ else f" ({os.path.basename(frame.filename)} line {frame.lineno})"


def _finite(name: str, value: object) -> float:
    # Real covers bool and numpy's numbers, but no 0-d tensor, and no string that looks like a number.
    if not isinstance(value, (numbers.Real, np.bool_)) or not math.isfinite(value):
        raise ValueError(f"{name!r} returned {value!r}, expected a finite number")
    return float(value)
