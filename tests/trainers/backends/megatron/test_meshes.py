"""Tests that steps, log-probs and weights of the megatron backend on two and four ranks are those of one HF model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import run_on_ranks, save_tiny_model, save_tiny_moe
from headrace.tests.trainers.backends.megatron.mesh_ranks import (
    Case,
    assert_as_reference,
    run_cases,
    run_reference,
    save_plain_llama,
)

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

SP: dict[str, Any] = {"sequence_parallel": True}
CASES = (
    Case("tp2", "tied", Topology(1, tp=2)),
    Case("tp2 sp", "untied", Topology(1, tp=2), SP),
    Case("pp2 recompute", "tied", Topology(1, pp=2), {"recompute": "full"}),
    Case("cp2", "llama", Topology(1, cp=2)),
    Case("dp2", "tied", Topology(2)),
    Case("dp2 unpacked, whole optimizer", "untied", Topology(2), {"packing": "none", "distributed_optimizer": False}),
    Case("ep2", "experts", Topology(2, ep=2)),
    Case("tp2 experts", "experts", Topology(1, tp=2), SP),
    Case("tp2 ep2", "experts", Topology(1, tp=2, ep=2), {**SP, "recompute": "full"}),
    Case("tp2 pp2", "tied", Topology(1, tp=2, pp=2)),
    Case("dp2 pp2", "tied", Topology(2, pp=2)),
    Case("tp2 cp2 sp", "untied", Topology(1, tp=2, cp=2), {**SP, "distributed_optimizer": False}),
    Case("cp2 pp2", "llama", Topology(1, cp=2, pp=2)),
    Case("dp2 pp2 ep2", "experts", Topology(2, pp=2, ep=2)),
    Case("dp2 tp2 ep4", "experts", Topology(2, tp=2, ep=4), SP),
    Case("dp2 cp2 ep2", "experts", Topology(2, cp=2, ep=2), {"distributed_optimizer": False}),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("meshes")
    save_tiny_model(folder / "tied")
    save_tiny_model(folder / "untied", tied=False)
    save_tiny_moe(folder / "experts")
    save_plain_llama(folder / "llama")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    return {model: run_reference(str(folder / model)) for model in {case.model for case in CASES}}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each rank's cases gave, for each size of mesh."""
    return {world: run_on_ranks(run_cases, world, folder / f"run{world}", CASES, str(folder)) for world in (2, 4)}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_as_one_model(case: Case, ranks: dict[int, list[dict[str, Any]]], expected: dict[str, dict[str, Any]]) -> None:
    assert_as_reference(case, [rank[case.name] for rank in ranks[case.topology.world]], expected[case.model])
