"""The decoding loop of the `hf` engine: one batch of prompts to sampled tokens and their log-probs.

Why not `model.generate`: it prefills the same prompt once per sample and carries finished rows to the end. Here a
prompt is prefilled once for all its samples, and finished rows leave the batch; log-probs are gathered step by step,
so that no [steps, B, V] tensor is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from .protocol import Completion, SamplingParams
from .sampling import draw, log_distribution, uniforms

COMPACT_BELOW = 0.75
"""Finished rows leave the cache when fewer than this share of its rows still runs: dropping them copies the cache."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One prompt of a batch."""

    prompt_ids: np.ndarray
    """int64 `[L]`, L >= 1."""
    keys: np.ndarray
    """uint64 `[n]`: one random stream per sample (`sampling.row_keys`); n samples are drawn."""
    aborted: bool = False
    """Set by another thread to end the request at the next step."""


@torch.inference_mode()
def decode(
    model: Any, requests: Sequence[DecodeRequest], params: SamplingParams, stop_ids: np.ndarray, version: int
) -> list[list[Completion]]:
    """Per request, its completions in order. Requests share `params` (`n` and `seed` are not read).

    model: a Hugging Face causal LM in eval mode. stop_ids: int64, tokens that end a row and are kept in it.
    Raises FloatingPointError when the model's logits are not finite.
    """
    rows = _Rows(requests, params.max_new_tokens)
    window = _Window(model, requests)
    for step in range(params.max_new_tokens):
        tokens, logprobs = _sample(window.logits, params, rows.keys[window.rows], step)
        tokens_host = tokens.cpu().numpy()
        live = rows.record(window.rows, step, tokens_host, logprobs.cpu().numpy(), stop_ids)
        if step + 1 == params.max_new_tokens or not live.any():
            break
        if live.sum() < COMPACT_BELOW * len(live):
            keep = np.flatnonzero(live)
            window.keep(keep)
            tokens = tokens[torch.from_numpy(keep).to(tokens.device)]
        window.advance(tokens)
    return rows.completions(version)


def _sample(
    logits: torch.Tensor, params: SamplingParams, keys: np.ndarray, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 `[B]` tokens, float32 `[B]` log-probs) of one step from logits `[B, V]`."""
    log_probs = log_distribution(logits, params.temperature, params.top_p, params.top_k)
    if params.temperature == 0.0:
        tokens = log_probs.argmax(dim=-1)
    else:
        tokens = draw(log_probs, torch.from_numpy(uniforms(keys, step)).to(log_probs.device))
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


class _Rows:
    """What every row of the batch has produced; R rows: the requests' samples, one request after another."""

    def __init__(self, requests: Sequence[DecodeRequest], max_new_tokens: int) -> None:
        self.requests = requests
        self.request_of = np.repeat(np.arange(len(requests)), [len(request.keys) for request in requests])
        self.keys = np.concatenate([request.keys for request in requests])
        shape = (len(self.keys), max_new_tokens)
        self.tokens = np.zeros(shape, dtype=np.int32)
        self.logprobs = np.zeros(shape, dtype=np.float32)
        self.lengths = np.zeros(len(self.keys), dtype=np.int64)
        self.reasons = np.full(len(self.keys), "length", dtype="U6")
        self.running = np.ones(len(self.keys), dtype=bool)

    def record(
        self, rows: np.ndarray, step: int, tokens: np.ndarray, logprobs: np.ndarray, stop_ids: np.ndarray
    ) -> np.ndarray:
        """Take one step's tokens of `rows`. Returns bool `[len(rows)]`: which of them go on."""
        active = self.running[rows]
        written = rows[active]
        self.tokens[written, step] = tokens[active]
        self.logprobs[written, step] = logprobs[active]
        self.lengths[written] = step + 1
        stopped = written[(tokens[active, None] == stop_ids).any(axis=1)]
        self.reasons[stopped] = "stop"
        self.running[stopped] = False
        aborted = np.array([request.aborted for request in self.requests])
        if aborted.any():
            ended = self.running & aborted[self.request_of]
            self.reasons[ended] = "abort"
            self.running &= ~ended
        return self.running[rows]

    def completions(self, version: int) -> list[list[Completion]]:
        if not np.isfinite(self.logprobs).all():
            raise FloatingPointError(f"the model's logits are not finite under policy version {version}")
        result: list[list[Completion]] = [[] for _ in self.requests]
        for row, request in enumerate(self.request_of):
            length = self.lengths[row]
            result[request].append(
                Completion(
                    token_ids=self.tokens[row, :length].copy(),
                    logprobs=self.logprobs[row, :length].copy(),
                    finish_reason=str(self.reasons[row]),
                    version=version,
                )
            )
        return result


class _Window:
    """The rows still in the key-value cache, B of them, and the logits of their next token."""

    def __init__(self, model: Any, requests: Sequence[DecodeRequest]) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        lengths = np.array([len(request.prompt_ids) for request in requests])
        width = int(lengths.max())
        ids = np.zeros((len(requests), width), dtype=np.int64)
        mask = (
            np.arange(width) >= (width - lengths)[:, None]
        )  # left padding: every row's next token is in the last column
        ids[mask] = np.concatenate([request.prompt_ids for request in requests])
        device = model.device
        # Without padding no mask is needed at all, and attention without one is quicker.
        self.mask = None if mask.all() else torch.from_numpy(mask).to(device=device, dtype=torch.int64)
        positions = torch.from_numpy(np.maximum(mask.cumsum(axis=1) - 1, 0)).to(device)
        self.next_position = torch.from_numpy(lengths).to(device)[:, None]
        self.logits = self._forward(torch.from_numpy(ids).to(device), positions)
        self.rows = np.arange(len(requests))
        self.keep(np.repeat(self.rows, [len(request.keys) for request in requests]))
        self.rows = np.arange(len(self.rows))

    def keep(self, indices: np.ndarray) -> None:
        """Keep the window's rows at `indices`, in that order; an index may repeat."""
        self.rows = self.rows[indices]
        at = torch.from_numpy(indices).to(self.model.device)
        self.cache.batch_select_indices(at)
        self.logits = self.logits[at]
        self.next_position = self.next_position[at]
        if self.mask is not None:
            self.mask = self.mask[at]

    def advance(self, tokens: torch.Tensor) -> None:
        """Feed one token per row, int64 `[B]`."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.logits = self._forward(tokens[:, None], self.next_position)
        self.next_position = self.next_position + 1

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
