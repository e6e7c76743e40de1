"""Texts that end a completion, looked for in the last of its tokens at every decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_LEAD_IN = 8
"""Tokens looked at before those that a stop text can span: decoders treat the first ones apart (leading spaces), and
special tokens have no text."""


class StopTexts:
    """Whether token rows end in one of `texts`, wherever its borders fall among the tokens."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """tokenizer: a Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        # A token that has text has a byte or more of it.
        self._window = max(len(text.encode()) for text in texts) + _LEAD_IN

    def ended(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """bool `[len(rows)]`: rows in whose last tokens a stop text stands. Asked after every token of a row."""
        if not len(rows):
            return np.zeros(0, dtype=bool)
        tails = self._tokenizer.batch_decode(
            [row[-self._window :].tolist() for row in rows],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return np.array([any(text in tail for text in self._texts) for tail in tails], dtype=bool)

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """Number of tokens up to and with the one that completes a stop text; None when none is completed."""
        row = np.asarray(tokens)
        for length in range(1, len(row) + 1):
            if self.ended([row[:length]])[0]:
                return length
        return None
