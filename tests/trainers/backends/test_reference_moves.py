"""The reference model moves towards the policy every few steps, and a resumed run goes on with it as it was."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    ReferenceTrainer,
    random_rows,
    run_on_ranks,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, logprobs, train
from headrace.tests.trainers.config.refusals import only_problem
from headrace.trainers.losses.config import LossConfig

EVERY, MIX = 2, 0.6
LOSS = LossConfig(clip_low=0.1, clip_high=0.15, kl_coef=0.05, reference_every=EVERY, reference_mix=MIX)
CHANGES: dict[str, Any] = {"loss": LOSS, "updates_per_step": 1}
# Python's filters belong to all threads: one that is set while a checkpoint is written can be lost when that has ended.
pytestmark = pytest.mark.filterwarnings(r"ignore:.torch\.distributed\.\w+. is deprecated:FutureWarning")
both = pytest.mark.parametrize("kind", ["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])


def run(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Three steps, with the reference's log-probs after each, and a resumed run's log-probs and last step."""
    with contextlib.closing(case.build(rank, folder)) as backend:
        found: dict[str, Any] = {"weights": [weights_of(backend)], "reference": [], "steps": []}
        for step in range(EVERY + 1):
            if step == EVERY:
                backend.save(f"{folder}/{case.name}-moved", wait=False)
            found["steps"].append(train(backend, case.topology, rank, random_rows(step, NUM_ROWS)))
            found["reference"].append(logprobs(backend, case.topology, rank, reference=True))
            found["weights"].append(weights_of(backend))
        backend.wait_saved()
    with contextlib.closing(case.build(rank, folder)) as backend:
        backend.load(f"{folder}/{case.name}-moved")
        found["resumed"] = logprobs(backend, case.topology, rank, reference=True)
        found["again"] = train(backend, case.topology, rank, random_rows(EVERY, NUM_ROWS))
    return found


def run_cases(rank: int, world: int, chosen: tuple[Case, ...], folder: str) -> list[dict[str, Any]]:
    return [run(rank, case, folder) for case in chosen]


def by_hand(folder: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The log-probs of the rows of `logprobs` under a model with these weights."""
    trainer = ReferenceTrainer(folder)
    trainer.model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        rows = random_rows(50, NUM_ROWS)
        return torch.cat([trainer.row_logprobs(row, TEMPERATURE) * torch.from_numpy(row.mask) for row in rows])


def assert_moves(found: dict[str, Any], folder: Path, model: str) -> None:
    """Check the references of a run on the rank that writes columns, which has whole weights, too."""
    start, *_, second, _ = found["weights"]
    mixed = {name: (1 - MIX) * value + MIX * second[name] for name, value in start.items()}
    wanted = [by_hand(str(folder / model), weights) for weights in (start, mixed, mixed)]
    assert (wanted[0] - wanted[1]).abs().max() > 1e-3
    for got, value in zip([*found["reference"], found["resumed"]], [*wanted, wanted[1]], strict=True):
        torch.testing.assert_close(torch.cat(got), value, rtol=0, atol=2e-5)
    assert found["again"] == found["steps"][-1]


@both
@pytest.mark.parametrize("model", ["untied", "moe"])
def test_the_reference_moves_every_second_step(kind: str, folder: Path, model: str) -> None:
    assert_moves(run(0, Case(f"{kind} {model}", CHANGES), str(folder)), folder, model)


@pytest.mark.slow
@pytest.mark.processes
@both
def test_the_reference_moves_on_two_ranks(kind: str, folder: Path, tmp_path: Path) -> None:
    cases = tuple(Case(f"{kind} untied {mesh}", CHANGES) for mesh in ("dp2", "tp2" if kind == "fsdp" else "tp2 sp"))
    first, _ = run_on_ranks(run_cases, 2, tmp_path, cases, str(folder))
    for found in first:
        assert_moves(found, folder, "untied")


@both
def test_a_skipped_step_moves_nothing(kind: str, folder: Path) -> None:
    loss = LOSS.model_copy(update={"reference_every": 1, "reference_mix": 1.0})
    case = Case(f"{kind} untied", {**CHANGES, "loss": loss, "updates_per_step": 2})
    with contextlib.closing(case.build(0, folder)) as backend:
        before = logprobs(backend, case.topology, 0, reference=True)
        failed = [row for row in random_rows(0, NUM_ROWS) if not row.mask.any()]
        for rows in (random_rows(0, NUM_ROWS), failed):  # a step has two updates
            train(backend, case.topology, 0, rows)
            assert torch.equal(torch.cat(logprobs(backend, case.topology, 0, reference=True)), torch.cat(before))
        train(backend, case.topology, 0, random_rows(1, NUM_ROWS))
        policy, reference = (logprobs(backend, case.topology, 0, reference=which) for which in (False, True))
        torch.testing.assert_close(torch.cat(reference), torch.cat(policy), rtol=0, atol=1e-6)


@both
def test_a_checkpoint_without_a_reference_leaves_the_initial_one(kind: str, folder: Path) -> None:
    fixed = Case(f"{kind} untied", {**CHANGES, "loss": LOSS.model_copy(update={"reference_every": 0})})
    with contextlib.closing(fixed.build(0, folder)) as backend:
        before = logprobs(backend, fixed.topology, 0, reference=True)
        train(backend, fixed.topology, 0, random_rows(0, NUM_ROWS))
        backend.save(f"{folder}/{kind}-fixed")
    names = FileSystemReader(f"{folder}/{kind}-fixed").read_metadata().state_dict_metadata
    assert not [name for name in names if name.startswith("reference.")]
    moving = Case(f"{kind} untied", CHANGES)
    with contextlib.closing(moving.build(0, folder)) as backend:
        backend.load(f"{folder}/{kind}-fixed")
        assert torch.equal(torch.cat(logprobs(backend, moving.topology, 0, reference=True)), torch.cat(before))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"loss": {"reference_every": 10}}, "loss.reference_every: got 10 with loss.kl_coef=0, expected 0, because it"),
        ({"loss": {"kl_coef": 0.1, "reference_mix": 0.5}}, "loss.reference_mix: got 0.5 with loss.reference_every=0"),
        ({"loss": {"kl_coef": 0.1, "reference_every": 5}, "trainer": {"lora": {"rank": 4}}},
         "loss.reference_every: got 5 with trainer.lora.rank=4, expected 0, because the reference model is the adap"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(data: dict[str, Any], sentence: str) -> None:
    assert only_problem(data).startswith(sentence)
