"""Tests the megatron backend on two and four ranks: steps as on one, checkpoints, and what must not be applied."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tests.trainers.backends.backend_ranks import (
    MEASURED,
    TEMPERATURE,
    backend_config,
    micro_batch,
    random_rows,
    run_on_ranks,
    weights_of,
)
from headrace.tests.trainers.backends.families import MEGATRON
from headrace.tests.trainers.backends.mesh_ranks import (
    NUM_ROWS,
    Case,
    assert_as_reference,
    assert_interrupted,
    cases,
    interrupted,
    resumed,
    run_cases,
    run_reference,
    sent,
    train,
)
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

CASES = cases(
    "megatron",
    tied="tp2, pp2 recompute, dp2, tp2 pp2, dp2 pp2",
    untied="tp2 sp, dp2 padded whole, tp2 cp2 sp whole",
    llama="cp2, cp2 pp2",
    moe="dp2 ep2, tp2 sp, tp2 ep2 sp recompute, dp2 pp2 ep2, dp2 tp2 ep4 sp, dp2 cp2 ep2 whole",
    shared="tp2 sp",
    latent="tp2 ep2 sp recompute",
)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    return {model: run_reference(str(folder / model)) for model in {case.model for case in CASES}}


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each rank's cases gave, for each size of mesh."""
    return {world: run_on_ranks(run_cases, world, folder / f"run{world}", CASES, str(folder)) for world in (2, 4)}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_as_one_model(case: Case, ranks: dict[int, list[dict[str, Any]]], expected: dict[str, dict[str, Any]]) -> None:
    found = [rank[case.name] for rank in ranks[case.topology.world]]
    assert_as_reference(case, found, expected[case.model], spread=case.model in MEGATRON)


MESHES = ("cp2", "pp2", "tp2", "dp2")
PIPELINE = Case("megatron tied pp2")
GSPO = LossConfig(
    kind="gspo", aggregation="sequence", correction="sequence", clip_low=0.1, clip_high=0.1, entropy_coef=0.01
)
CISPO = LossConfig(kind="cispo", clip_high=0.2, aggregation="prompt", correction="tis", kl_coef=0.05, kl_in="reward")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo": {"loss": GSPO},
    "cispo": {"loss": CISPO},
    "reinforce, nothing recomputed": {"loss": LossConfig(kind="reinforce"), "prev": "rollout"},
}
RESUMED = cases("megatron", tied="cp2, pp2, tp2, dp2, dp2 whole", moe="dp2 ep2, tp2 sp, pp2")
SAVED_BY = {"tied": ("megatron tied dp2", "megatron tied tp2"), "moe": ("megatron moe dp2 ep2", "megatron moe tp2 sp")}


def objective_steps(rank: int, folder: str) -> dict[str, list[dict[str, float]]]:
    """Run two steps of each objective on each mesh."""
    steps: dict[str, list[dict[str, float]]] = {}
    for objective, changes in OBJECTIVES.items():
        for mesh in MESHES:
            case = Case(f"megatron tied {mesh}", {**changes, "entropy_metric": True})
            with contextlib.closing(case.build(rank, folder)) as backend:
                steps[f"{objective} {mesh}"] = [
                    train(backend, case.topology, rank, random_rows(step, 10)) for step in (0, 1)
                ]
    return steps


def pipelined(rank: int, folder: str) -> dict[str, Any]:
    """Run a step of eight microbatches on a pipeline of two stages, in one call, in four and in eight. Log-probs are
    computed between the calls. Returns the order of forward and backward passes, and the weights afterwards."""
    from headrace.trainers.backends.megatron import library

    case, rows = PIPELINE, random_rows(0, 16)
    place = case.topology.place(rank)
    micros = [sent(rows[start : start + 2], case.topology, place, rows) for start in range(0, 16, 2)]
    order: list[str] = []

    def counted(letter: str, real: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            order.append(letter)
            return real(*args, **options)

        return step

    def run(size: int) -> dict[str, Any]:
        order.clear()
        with contextlib.closing(case.build(rank, folder)) as backend:
            backend.begin_step(TEMPERATURE)
            for start in range(0, 8, size):
                backend.accumulate(micros[start : start + size], size)
                backend.logprobs(micros[:2], 2, temperature=TEMPERATURE)
            metrics = {name: value for name, value in backend.finish_step().items() if name not in MEASURED}
            return {"order": "".join(order), "metrics": metrics, "weights": weights_of(backend)}

    with pytest.MonkeyPatch.context() as patch:
        for letter, name in (("F", "forward_step"), ("B", "backward_step")):
            patch.setattr(library, name, counted(letter, getattr(library, name)))
        return {f"calls of {size}": run(size) for size in (8, 2, 1)}


def bubbles(stages: list[str]) -> int:
    """Number of idle slots of a pipeline whose stages run these passes in order, each in one slot. A forward pass comes
    after that of the stage before, a backward pass after that of the stage behind."""
    done: dict[tuple[int, str, int], int] = {}
    at, free = [0] * len(stages), [0] * len(stages)
    while any(place < len(order) for place, order in zip(at, stages, strict=True)):
        for stage, order in enumerate(stages):
            if at[stage] == len(order):
                continue
            letter = order[at[stage]]
            number = order[: at[stage]].count(letter)
            before = stage - 1 if letter == "F" else stage + 1
            if 0 <= before < len(stages) and (before, letter, number) not in done:
                continue
            free[stage] = max(free[stage], done.get((before, letter, number), 0)) + 1
            done[stage, letter, number] = free[stage]
            at[stage] += 1
    return max(free) * len(stages) - sum(map(len, stages))


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
        "interrupted": interrupted(rank, PIPELINE, folder),
        "pipelined": pipelined(rank, folder),
        "resumed": resumed(rank, folder, RESUMED, SAVED_BY),
        "from fsdp": from_fsdp(rank, folder),
    }


