"""Tests backends that only compute log-probs: they have those of a backend that trains, and no optimizer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tests.trainers.backends.backend_ranks import (
    backend_config,
    logprobs_of,
    micro_batch,
    random_rows,
    run_on_ranks,
    save_tiny_llama,
    save_tiny_moe,
)
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.losses.config import LossConfig

KINDS = ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)]


def build(folder: str, rank: int = 0, world: int = 1, **changes: Any) -> Any:
    return build_backend(backend_config(folder, loss=LossConfig(), with_reference=False, **changes), rank, world)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_log_probs_are_those_of_a_backend_that_trains(tmp_path: Path, kind: str, half: bool) -> None:
    folder, rows, found, sizes = save_tiny_moe(tmp_path), micro_batch(random_rows(4, 6)), [], []
    for trains in (True, False):
        backend = build(folder, backend=kind, mixed_precision=half, trains=trains)
        found.append(logprobs_of(backend, rows))
        params = list(backend._policy.parameters())
        sizes.append({param.element_size() for param in params})
        if not trains:
            moves = [] if kind == "fsdp" else [backend.offload]
            for call in (backend.begin_step, partial(backend.save, "x"), partial(backend.load, "x"), *moves):
                with pytest.raises(
                    RuntimeError, match=rf"this {kind} backend only computes log-probs \(trains=False\)"
                ):
                    call()
            backend.abort_step()
            assert torch.equal(logprobs_of(backend, rows), found[-1])
            if kind == "fsdp":
                assert backend.offload().bytes_moved and not backend._policy.model.lm_head.weight.untyped_storage()
                with pytest.raises(RuntimeError, match="the backend is offloaded"):
                    logprobs_of(backend, rows)
                backend.onload()
                assert torch.equal(logprobs_of(backend, rows), found[-1])
                kept = sum(tensor.untyped_storage().nbytes() for tensor in backend._resident())
                weights = sum(param.numel() for param in params) * (2 if half else 4)
                assert weights <= kept <= 1.01 * weights, "weights and some buffers"
        backend.close()
    assert torch.equal(*found) and found[0].any()
    assert sizes[1] == {2 if half else 4}


def two_ranks(rank: int, world: int, folder: str) -> list[torch.Tensor]:
    """Return the log-probs of a backend that trains, and of one that does not."""
    backends = [build(folder, rank, world, dp=world, mixed_precision=True, trains=trains) for trains in (True, False)]
    assert {param.dtype for param in backends[1]._policy.parameters()} == {torch.bfloat16}
    return [logprobs_of(backend, micro_batch(random_rows(4, 6))) for backend in backends]


@pytest.mark.processes
def test_two_ranks_without_training_have_the_same_log_probs(tmp_path: Path) -> None:
    for found in run_on_ranks(two_ranks, 2, tmp_path / "run", save_tiny_moe(tmp_path / "model")):
        assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_beside_the_policy_has_its_own_log_probs(tmp_path: Path, kind: str) -> None:
    """Such as a reference model or a teacher, whatever the backend of the policy."""
    folder, other, rows = save_tiny_moe(tmp_path / "a"), save_tiny_llama(tmp_path / "b"), micro_batch(random_rows(4, 6))
    config = backend_config(folder, backend=kind, lora={"rank": 2}, recompute="full", compile=True, with_reference=True)
    frozen: Any = build_backend(config.frozen(other, offload=True), 0, 1)  # as beside a policy on a GPU
    alone = build(other)
    expected = logprobs_of(alone, rows, temperature=0.7)
    assert torch.equal(logprobs_of(frozen, rows, temperature=0.7), expected) and expected.any()
    with pytest.raises(RuntimeError, match="only computes log-probs"):
        frozen.begin_step()
    for backend in (frozen, alone):
        backend.close()
