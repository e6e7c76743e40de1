"""The `format` reward: the response has the shape that was asked for, whatever it says."""

from __future__ import annotations

import re

from ..protocols import Prompt


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