def fsdp_step(backend: FsdpBackend, rows: Any) -> dict[str, float]:
    """Run one step with all rows in one microbatch, which contains each group whole."""
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro_batch(rows)], 1)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, float]]:
    """Run three steps of the fsdp backend on one rank, saving `fsdp` after the second."""
    backend = FsdpBackend(backend_config(str(folder / "tied")), 0, 1)
    steps = [fsdp_step(backend, random_rows(step, NUM_ROWS)) for step in (0, 1)]
    backend.save(str(folder / "fsdp"))
    return [*steps, fsdp_step(backend, random_rows(2, NUM_ROWS))]


@pytest.fixture(scope="module")
def two(folder: Path, alone: list[dict[str, float]]) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, folder / "run", str(folder))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_those_of_whole_rows(objective: str, folder: Path, two: list[dict[str, Any]]) -> None:
    backend = FsdpBackend(backend_config(str(folder / "tied"), **OBJECTIVES[objective], entropy_metric=True), 0, 1)
    expected = [fsdp_step(backend, random_rows(step, 10)) for step in (0, 1)]
    assert expected[0]["train/entropy"] > 0 and expected[0]["logprob/mismatch_mean"] > 0
    for rank in two:
        for mesh in MESHES:
            for got, wanted in zip(rank["objectives"][f"{objective} {mesh}"], expected, strict=True):
                assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6), mesh


def test_a_pipeline_is_not_drained_between_chunks(two: list[dict[str, Any]]) -> None:
    whole = [rank["pipelined"]["calls of 8"] for rank in two]
    for name in ("calls of 2", "calls of 1"):
        chunked = [rank["pipelined"][name] for rank in two]
        assert [one["order"] for one in chunked] == ["F" + 7 * "FB" + "B", 8 * "FB"]
        assert [one["metrics"] for one in chunked] == [one["metrics"] for one in whole]
        for key, tensor in whole[0]["weights"].items():
            assert torch.equal(chunked[0]["weights"][key], tensor), key
        assert bubbles([one["order"] for one in chunked]) == bubbles([one["order"] for one in whole]) == 4
    assert bubbles([4 * "FFBB", 4 * "FBFB"]) == 16, "drained after each of four calls"


def test_steps_that_must_not_be_applied_are_not(two: list[dict[str, Any]], alone: list[dict[str, float]]) -> None:
    for rank in two:
        assert_interrupted(rank["interrupted"], (alone[0]["train/loss"], alone[0]["train/grad_norm"]))
        assert rank["interrupted"]["whole"] == pytest.approx(alone[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", RESUMED, ids=[case.name for case in RESUMED])
def test_a_checkpoint_goes_on_on_any_mesh(case: Case, two: list[dict[str, Any]]) -> None:
    for rank in two:
        for saved_by in SAVED_BY[case.model]:
            found = rank["resumed"][saved_by]
            assert found[case.name] == pytest.approx(found["third"], rel=1e-5, abs=1e-6)
            if case.name == saved_by:
                assert found[case.name] == found["third"], "the same mesh, to the bit"


def test_checkpoints_of_the_two_backends_are_alike(
    folder: Path, two: list[dict[str, Any]], alone: list[dict[str, float]]
) -> None:
    for rank in two:
        assert rank["from fsdp"] == pytest.approx(alone[2], rel=1e-5, abs=1e-6)
    for saved_by in SAVED_BY["tied"]:
        backend = FsdpBackend(backend_config(str(folder / "tied")), 0, 1)
        backend.load(str(folder / saved_by))
        assert fsdp_step(backend, random_rows(2, NUM_ROWS)) == pytest.approx(alone[2], rel=1e-5, abs=1e-6)


def test_ranks_agree(two: list[dict[str, Any]]) -> None:
    assert two[0]["resumed"] == two[1]["resumed"]
    assert two[0]["objectives"] == two[1]["objectives"]
