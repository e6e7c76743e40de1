"""Provides rows with routes, and a tiny mixture-of-experts model whose own choices they are, to the tests of replay.

No engine is involved: the routes are those that a HF model, the reference, chooses for the rows, or random ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.actors.train_backend import MicroBatch
from headrace.codecs.batch import Batch, Jagged
from headrace.codecs.schema import Schema
from headrace.codecs.tokens.routes import ROUTES, RouteSpec
from headrace.tests.trainers.backends.backend_ranks import TEMPERATURE, TINY, Row, micro_batch


def save_moe(folder: Path, *, dense: Sequence[int] = (1,), scale: float = 3.0, **changes: Any) -> str:
    """Write a random Qwen3-MoE as a HF folder, with 8 experts in each of 4 layers that is not `dense`. A token uses 2
    of them. scale: factor on all matrices, without which the routers' choices would be too close to ties. changes:
    other keys of the model's config."""
    torch.manual_seed(5)
    experts = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes: dict[str, Any] = {**TINY, **experts, **changes}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True, mlp_only_layers=list(dense), tie_word_embeddings=False)
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.mul_(scale)
    model.save_pretrained(folder)
    return str(folder)


def spec_of(folder: str) -> RouteSpec:
    """Return the shape of the routes of the model in `folder`."""
    spec = RouteSpec.of(AutoConfig.from_pretrained(folder))
    assert spec is not None
    return spec


class Reference:
    """The model in a folder as HF runs it, row by row, without padding. It says what its routers choose."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.spec = spec_of(folder)
        self._chosen: list[torch.Tensor] = []
        for name, module in self.model.named_modules():
            if name.endswith(("mlp.gate", "mlp.router")):
                module.register_forward_hook(lambda *call: self._chosen.append(call[-1][2]))

    def run(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
        """Return the log-probs of the row's tokens at TEMPERATURE, float32 `[L]`, and its routes `[L, layers, k]`. The
        first log-prob is 0, and the last token's routes are missing."""
        self._chosen.clear()
        ids = torch.from_numpy(row.ids).long()
        logits = self.model(input_ids=ids[None, :-1]).logits[0] / TEMPERATURE
        picked = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        routes = torch.stack(self._chosen, 1).to(self.spec.dtype).numpy()
        return np.concatenate([[0.0], picked.numpy()]).astype(np.float32), np.concatenate(
            [routes, self.spec.missing(1)]
        )


def with_own_logprobs(rows: Sequence[Row], reference: Reference) -> tuple[list[Row], list[np.ndarray]]:
    """Return the rows as if the reference had sampled them, and their routes."""
    new, routes = [], []
    for row in rows:
        logprobs, chosen = reference.run(row)
        columns = {**row.columns, "rollout_logprobs": logprobs * row.mask, "prev_logprobs": logprobs * row.mask}
        new.append(dataclasses.replace(row, columns=columns))
        routes.append(chosen)
    return new, routes


def random_routes(rows: Sequence[Row], spec: RouteSpec, seed: int = 0) -> list[np.ndarray]:
    """Return routes of random experts for each row; the last token's is missing."""
    rng = np.random.default_rng(seed)
    routes = []
    for row in rows:
        scores = rng.random((len(row.ids), len(spec.layers), spec.num_experts))
        chosen = scores.argsort(-1)[..., : spec.top_k].astype(spec.numpy_dtype)
        chosen[-1] = spec.mark
        routes.append(chosen)
    return routes


def all_missing(rows: Sequence[Row], spec: RouteSpec) -> list[np.ndarray]:
    """Return rows' routes of which each is missing."""
    return [spec.missing(len(row.ids)) for row in rows]


def routed(rows: Sequence[Row], routes: Sequence[np.ndarray], spec: RouteSpec) -> MicroBatch:
    """Return a microbatch of the rows, with their routes as the column `routed_experts`."""
    micro = micro_batch(rows)
    values = torch.from_numpy(np.concatenate(list(routes))) if rows else torch.from_numpy(spec.missing(0))
    column = Batch(Schema([spec.field]), len(rows), {ROUTES: Jagged(values, micro.lengths)})
    return dataclasses.replace(micro, batch=micro.batch.merge(column))
