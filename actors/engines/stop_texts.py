"""Finds stop texts, which end a completion, by decoding the last tokens after every decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_LEAD_IN = 8
"""Number of extra tokens that are decoded before those that a stop text can span. They are needed because tokenizers
treat the first tokens specially (leading spaces), and because special tokens have no text."""


class StopTexts:
    """Finds any of `texts` at the end of rows of tokens, even where a text begins or ends inside a token."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """tokenizer: a Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        # Every token with text has at least one byte of it.
        self._window = max(len(text.encode()) for text in texts) + _LEAD_IN

    def ended(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return for each row whether its last tokens contain a stop text, bool `[len(rows)]`. Earlier tokens are not
        decoded, so this method must be called after every new token."""
        if not len(rows):
            return np.zeros(0, dtype=bool)
        tails = self._tokenizer.batch_decode(
            [row[-self._window :].tolist() for row in rows],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return np.array([any(text in tail for text in self._texts) for tail in tails], dtype=bool)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to the one that completes the first stop text; None without a stop text."""
        row = np.asarray(tokens)
        for length in range(1, len(row) + 1):
            if self.ended([row[:length]])[0]:
                return length
        return None
