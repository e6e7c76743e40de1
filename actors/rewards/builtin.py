"""Built-in rewards: `exact_match`, `per_position`, `format`, `overlong`, `reasoning_gym` and `environment`."""

from __future__ import annotations

import importlib
import re

from ...dataplane.imports import MissingExtra
from ..protocols import Prompt, Sample
from .answers import expected_answer


def exact_match(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return 1.0 when `response` equals `prompt.answer`, both stripped of surrounding white space, else 0.0.

    Raises ValueError when the prompt has no answer to compare with.
    """
    return float(response.strip() == expected_answer(prompt).strip())


def per_position(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Return the share, 0.0 to 1.0, of character positions at which response and answer agree. Both are stripped of
    surrounding white space.

    The number of agreeing positions is divided by the length of the longer text, so missing and extra characters count
    as wrong. Two empty texts give 1.0.
    """
    given, expected = response.strip(), prompt.answer.strip()
    whole = max(len(given), len(expected))
    return sum(a == b for a, b in zip(given, expected, strict=False)) / whole if whole else 1.0


class Format:
    """Reward of 1.0 when the whole stripped response matches a pattern, else 0.0. The model must have ended the
    response itself (finish_reason `stop`)."""

    def __init__(self, pattern: str) -> None:
        """pattern: a regular expression, in which `.` also matches newlines. Raises ValueError if the expression is
        invalid."""
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"reward format: pattern {pattern!r} is not a regular expression: {error}") from error

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        return float(finish_reason == "stop" and self._pattern.fullmatch(response.strip()) is not None)


class Overlong:
    """Soft punishment of answers close to the length limit (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13).

    It is 0 up to `max_length - cache` tokens, falls linearly to -1 at `max_length`, and is -1 beyond.
    """

    def __init__(self, max_length: int, cache: int) -> None:
        """Set the lengths. max_length: largest number of tokens that the policy may generate, including the stop token;
        it corresponds to `rollout.max_new_tokens` (20480 in the paper). cache: number of tokens below `max_length` over
        which the reward falls (4096 in the paper). Raises ValueError unless 1 <= cache <= max_length."""
        for name, value in (("max_length", max_length), ("cache", cache)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"reward overlong: {name} {value!r}, expected a whole number of tokens, 1 or more")
        if cache > max_length:
            raise ValueError(f"reward overlong: cache {cache}, expected at most max_length = {max_length}")
        self._free = max_length - cache
        self._cache = cache

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, *, response_tokens: int) -> float:
        return max(-1.0, min(0.0, (self._free - response_tokens) / self._cache))


class ReasoningGymReward:
    """The score that reasoning-gym gives the response, for prompts of `reasoning-gym:NAME`."""

    def __init__(self) -> None:
        """Raises MissingExtra if the library is not installed."""
        try:
            self._gym = importlib.import_module("reasoning_gym")
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "reasoning_gym", "reward reasoning_gym", "reasoning-gym") from None

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """Return the score, 0.0 to 1.0, of the stripped response. Raises ValueError for a prompt of another source, and
        whatever the library's scorer raises."""
        name = prompt.fields.get("source_dataset")
        if not isinstance(name, str):
            raise ValueError(f"prompt {prompt.uid!r} is not of reasoning-gym, expected data.train=reasoning-gym:NAME")
        entry = {"question": prompt.text, "answer": prompt.answer, "metadata": dict(prompt.fields)}
        return float(self._gym.get_score_answer_fn(name)(response.strip(), entry))


class EnvironmentReward:
    """The reward that the environment itself gave the episode."""

    def __init__(self, name: str = "reward") -> None:
        """name: name of one of the environment's rewards; `reward` is what its `play` returned."""
        self._name = name

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, *, episode: Sample) -> float:
        """Return the reward. It is 0.0 if the environment gave none to an episode that ran out of tokens or time.

        Raises ValueError if it gave none to any other episode.
        """
        if self._name in episode.rewards:
            return episode.rewards[self._name]
        if finish_reason in ("length", "timeout"):
            return 0.0
        raise ValueError(
            f"the environment gave no reward {self._name!r}, it gave {', '.join(episode.rewards) or 'none'}"
        )
