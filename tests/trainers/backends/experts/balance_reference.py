"""Computes the balance of experts by hand for the tests of `trainer.moe`: HF model, one row at a time, numpy loops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Dots1Config, Dots1ForCausalLM

from headrace.tests.trainers.backends.backend_ranks import TINY, Row


def save_dots1(folder: Path, *, bias: float = 0.3, **changes: Any) -> str:
    """Write a random dots1 as a HF folder: a dense layer, then three with 8 experts and a shared one. A token uses 2 of
    the 8. Its routers have random biases of the size `bias`."""
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        **TINY, "num_hidden_layers": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
        "sliding_window": None, **changes,
    }  # fmt: skip
    model = Dots1ForCausalLM(Dots1Config(**sizes, tie_word_embeddings=False))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(torch.randn(tensor.shape) * bias)
            elif tensor.ndim > 1:
                tensor.mul_(3.0)
    model.save_pretrained(folder)
    return str(folder)


class BalanceReference:
    """A HF model as it runs row by row, and what its routers do there."""

    def __init__(self, folder: str, *, sigmoid: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._sigmoid = sigmoid
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, module in self.model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda *call: self._calls.append((call[-1][0], call[-1][2])))

    def choices(self, row: Row) -> list[tuple[torch.Tensor, np.ndarray]]:
        """Return each router's logits for the row's tokens but the last, and the ids of the chosen experts. The logits
        are `[L - 1, E]` with gradient, the ids `[L - 1, k]`."""
        self._calls.clear()
        self.model(input_ids=torch.from_numpy(row.ids[:-1]).long()[None])
        return [(logits, index.numpy()) for logits, index in self._calls]

    def row_loss(self, row: Row, routes: np.ndarray | None = None) -> torch.Tensor:
        """Return the row's auxiliary loss, summed over layers, with gradient. routes: experts `[L, layers, k]` that are
        used in place of the routers' choice when the loss is computed, but not by the model."""
        total = torch.zeros(())
        for layer, (logits, index) in enumerate(self.choices(row)):
            chosen = index if routes is None else routes[: len(index), layer]
            tokens, experts = logits.shape
            scores = torch.sigmoid(logits) if self._sigmoid else torch.exp(logits)
            mean_probs = (scores / scores.sum(1, keepdim=True)).sum(0) / tokens
            for expert in range(experts):
                share = sum(int(expert in one) for one in chosen.tolist()) / (tokens * chosen.shape[1])
                total = total + experts * share * mean_probs[expert]
        return total

    def loads(self, rows: Sequence[Row], routes: Sequence[np.ndarray] | None = None) -> np.ndarray:
        """Return the number of tokens of each expert, `[layers, E]`. routes: as in `row_loss`, for each row."""
        counts: np.ndarray | None = None
        for number, row in enumerate(rows):
            found = self.choices(row)
            counts = np.zeros((len(found), found[0][0].shape[1])) if counts is None else counts
            for layer, (_, index) in enumerate(found):
                chosen = index if routes is None else routes[number][: len(index), layer]
                for expert in chosen.reshape(-1).tolist():
                    counts[layer, expert] += 1
        assert counts is not None
        return counts

    def gradient(self, rows: Sequence[Row], weights: Sequence[float]) -> dict[str, torch.Tensor]:
        """Return the gradient of the weighted sum of the rows' auxiliary losses, by HF name."""
        self.model.zero_grad()
        for row, weight in zip(rows, weights, strict=True):
            if weight:
                (weight * self.row_loss(row)).backward()
        return {name: param.grad.clone() for name, param in self.model.named_parameters() if param.grad is not None}


def row_weights(rows: Sequence[Row], aggregation: str) -> list[float]:
    """Return the weight of each row in the mean of a step with `loss.aggregation`, times its denominator."""
    tokens = [int(row.mask.sum()) for row in rows]
    if aggregation == "token":
        return [float(count) for count in tokens]
    if aggregation == "prompt":
        whole = [sum(t for t, other in zip(tokens, rows, strict=True) if other.group == row.group) for row in rows]
        return [count / max(total, 1) for count, total in zip(tokens, whole, strict=True)]
    return [float(count > 0) for count in tokens]
