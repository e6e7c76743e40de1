"""The `exact_match` reward: 1 when the response is the answer."""

from __future__ import annotations

import re

from ..protocols import Prompt


def exact_match(prompt: Prompt, response: str, finish_reason: str) -> float:
    """1.0 when `response` equals `prompt.answer`, both stripped of surrounding white space, else 0.0.

    Raises ValueError when the prompt has no answer to compare with.
    """
    if not prompt.answer:
        raise ValueError(f"prompt {prompt.uid!r} has no answer to compare with")
    return float(response.strip() == prompt.answer.strip())


# ---------------- The `per_position` reward: partial credit, character by character.


def per_position(prompt: Prompt, response: str, finish_reason: str) -> float:
    """Share, 0.0 to 1.0, of positions at which the stripped response and answer agree.

    The longer of the two is the whole, so characters that are missing or too many count as wrong; both empty is 1.0.
    """
    given, expected = response.strip(), prompt.answer.strip()
    whole = max(len(given), len(expected))
    return sum(a == b for a, b in zip(given, expected, strict=False)) / whole if whole else 1.0


# ---------------- The `format` reward: the response has the shape that was asked for, whatever it says.


class Format:
    """1.0 when the stripped response matches `pattern` as a whole and the model ended it itself, else 0.0."""

    def __init__(self, pattern: str) -> None:
        """pattern: a regular expression; `.` matches newlines too. Raises ValueError when it is none."""
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except (re.error, TypeError) as error:
            raise ValueError(f"reward format: pattern {pattern!r} is no regular expression: {error}") from error

    def __call__(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        return float(finish_reason == "stop" and self._pattern.fullmatch(response.strip()) is not None)


# ---------------- The `overlong` reward: a soft punishment for answers that get close to the length limit.
#
# Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.


class Overlong:
    """0 up to `max_length - cache` tokens, from there falling in a line to -1 at `max_length`, -1 beyond."""

    def __init__(self, max_length: int, cache: int) -> None:
        """Both in tokens, the stop token included; max_length is the most that the policy may generate, that is
        `rollout.max_new_tokens` (the paper's are 20480 and 4096). Raises ValueError unless 1 <= cache <= max_length."""
        for name, value in (("max_length", max_length), ("cache", cache)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"reward overlong: {name} {value!r}, expected a whole number of tokens, 1 or more")
        if cache > max_length:
            raise ValueError(f"reward overlong: cache {cache}, expected at most max_length = {max_length}")
        self._free = max_length - cache
        self._cache = cache

    def __call__(self, prompt: Prompt, response: str, finish_reason: str, *, response_tokens: int) -> float:
        return max(-1.0, min(0.0, (self._free - response_tokens) / self._cache))
