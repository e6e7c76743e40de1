"""Tests offload and onload of the train backends on CPUs: steps after cycles are bit-equal to a run without any."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.train.process_groups import ProcessGroups
from headrace.actors.train_backend import TrainBackend
from headrace.tests.actors.train.group_ranks import run_with_groups
from headrace.tests.trainers.backends.backend_ranks import VOCAB
from headrace.tests.trainers.backends.mesh_ranks import Case, cases
from headrace.tests.trainers.backends.offload_ranks import (
    CYCLES,
    assert_bit_equal,
    cycle,
    run_cases,
    step,
    steps_with_cycles,
    storage_bytes,
)

ALONE = (*cases("fsdp", tied=""), *cases("megatron", tied=""))
TWO = (*cases("fsdp", tied="tp2"), *cases("megatron", tied="dp2"))
MORE_OF_TWO = (*cases("fsdp", tied="dp2, cp2", moe="dp2 ep2"), *cases("megatron", tied="tp2, pp2"))
FOUR = (
    *cases("fsdp", tied="dp2 tp2, dp4 half"),
    *cases("megatron", tied="dp2 tp2 half, dp2 pp2 whole", moe="dp2 tp2 ep2 sp"),
)


def kind(case: Case) -> Any:
    return pytest.param(case, id=case.name, marks=[pytest.mark.megatron] if case.backend == "megatron" else [])


@pytest.fixture(params=[kind(case) for case in ALONE])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def backend(case: Case, folder: Path) -> Iterator[TrainBackend]:
    with contextlib.closing(case.build(0, folder)) as backend:
        yield backend


def test_one_rank(case: Case, folder: Path) -> None:
    found = steps_with_cycles(0, None, case, folder)
    assert_bit_equal(found)
    moved = [report.bytes_moved for cycle in found["reports"] for report in cycle]
    assert moved == [moved[0]] * 2 * CYCLES and moved[0] > 0


@pytest.mark.parametrize("case", cases("fsdp", tied="muon, hosted"), ids=lambda case: case.name)
def test_one_rank_with_other_optimizers(case: Case, folder: Path) -> None:
    assert_bit_equal(steps_with_cycles(0, None, case, folder))


@pytest.mark.long
def test_memory_falls_and_stays_flat(case: Case, backend: TrainBackend) -> None:
    step(case, backend, 0, 0)
    cycle(backend, None)
    before = storage_bytes()
    for _ in range(CYCLES):
        step(case, backend, 0, 0)
        cycle(backend, None)
    assert storage_bytes() == before
    report = backend.offload()
    # The host memory was allocated by the first cycle, so that all that was moved is gone from the device.
    assert storage_bytes() <= before - report.bytes_moved


def test_offloading_twice_does_nothing(case: Case, backend: TrainBackend) -> None:
    assert backend.onload().bytes_moved == 0
    assert backend.offload().bytes_moved > 0
    assert backend.offload().bytes_moved == 0
    assert backend.onload().bytes_moved > 0
    assert backend.onload().bytes_moved == 0
    step(case, backend, 0, 0)


def test_an_open_step_is_not_offloaded(backend: TrainBackend) -> None:
    backend.begin_step()
    with pytest.raises(RuntimeError, match="offload: a step is open; finish_step or abort_step comes first"):
        backend.offload()
    backend.abort_step()
    backend.offload()


def test_calls_that_need_weights_are_refused(backend: TrainBackend, tmp_path: Path) -> None:
    backend.offload()
    path = str(tmp_path / "new")
    calls = {
        "begin_step": backend.begin_step,
        "finish_step": backend.finish_step,
        "logprobs": lambda: backend.logprobs([], 0),
        "weights": lambda: list(backend.weights()),
        "save": lambda: backend.save(path),
        "load": lambda: backend.load(path),
        "export_model": lambda: backend.export_model(path),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name}: the backend is offloaded; onload comes first$"):
            call()
    assert not (tmp_path / "new").exists()
    assert backend.weight_specs()["model.norm.weight"] == (torch.float32, (32,))
    backend.abort_step()


def test_checkpoints_across_a_cycle(case: Case, backend: TrainBackend, tmp_path: Path) -> None:
    step(case, backend, 0, 0)
    backend.save(str(tmp_path / "before"), wait=False)
    backend.offload()
    assert (tmp_path / "before").exists()  # a write in the background has ended
    backend.onload()
    after = step(case, backend, 0, 1)
    backend.load(str(tmp_path / "before"))
    cycle(backend, None)
    assert step(case, backend, 0, 1) == after


def test_too_little_host_memory(backend: TrainBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.trainers.backends.residence.available_memory", lambda: VOCAB)
    with pytest.raises(OSError, match=f"offload: the model needs [0-9]+ bytes of host memory, only {VOCAB} are"):
        backend.offload()
    backend.begin_step()  # it is still there


@pytest.mark.processes
@pytest.mark.megatron
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(1, ALONE[1:], id="one rank of megatron, which has groups"),
        pytest.param(2, TWO, id="two ranks"),
        pytest.param(2, MORE_OF_TWO, id="more meshes of two ranks", marks=pytest.mark.slow),
        pytest.param(4, FOUR, id="four ranks", marks=pytest.mark.slow),
    ],
)
def test_meshes(ranks: int, cases: tuple[Case, ...], folder: Path, tmp_path: Path) -> None:
    for found in run_with_groups(run_cases, ranks, tmp_path, cases, folder, single_rank_groups=True):
        for result in found:
            assert_bit_equal(result)


def checkpoint_and_close(rank: int, groups: ProcessGroups, case: Case, folder: Path) -> list[Any]:
    """Load a checkpoint after a cycle, then close a backend whose groups are destroyed."""
    found = []
    with contextlib.closing(case.build(rank, folder)) as backend:
        backend.save(f"{folder}/{case.name}", wait=False)
        found.append(step(case, backend, rank, 0))
        cycle(backend, groups)
        backend.load(f"{folder}/{case.name}")
        found.append(step(case, backend, rank, 0))
        backend.offload()
        groups.destroy(backend.group_holders())
    groups.form_again(())
    return found


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("case", [kind(case) for case in TWO])
def test_a_checkpoint_and_the_end_of_offloaded_ranks(case: Case, folder: Path, tmp_path: Path) -> None:
    for before, after in run_with_groups(checkpoint_and_close, 2, tmp_path, case, folder):
        assert after == before
