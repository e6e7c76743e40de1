"""Helpers for tests of the hf engine: they let single forward passes run, and compare with one whole forward pass."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from transformers import Qwen3ForCausalLM

from headrace.actors.engines.hf.engine import HfEngine

PROMPTS = [[5, 6, 7, 13], [4], [9, 9, 3, 3, 8, 13], [5, 6, 7, 13, 4, 4, 4]]


class Steps:
    """Lets an engine's forward passes through by tickets."""

    def __init__(self, engine: HfEngine) -> None:
        self.begun = 0
        self._tickets = threading.Semaphore(0)
        engine._model.register_forward_pre_hook(self._enter)

    def _enter(self, *_: Any) -> None:
        self.begun += 1
        assert self._tickets.acquire(timeout=30.0)

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._tickets.release()


def forward_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], response: np.ndarray, temperature: float
) -> np.ndarray:
    ids = torch.tensor([[*prompt, *response.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float() / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
