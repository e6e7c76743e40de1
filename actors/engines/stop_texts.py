"""Finds texts that end a completion, by decoding its last tokens at every decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_LEAD_IN = 8
"""Number of tokens decoded in front of those that a stop text can span. Decoders treat the first tokens specially
(leading spaces), and special tokens have no text."""


class StopTexts:
    """Finds `texts` at the end of token rows, wherever a text's borders fall among the tokens."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """tokenizer: a Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        # Every token with text has at least one byte of it.
        self._window = max(len(text.encode()) for text in texts) + _LEAD_IN

    def ended(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Tell for each row whether its last tokens contain a stop text, bool `[len(rows)]`. Callers ask after every
        token."""
        if not len(rows):
            return np.zeros(0, dtype=bool)
        tails = self._tokenizer.batch_decode(
            [row[-self._window :].tolist() for row in rows],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return np.array([any(text in tail for text in self._texts) for tail in tails], dtype=bool)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the one that completes a stop text; None when none does."""
        row = np.asarray(tokens)
        for length in range(1, len(row) + 1):
            if self.ended([row[:length]])[0]:
                return length
        return None
