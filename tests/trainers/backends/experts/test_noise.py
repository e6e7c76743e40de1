"""Replay takes the noise of a router's choices out of the ratio between the trainer's probabilities and the engine's.

The engine is a HF model in float32, which samples nothing: the rows have random tokens, with its log-probs and routes.
The trainer has the same weights and a router with noise. Each step measures both: `routes/native_mismatch_*` with the
router's own choices, `logprob/mismatch_*` with the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headrace.actors.engines.config import RouterReplayConfig
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, TEMPERATURE, Row, backend_config
from headrace.tests.trainers.backends.experts.routed_rows import Reference, routed, save_moe, with_own_logprobs

CHOICE_NOISE = 0.02
"""Standard deviation of the noise on the scores that choose the experts. About one choice in ten differs with it."""
Noise = Callable[[torch.Tensor], torch.Tensor]


def on_choice(logits: torch.Tensor) -> torch.Tensor:
    return logits + CHOICE_NOISE * torch.randn(logits.shape)


def on_both(logits: torch.Tensor) -> torch.Tensor:
    return logits.bfloat16().float()


def plain(logits: torch.Tensor) -> torch.Tensor:
    return logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    sizes = {"hidden_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 32, "vocab_size": 200}
    return save_moe(tmp_path_factory.mktemp("moe"), dense=(0,), max_position_embeddings=128, **sizes)


@pytest.fixture(scope="module")
def micro(model: str) -> Any:
    """16 rows of 100 tokens with the log-probs and routes of the reference."""
    rng = np.random.default_rng(3)
    mask = np.array([0] * 10 + [1] * 90, np.uint8)
    zeros = {name: np.zeros(100, np.float32) for name in COLUMNS}
    rows = [Row(rng.integers(3, 200, 100).astype(np.int32), mask, zeros, 1.0, index // 4) for index in range(16)]
    reference = Reference(model)
    return routed(*with_own_logprobs(rows, reference), reference.spec)


def fsdp(model: str, choice: Noise, values: Noise) -> Any:
    """Build an fsdp backend whose routers choose by `choice(logits)` and gate by `values(logits)`."""
    from headrace.trainers.backends.fsdp.backend import FsdpBackend

    def forward(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = values(F.linear(hidden.reshape(-1, router.hidden_dim), router.weight))
        index = torch.topk(choice(logits), router.top_k, -1).indices
        scores = torch.softmax(logits, -1).gather(1, index)
        return logits, scores / scores.sum(-1, keepdim=True), index

    with patch.object(Qwen3MoeTopKRouter, "forward", forward):
        return FsdpBackend(config(model, "fsdp"), 0, 1)


def megatron(model: str, choice: Noise, values: Noise) -> Any:
    """Build a megatron backend with such routers."""
    pytest.importorskip("megatron.core")
    from headrace.trainers.backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(config(model, "megatron"), 0, 1)
    for layer in backend._policy.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.gating = _after(layer.mlp.router.gating, values)
            layer.mlp.router.router_replay.get_replay_topk = _noisy(layer.mlp.router.router_replay, choice)
    return backend


def _after(inner: Any, change: Noise) -> Any:
    return lambda hidden: change(inner(hidden))


def _noisy(router: Any, choice: Noise) -> Any:
    inner = router.get_replay_topk

    def replay(scores: torch.Tensor, topk: int, groups: Any, limit: Any, default: Any) -> Any:
        def own(scores: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            _, index = default(choice(scores), *rest)
            return scores.gather(1, index), index

        return inner(scores, topk, groups, limit, own)

    return replay


def config(model: str, backend: str) -> Any:
    on = RouterReplayConfig(enabled=True, native_agreement_every=1)
    return backend_config(model, router_replay=on, prev="rollout", backend=backend, packing="packed", lr=1e-9)


def figures(backend: Any, micro: Any) -> dict[str, float]:
    """Return the metrics of one step."""
    torch.manual_seed(1)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro], 1)
    found = backend.finish_step()
    backend.close()
    return found


@pytest.mark.megatron
@pytest.mark.parametrize("build", [fsdp, megatron])
def test_noise_in_the_choice_disappears(build: Any, model: str, micro: Any) -> None:
    found = figures(build(model, on_choice, plain), micro)
    assert 0.85 < found["routes/native_agreement"] < 0.95
    assert found["routes/native_mismatch_mean"] > 1e-3
    assert found["logprob/mismatch_mean"] * 10 <= found["routes/native_mismatch_mean"]
    assert found["logprob/ratio_error"] < 1.0001 < found["routes/native_ratio_error"]


@pytest.mark.megatron
@pytest.mark.parametrize("build", [fsdp, megatron])
def test_noise_in_choice_and_values_falls(build: Any, model: str, micro: Any) -> None:
    found = figures(build(model, plain, on_both), micro)
    assert found["routes/native_agreement"] < 0.999
    assert found["logprob/mismatch_mean"] * 4 <= found["routes/native_mismatch_mean"]
    assert found["logprob/mismatch_kl"] * 50 <= found["routes/native_mismatch_kl"]
