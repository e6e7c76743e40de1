"""Samples tokens in the same way in every engine: checks of a prompt, random numbers of a row, draws, stop texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from .protocol import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LEAD_IN = 8
"""Number of extra tokens that are decoded before the span of a stop text. They are needed because tokenizers treat the
first tokens specially (leading spaces), and because special tokens have no text."""


def row_keys(seed: int, request_id: str, num_samples: int) -> np.ndarray:
    """Return the key of each sample's stream of random numbers (see `uniforms`), uint64 `[num_samples]`."""
    return np.array(
        [xxhash.xxh3_64_intdigest(f"{seed}/{request_id}/{sample}".encode()) for sample in range(num_samples)],
        dtype=np.uint64,
    )


def uniforms(keys: np.ndarray, step: int) -> np.ndarray:
    """Return random number `step` of each row's stream, uniform in [0, 1), float64 `[B]` (SplitMix64, Steele et al.
    2014).

    Each number depends only on the row's key and the step, so a row's tokens do not depend on the batch in which it is
    decoded. The process's global generators are neither read nor advanced.
    """
    state = keys + _GOLDEN * np.full(1, step + 1, dtype=np.uint64)
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    state ^= state >> np.uint64(31)
    # Only 32 bits are used, so that `u * total` in float64 stays strictly below `total` (see `draw`).
    return (state >> np.uint64(32)).astype(np.float64) * 2.0**-32


def log_distribution(
    logits: torch.Tensor,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    most: int = 0,
) -> torch.Tensor:
    """Return the log-probs of the distribution that tokens are drawn from, float32 `[B, V]`.

    logits: `[B, V]` of any float dtype. Temperature is applied first, then min-p (0.0 is off), top-k (0 is off) and
    top-p (1.0 is off), and at last only the `most` most likely tokens are kept (0 keeps all). The rest is renormalised,
    and tokens that are cut off get -inf. Temperature 0 means greedy decoding: the log-probs are then those of
    temperature 1, and nothing is cut off.
    """
    scores = logits.float()
    if temperature == 0.0:
        return torch.log_softmax(scores, dim=-1)
    if temperature != 1.0:
        scores = scores / temperature
    if min_p > 0.0:
        scores = scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    if 0 < top_k < scores.shape[-1]:
        smallest_kept = torch.topk(scores, top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < smallest_kept, -torch.inf)
    if top_p < 1.0:
        ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
        probs = torch.softmax(ordered, dim=-1)
        mass_before = probs.cumsum(dim=-1) - probs
        cut = mass_before >= top_p
        cut[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if 0 < most < scores.shape[-1]:
        kept = torch.topk(scores, most, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter(-1, kept.indices, kept.values)
    return torch.log_softmax(scores, dim=-1)


def draw(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverse transform sampling, int64 `[B]`. It is the first token whose cumulative
    probability exceeds `uniform`.

    uniform: random numbers in [0, 1), float64 `[B]`. A token of probability 0 is never drawn. A row with NaN log-probs
    gets an arbitrary valid token, whose log-prob is NaN.
    """
    cumulated = log_probs.double().exp_().cumsum_(dim=-1)
    threshold = uniform[:, None] * cumulated[:, -1:]
    tokens = torch.searchsorted(cumulated, threshold, right=True)[:, 0]
    return tokens.clamp_(max=log_probs.shape[-1] - 1)


def sample(
    logits: torch.Tensor, params: SamplingParams, keys: np.ndarray, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sample one token for each row of `logits` `[B, V]`. Returns the tokens, int64 `[B]`, their log-probs, float32
    `[B]`, and the tokens that they were drawn from, bool `[B, V]`; None unless `params.masked`."""
    most = params.mask_limit if params.masked else 0
    log_probs = log_distribution(logits, params.temperature, params.top_p, params.top_k, params.min_p, most)
    if params.temperature == 0.0:
        tokens = log_probs.argmax(dim=-1)
    else:
        tokens = draw(log_probs, torch.from_numpy(uniforms(keys, step)).to(log_probs.device))
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0], log_probs > -torch.inf if params.masked else None


class ContextExceeded(ValueError):
    """Raised for a request whose prompt and new tokens do not fit into the model's context."""


def checked_prompt(
    request_id: str, prompt_ids: Sequence[int], params: SamplingParams, *, context: int | None, vocab_size: int
) -> np.ndarray:
    """Check a prompt and return its token ids as int64 `[L]`.

    Raises ValueError if a token of the prompt or a stop token is outside the vocabulary, or if the prompt is empty or
    does not reach `params.routes_from`, and ContextExceeded if it is too long: prompt plus `params.max_new_tokens` must
    fit into `context` tokens. With `context=None` no prompt is too long.
    """
    prompt = np.asarray(prompt_ids, dtype=np.int64)
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"request {request_id!r}: the prompt has no tokens, expected at least one")
    if params.routes_from >= len(prompt):
        raise ValueError(
            f"request {request_id!r}: got routes_from={params.routes_from}, expected the position of one of its "
            f"{len(prompt)} prompt tokens, counted from 0"
        )
    if context is not None and len(prompt) + params.max_new_tokens > context:
        raise ContextExceeded(
            f"request {request_id!r}: {len(prompt)} prompt tokens + {params.max_new_tokens} new tokens exceed "
            f"the model's context of {context}"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"request {request_id!r}: token ids {prompt.min()}..{prompt.max()}, "
            f"expected 0..{vocab_size - 1}; does the tokenizer belong to the model?"
        )
    if unknown := [token for token in params.stop_token_ids if token >= vocab_size]:
        raise ValueError(f"request {request_id!r}: got stop token id {unknown[0]}, expected 0..{vocab_size - 1}")
    return prompt


def check_rows(rows: Sequence[np.ndarray], *, context: int | None, vocab_size: int) -> None:
    """Raise ValueError if a row to score has more tokens than `context`, or tokens outside the vocabulary. rows: token
    ids of each row, int32 `[L]`. With `context=None` no row is too long."""
    for number, row in enumerate(rows):
        if context is not None and len(row) > context:
            raise ValueError(f"score: got row {number} with {len(row)} tokens, expected at most {context}")
        if len(row) and (row.min() < 0 or row.max() >= vocab_size):
            raise ValueError(
                f"score: row {number} has token ids {row.min()}..{row.max()}, expected 0..{vocab_size - 1}; does the "
                "model have the policy's vocabulary?"
            )


class StopTexts:
    """Finds any of `texts` at the end of rows of tokens, even where a text begins or ends inside a token."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """tokenizer: the model's Hugging Face tokenizer."""
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        # Every token that has text has at least one byte of text.
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

    def first_end(self, tokens: Sequence[int], searched: int = 0) -> int | None:
        """Return the number of tokens up to the one that completes the first stop text; None without a stop text.

        searched: number of first tokens that contain no stop text, if the others by themselves do not either. A text
        then begins in the first and ends in the others, near the border.
        """
        row = np.asarray(tokens)
        last = min(len(row), searched + self._window) if searched else len(row)
        for length in range(searched + 1, last + 1):
            if self.ended([row[:length]])[0]:
                return length
        return None
