"""Computes a train step by hand: HF model, one row at a time, no padding, torch's own clipping and AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from headrace.tests.trainers.backends.backend_ranks import Row

TEMPERATURE = 1.3
CLIP_LOW, CLIP_HIGH, KL_COEF = 0.1, 0.15, 0.05
LR, WEIGHT_DECAY, MAX_NORM, WARMUP = 2e-3, 0.1, 0.05, 2


def mismatch_of(rows: Sequence[Row], trainer: Sequence[np.ndarray]) -> dict[str, float]:
    """Compute the mismatch metrics of a step in float64, from the log-probs `trainer` of the tokens of `rows`."""
    deltas = [
        (ours.astype(np.float64) - row.columns["rollout_logprobs"])[row.mask > 0]
        for row, ours in zip(rows, trainer, strict=True)
    ]
    delta = np.concatenate(deltas)
    return {
        "logprob/mismatch_mean": np.abs(delta).mean(),
        "logprob/mismatch_max": np.abs(delta).max(),
        "logprob/mismatch_kl": (np.exp(delta) - 1 - delta).mean(),
    }


def recomputed_mismatch(rows: Sequence[Row]) -> dict[str, float]:
    """Compute the mismatch metrics of a step with `prev` "recompute"."""
    return mismatch_of(rows, [row.columns["prev_logprobs"] for row in rows])


class ReferenceTrainer:
    """Trains with the formulas of `backend_ranks.backend_config` in their plainest form."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        matrices = [param for param in self.model.parameters() if param.ndim >= 2]
        vectors = [param for param in self.model.parameters() if param.ndim < 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR)
        self.steps = 0

    def row_logprobs(self, row: Row, temperature: float = TEMPERATURE) -> torch.Tensor:
        """Return the log-probs of the row's tokens, float32 `[L]`, 0 at the first token."""
        ids = torch.from_numpy(row.ids).long()
        logits = self.model(input_ids=ids[None]).logits[0, :-1] / temperature
        picked = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([torch.zeros(1), picked])

    def loss_sum(self, rows: Sequence[Row]) -> tuple[torch.Tensor, int]:
        """Return (summed loss, number of response tokens) of a row."""
        total, tokens = torch.zeros(()), 0
        for row in rows:
            mask = torch.from_numpy(row.mask).bool()
            now = self.row_logprobs(row)[mask]
            ratio = torch.exp(now - torch.from_numpy(row.columns["prev_logprobs"])[mask])
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            gain = torch.minimum(ratio * row.advantage, clipped * row.advantage)
            delta = torch.from_numpy(row.columns["ref_logprobs"])[mask] - now
            total = total + (-gain + KL_COEF * (delta.exp() - delta - 1)).sum()
            tokens += int(mask.sum())
        return total, tokens

    def step(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Take one optimizer step; returns (loss, gradient norm before clipping)."""
        total, tokens = self.loss_sum(rows)
        loss = total / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * min(1.0, (self.steps + 1) / WARMUP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss.item(), norm.item()
