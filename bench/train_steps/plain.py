"""Makes the same train step in plain torch: a HF model under autocast, one row at a time, whole logits, fused AdamW.

It is what a careful script does without a training library. Rows are not padded, so that no token is wasted. With
`recompute` HF's own gradient checkpointing keeps only the inputs of layers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ..gpu_train import LOSS, Rows, response


class PlainStep:
    """A train step in plain torch with the loss of the benchmark, PPO's."""

    def __init__(self, folder: str, device: torch.device, *, half: bool, recompute: bool, lr: float) -> None:
        self._device, self._half = device, half
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.model.to(device).train()  # the models of the benchmark have no dropout
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
