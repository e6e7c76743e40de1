"""Checks a prompt against the model's limits, so that every engine with a model refuses the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .protocol import SamplingParams


def checked_prompt(
    request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, context: int | None, vocab_size: int
) -> np.ndarray:
    """Check a prompt and return its token ids as int64 `[L]`.

    Raises ValueError if the prompt is empty, has ids outside the vocabulary, does not reach `params.routes_from`, or is
    too long: prompt plus `params.max_new_tokens` must fit into `context` tokens. With `context=None` no prompt is too
    long.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"request {request_id!r}: the prompt has no tokens, expected at least one")
    if params.routes_from >= len(prompt):
        raise ValueError(
            f"request {request_id!r}: routes are wanted from token {params.routes_from} on, expected one of its "
            f"{len(prompt)} prompt tokens"
        )
    if context is not None and len(prompt) + params.max_new_tokens > context:
        raise ValueError(
            f"request {request_id!r}: {len(prompt)} prompt tokens + {params.max_new_tokens} new tokens exceed "
            f"the model's context of {context}"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"request {request_id!r}: token ids {prompt.min()}..{prompt.max()}, "
            f"expected 0..{vocab_size - 1}; does the tokenizer belong to the model?"
        )
    return prompt
