"""The `overlong` reward: a soft punishment for answers that get close to the length limit.

Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
"""

from __future__ import annotations

from ..protocols import Prompt


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
