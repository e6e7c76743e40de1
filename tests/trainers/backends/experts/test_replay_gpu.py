"""What replay costs and buys on a GPU, in layers as large as those of Qwen3-30B-A3B."""

from __future__ import annotations

import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.tests.trainers.backends.backend_ranks import COLUMNS, Row, backend_config, micro_batch
from headrace.tests.trainers.backends.experts.routed_rows import Reference, routed, save_moe, with_own_logprobs
from headrace.trainers.backends.config import BackendConfig
from headrace.trainers.losses.config import LossConfig

SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 2,
    "vocab_size": 4096, "max_position_embeddings": 2048,
}  # fmt: skip
PAIRS = 2
"""Number of times that both ways are timed. Megatron keeps the parameters of a backend that was closed, so that seven
backends in one process do not fit into 80 GB."""
STEPS = 8
"""Number of steps of a backend that are timed."""


def build(model: str, kind: str, *, enabled: bool, every: int = 0) -> Any:
    """Build a backend of one rank. every: number of steps between measurements of what the own routers would do."""
    replay = RouterReplayConfig(enabled=enabled, native_agreement_every=every)
    config: BackendConfig = backend_config(
        model, router_replay=replay, backend=kind, packing="packed", prev="rollout", with_reference=False,
        loss=LossConfig(), lr=1e-9, mixed_precision=True,
    )  # fmt: skip
    if kind == "megatron":
        pytest.importorskip("megatron.core")
        from headrace.trainers.backends.megatron.backend import MegatronBackend

        return MegatronBackend(config, 0, 1)
    from headrace.trainers.backends.fsdp.backend import FsdpBackend

    return FsdpBackend(config, 0, 1)


def step(backend: Any, micro: Any) -> tuple[float, dict[str, float]]:
    """Return the seconds and metrics of a step over eight microbatches."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    backend.begin_step(1.3)
    backend.accumulate([micro] * 8, 8)
    figures = backend.finish_step()
    torch.cuda.synchronize()
    return time.perf_counter() - start, figures


def measure(model: str, kind: str, micro: Any, steps: int, *, enabled: bool, every: int = 0) -> list[Any]:
    """Return what `step` returns for each of `steps` steps of a new backend, which is closed afterwards."""
    with contextlib.closing(build(model, kind, enabled=enabled, every=every)) as backend:
        found = [step(backend, micro) for _ in range(steps)]
    del backend
    gc.collect()
    torch.cuda.empty_cache()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_cost_and_gain_in_bfloat16(tmp_path: Path, kind: str, record_property: Any) -> None:
    """The rows' log-probs and routes are those of the model in float32; the trainer computes in bfloat16."""
    start = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{kind}: {time.perf_counter() - start:.0f} s: {what}", flush=True)

    model = save_moe(tmp_path, dense=(), scale=1.0, **SHAPE)
    tell("the model is saved")
    rng = np.random.default_rng(0)
    mask = np.array([0] * 64 + [1] * 960, np.uint8)
    zeros = {name: np.zeros(1024, np.float32) for name in COLUMNS}
    rows = [Row(rng.integers(3, 4096, 1024).astype(np.int32), mask, zeros, 1.0, index // 4) for index in range(8)]
    reference = Reference(model)
    rows, routes = with_own_logprobs(rows, reference)
    tell("the reference has chosen routes")
    micros = {True: routed(rows, routes, reference.spec), False: micro_batch(rows)}
    [(_, figures)] = measure(model, kind, micros[True], 1, enabled=True, every=1)
    for name in ("mismatch_mean", "mismatch_kl", "mismatch_max"):
        record_property(name, (figures[f"routes/native_{name}"], figures[f"logprob/{name}"]))
    record_property("native_agreement", figures["routes/native_agreement"])
    tell(f"mismatch with the own routers and with replay is {figures}")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for enabled in (True, False) * PAIRS:
        _, *timed = measure(model, kind, micros[enabled], 1 + STEPS, enabled=enabled)  # the first step warms up
        seconds[enabled] += [one for one, _ in timed]
        tell(f"steps with replay {enabled} took {seconds[enabled][-STEPS:]} s")
    ratio = float(np.median(seconds[True]) / np.median(seconds[False]))
    record_property("step_ratio", ratio)
    assert figures["logprob/mismatch_mean"] < figures["routes/native_mismatch_mean"]
    assert ratio <= 1.03, seconds
