"""Tests the megatron backend on two ranks: all objectives, skipped and aborted steps, checkpoints between meshes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataplane.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    COLUMNS,
    MEASURED,
    Row,
    backend_config,
    micro_batch,
    random_rows,
    run_on_ranks,
    save_tiny_model,
    save_tiny_moe,
    weights_of,
)
from headrace.tests.trainers.backends.backend_reference import TEMPERATURE
from headrace.tests.trainers.backends.megatron.mesh_ranks import NUM_ROWS, Case, accumulate, train
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

SP: dict[str, Any] = {"sequence_parallel": True}
MESHES = {"cp2": Topology(1, cp=2), "pp2": Topology(1, pp=2), "tp2": Topology(1, tp=2), "dp2": Topology(2)}
GSPO = LossConfig(
    kind="gspo", aggregation="sequence", correction="sequence", clip_low=0.1, clip_high=0.1, entropy_coef=0.01
)
CISPO = LossConfig(kind="cispo", clip_high=0.2, aggregation="prompt", correction="tis", kl_coef=0.05, kl_in="reward")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": GSPO},
    "cispo": {"loss": CISPO},
    "reinforce, nothing recomputed": {"loss": LossConfig(kind="reinforce"), "prev": "rollout"},
}
ZEROS = {name: np.zeros(2, np.float32) for name in COLUMNS}
POISONED = Row(np.array([3, 4], np.int32), np.array([0, 1], np.uint8), ZEROS, float("nan"), 0)
RESUMED = (
    *(Case(name, "tied", topology) for name, topology in MESHES.items()),
    Case("whole optimizer", "tied", Topology(2), {"distributed_optimizer": False}),
    Case("ep2", "experts", Topology(2, ep=2)),
    Case("tp2 experts", "experts", Topology(1, tp=2), SP),
    Case("pp2 experts", "experts", Topology(1, pp=2)),
)
SAVED_BY = {"tied": ("dp2", "tp2"), "experts": ("ep2", "tp2 experts")}


def objective_steps(rank: int, folder: str) -> dict[str, list[dict[str, float]]]:
    """Run two steps of each objective on each mesh."""
    steps: dict[str, list[dict[str, float]]] = {}
    for objective, changes in OBJECTIVES.items():
        for mesh, topology in MESHES.items():
            case = Case(mesh, "tied", topology, {**changes, "entropy_metric": True})
            with contextlib.closing(case.build(rank, folder)) as backend:
                steps[f"{objective} {mesh}"] = [
                    train(backend, topology, rank, random_rows(step, 10)) for step in (0, 1)
                ]
    return steps


def interrupted(rank: int, folder: str) -> dict[str, Any]:
    """Run steps that must not be applied on a pipeline of two stages, then a whole step."""
    case = Case("pp2", "tied", MESHES["pp2"])
    rows = random_rows(0, NUM_ROWS)
    with contextlib.closing(case.build(rank, folder)) as backend:
        before = weights_of(backend)
        found: dict[str, Any] = {}
        found["nothing"] = train(backend, case.topology, rank, [row for row in rows if not row.mask.any()])
        found["poisoned"] = train(backend, case.topology, rank, [*rows, POISONED])
        accumulate(backend, case.topology, rank, random_rows(5, NUM_ROWS))
        backend.abort_step()
        found["unchanged"] = all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
        found["whole"] = train(backend, case.topology, rank, rows)
        return found


def resumed(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Run two steps, a save and a third step on some meshes; load and run the third step on all of them."""
    found: dict[str, dict[str, Any]] = {}
    for case in RESUMED:
        if case.name in SAVED_BY[case.model]:
            with contextlib.closing(case.build(rank, folder)) as backend:
                for step in (0, 1):
                    train(backend, case.topology, rank, random_rows(step, NUM_ROWS))
                backend.save(f"{folder}/{case.name}", wait=case.name == "tp2")
                third = train(backend, case.topology, rank, random_rows(2, NUM_ROWS))
                backend.wait_saved()
                found[case.name] = {"third": third}
    for case in RESUMED:
        for saved_by in SAVED_BY[case.model]:
            with contextlib.closing(case.build(rank, folder)) as backend:
                backend.load(f"{folder}/{saved_by}")
                found[saved_by][case.name] = train(backend, case.topology, rank, random_rows(2, NUM_ROWS))
    return found


