"""Tests the megatron backend on two GPUs over NCCL, without the CPU shim: float32 as by hand, bfloat16 close to it.

The tests need no Ray: `mkdir -p .pyright && ln -sfn .. .pyright/headrace`, then, where megatron-core is installed,
`PYTHONPATH=.pyright python -m pytest tests/trainers/backends/megatron/test_gpu.py -m gpu`.
"""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from headrace.tests.trainers.backends.backend_ranks import random_rows
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, cases, run_case, run_reference, train

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES = cases(
    "megatron", tied="tp2, pp2, dp2", untied="tp2 sp recompute, dp2 padded whole", llama="cp2",
    moe="dp2 ep2, tp2 ep2 sp",
)  # fmt: skip
HALF_CASES = cases(
    "megatron", tied="pp2 half recompute, dp2 half, dp2 half whole", untied="tp2 sp half", llama="cp2 half"
)


def on_two_gpus(rank: int, folder: str) -> None:
    """Run every case one after the other, then load a checkpoint of one mesh on another."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    found: dict[str, Any] = {case.name: run_case(rank, case, folder) for case in (*CASES, *HALF_CASES)}
    found["resumed"] = resumed(rank, folder)
    torch.save(found, f"{folder}/result.{rank}")
    dist.destroy_process_group()


def resumed(rank: int, folder: str) -> list[dict[str, float]]:
    """Return the second step on the mesh that saved after the first one, and on another mesh that loaded."""
    found = []
    first, second = Case("megatron tied tp2"), Case("megatron tied dp2")
    with contextlib.closing(first.build(rank, folder)) as backend:
        train(backend, first.topology, rank, random_rows(0, NUM_ROWS))
        backend.save(f"{folder}/saved")
        found.append(train(backend, first.topology, rank, random_rows(1, NUM_ROWS)))
    with contextlib.closing(second.build(rank, folder)) as backend:
        backend.load(f"{folder}/saved")
        found.append(train(backend, second.topology, rank, random_rows(1, NUM_ROWS)))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    """Compute the expected results in float32 on the CPU."""
    return {model: run_reference(str(folder / model)) for model in ("tied", "untied", "moe", "llama")}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    spawn(on_two_gpus, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(2)]


def assert_near(case: Case, ranks: list[dict[str, Any]], expected: dict[str, Any], step: float, logprob: float) -> None:
    """Compare losses and gradient norms of all steps to within `step`, and log-probs to within `logprob`."""
    for rank in ranks:
        figures = [(step["train/loss"], step["train/grad_norm"]) for step in rank["steps"]]
        assert np.array(figures) == pytest.approx(np.array(expected["steps"]), rel=step, abs=step / 10)
    written = ranks[case.topology.writer(0)]
    for name in ("logprobs before", "logprobs"):
        torch.testing.assert_close(torch.cat(written[name]), expected[name], rtol=0, atol=logprob)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_float32(case: Case, ranks: list[dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    own = [rank[case.name] for rank in ranks]
    assert_near(case, own, expected[case.model], 1e-4, 1e-4)
    for name, tensor in expected[case.model]["weights before"].items():
        assert torch.equal(own[0]["weights before"][name], tensor), name


@pytest.mark.parametrize("case", HALF_CASES, ids=[case.name for case in HALF_CASES])
def test_half_precision(case: Case, ranks: list[dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    assert_near(case, [rank[case.name] for rank in ranks], expected[case.model], 2e-2, 3e-2)


def test_a_checkpoint_goes_on_on_another_mesh(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        saved, loaded = rank["resumed"]
        assert loaded == pytest.approx(saved, rel=1e-4, abs=1e-6)
