"""Makes a train step on made-up rows in plain torch, to compare a train backend with it.

`by_hand` gives the log-probs, the loss and the gradient in float32 on the CPU. `PlainStep` is the step of a careful
script without a training library: a HF model under autocast, one row at a time, whole logits, fused AdamW. Rows are not
padded, so that no computation is wasted. With `recompute`, gradient checkpointing by HF keeps only the inputs of
layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ...actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS, row_schema
from ...actors.train_backend import MicroBatch
from ...codecs.batch import Batch, Jagged
from ...codecs.tokens.routes import ROUTES, RouteSpec
from ...trainers.losses.config import LossConfig

LOSS = LossConfig(clip_high=0.2)


@dataclass(frozen=True, slots=True)
class Rows:
    """Random rows for a train step."""

    ids: list[np.ndarray]
    """Token ids of each row, int32 `[L]`."""
    logprobs: list[np.ndarray]
    """Made-up log-probs of each row's tokens, which stand for those of an engine, float32 `[L]`."""
    advantages: np.ndarray
    """Advantage of each row, float32 `[N]`."""


def random_rows(seed: int, lengths: Sequence[int], vocab: int) -> Rows:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, vocab, length).astype(np.int32) for length in lengths]
    logprobs = [rng.normal(-math.log(vocab), 0.05, length).astype(np.float32) for length in lengths]
    return Rows(ids, logprobs, rng.normal(size=len(lengths)).astype(np.float32))


def response(length: int, prompt_share: float = 0.5) -> np.ndarray:
    return (np.arange(length) >= max(1, int(length * prompt_share))).astype(np.uint8)


def skewed_routes(rng: np.random.Generator, tokens: int, spec: RouteSpec, skew: float) -> np.ndarray:
    """Return made-up routes of a row, `[tokens, layers, k]`, whose last token has none.

    One expert of each layer has `skew` times as many tokens as the mean, at most experts / k, and the others have
    equally many.
    """
    routes = spec.missing(tokens)
    most = np.arange(tokens - 1) < round(skew * spec.top_k / spec.num_experts * (tokens - 1))
    for place in range(len(spec.layers)):
        drawn = rng.random((tokens - 1, spec.num_experts))
        drawn[:, 0] = np.where(rng.permutation(most), -1.0, 2.0)
        routes[:-1, place] = np.argpartition(drawn, spec.top_k - 1, axis=1)[:, : spec.top_k]
    return routes


def micro_batch(
    rows: Rows, picked: Sequence[int], prompt_share: float = 0.5, spec: RouteSpec | None = None, skew: float = 0.0
) -> MicroBatch:
    """Return some of the rows as a microbatch. With `spec`, their tokens have routes with the skew `skew`."""
    lengths = np.array([len(rows.ids[row]) for row in picked], np.int64)
    masks = [response(length, prompt_share) for length in lengths]
    parts = {
        "input_ids": [rows.ids[row] for row in picked],
        "response_mask": masks,
        "rollout_logprobs": [rows.logprobs[row] * mask for row, mask in zip(picked, masks, strict=True)],
    }
    schema = ROLLOUT_SCHEMA.subset(TRAIN_FIELDS)
    if spec is not None:
        rng = np.random.default_rng(len(rows.ids))
        parts[ROUTES] = [skewed_routes(rng, length, spec, skew) for length in lengths.tolist()]
        schema = row_schema(spec).subset((*TRAIN_FIELDS, ROUTES))
    columns = {name: Jagged(torch.from_numpy(np.concatenate(values)), lengths) for name, values in parts.items()}
    batch = Batch(schema, len(picked), columns)
    return MicroBatch(batch, lengths, rows.advantages[list(picked)], np.array(picked, np.int64), None)


def by_hand(folder: str, rows: Rows) -> tuple[list[torch.Tensor], float, dict[str, torch.Tensor]]:
    """Compute the reference step in float32 on the CPU, with the loss written out. Returns the masked log-probs of each
    row, the mean loss, and its gradient by parameter of the HF model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    columns, total, tokens = [], torch.zeros(()), 0
    for ids, sampled, advantage in zip(rows.ids, rows.logprobs, rows.advantages, strict=True):
        row, mask = torch.from_numpy(ids).long(), torch.from_numpy(response(len(ids))).bool()
        every = torch.log_softmax(model(input_ids=row[None]).logits[0, :-1], -1)
        now = torch.cat([torch.zeros(1), every.gather(-1, row[1:, None])[:, 0]])
        ratio = (now - torch.from_numpy(sampled))[mask].exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high) * advantage)
        total, tokens = total - gain.sum(), tokens + int(mask.sum())
        columns.append((now * mask).detach())
    (total / tokens).backward()
    gradient = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return columns, float(total.detach()) / tokens, gradient


class PlainStep:
    """A train step in plain torch with the benchmark's loss, that of PPO."""

    def __init__(self, folder: str, device: torch.device, *, half: bool, recompute: bool, lr: float) -> None:
        self._device, self._half = device, half
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.to(device).train()  # The models of the benchmark have no dropout.
        self.model.config.use_cache = False
        if recompute:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def run(self, micros: Sequence[Rows], prompt_share: float) -> tuple[float, float, float]:
        """Train on the rows of all microbatches. Returns the mean loss, the gradient's norm before clipping, and the
        seconds of the step."""
        started, total, tokens = time.perf_counter(), torch.zeros((), device=self._device), 0
        for rows in micros:
            for ids, sampled, advantage in zip(rows.ids, rows.logprobs, rows.advantages, strict=True):
                mask = response(len(ids), prompt_share).astype(bool)
                loss = self._row_loss(ids, sampled, float(advantage), mask)
                loss.backward()
                total, tokens = total + loss.detach(), tokens + int(mask.sum())
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad /= tokens
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        figures = float(total) / tokens, float(norm)
        return *figures, time.perf_counter() - started

    def _row_loss(self, ids: np.ndarray, sampled: np.ndarray, advantage: float, mask: np.ndarray) -> torch.Tensor:
        row = torch.from_numpy(ids).long().to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._half):
            logits = self.model(input_ids=row[None, :-1]).logits[0]
        now = -torch.nn.functional.cross_entropy(logits.float(), row[1:], reduction="none")
        old, own = torch.from_numpy(sampled[1:]).to(self._device), torch.from_numpy(mask[1:]).to(self._device)
        ratio = (now - old)[own].exp()
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high) * advantage).sum()