def from_fsdp(rank: int, folder: str) -> dict[str, float]:
    """Load what the fsdp backend has saved and run the third step."""
    case = RESUMED[2]
    with contextlib.closing(case.build(rank, folder)) as backend:
        with pytest.raises(ValueError, match="missing or incomplete"):
            backend.load(f"{folder}/nowhere")
        backend.load(f"{folder}/fsdp")
        return train(backend, case.topology, rank, random_rows(2, NUM_ROWS))


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run everything in one start of two processes."""
    return {
        "objectives": objective_steps(rank, folder),
        "interrupted": interrupted(rank, folder),
        "resumed": resumed(rank, folder),
        "from fsdp": from_fsdp(rank, folder),
    }


def fsdp_step(backend: FsdpBackend, rows: list[Row]) -> dict[str, float]:
    """Run one step with all rows in one microbatch, which contains each group whole."""
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro_batch(rows)], 1)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("two")
    save_tiny_model(folder / "tied")
    save_tiny_moe(folder / "experts")
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, float]]:
    """Run three steps of the fsdp backend on one rank, saving `fsdp` after the second."""
    backend = FsdpBackend(backend_config(str(folder / "tied")), 0, 1)
    steps = [fsdp_step(backend, random_rows(step, NUM_ROWS)) for step in (0, 1)]
    backend.save(str(folder / "fsdp"))
    return [*steps, fsdp_step(backend, random_rows(2, NUM_ROWS))]


@pytest.fixture(scope="module")
def ranks(folder: Path, alone: list[dict[str, float]]) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, folder / "run", str(folder))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_those_of_whole_rows(objective: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    backend = FsdpBackend(backend_config(str(folder / "tied"), **OBJECTIVES[objective], entropy_metric=True), 0, 1)
    expected = [fsdp_step(backend, random_rows(step, 10)) for step in (0, 1)]
    assert expected[0]["train/entropy"] > 0 and expected[0]["logprob/mismatch_mean"] > 0
    for rank in ranks:
        for mesh in MESHES:
            for got, wanted in zip(rank["objectives"][f"{objective} {mesh}"], expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6), mesh


def test_steps_that_must_not_be_applied_are_not(ranks: list[dict[str, Any]], alone: list[dict[str, float]]) -> None:
    for rank in ranks:
        found = rank["interrupted"]
        assert found["nothing"]["train/skipped"] == found["poisoned"]["train/skipped"] == 1
        assert found["nothing"]["train/tokens"] == 0 < found["poisoned"]["train/tokens"]
        assert found["unchanged"]
        assert found["whole"] == pytest.approx(alone[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", RESUMED, ids=[case.name for case in RESUMED])
def test_a_checkpoint_goes_on_on_any_mesh(case: Case, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for saved_by in SAVED_BY[case.model]:
            found = rank["resumed"][saved_by]
            assert found[case.name] == pytest.approx(found["third"], rel=1e-5, abs=1e-6)
            if case.name == saved_by:
                assert found[case.name] == found["third"], "the same mesh, to the bit"


def test_checkpoints_of_the_two_backends_are_alike(
    folder: Path, ranks: list[dict[str, Any]], alone: list[dict[str, float]]
) -> None:
    for rank in ranks:
        assert rank["from fsdp"] == pytest.approx(alone[2], rel=1e-5, abs=1e-6)
    for saved_by in SAVED_BY["tied"]:
        backend = FsdpBackend(backend_config(str(folder / "tied")), 0, 1)
        backend.load(str(folder / saved_by))
        assert fsdp_step(backend, random_rows(2, NUM_ROWS)) == pytest.approx(alone[2], rel=1e-5, abs=1e-6)


def test_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["resumed"] == ranks[1]["resumed"]
    assert ranks[0]["objectives"] == ranks[1]["objectives"]
