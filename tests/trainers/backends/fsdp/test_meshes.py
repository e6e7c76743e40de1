"""Tests the fsdp backend on two and four ranks: steps as by hand, checkpoints, errors, and weights that are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GPT2Config

from headrace.actors.train_backend import MicroBatch
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    VOCAB,
    assert_same_step,
    backend_config,
    micro_batch,
    random_rows,
    run_on_ranks,
    run_step,
    weights_of,
)
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
    train,
)
from headrace.trainers.backends.checkpoint_files import on_first_rank
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.model_split import check_split
from headrace.trainers.backends.train_step import TrainStep
from headrace.trainers.backends.vocab import logprobs
from headrace.trainers.losses.config import LossConfig
from headrace.trainers.losses.terms import LossInputs, PolicyLoss, TermSums

pytestmark = pytest.mark.processes

CASES = cases(
    "fsdp", tied="dp2, dp2 kept, tp2, tp2 packed recompute offload, tp2 full-head", untied="dp2", biased="tp2",
    moe="tp2, dp2 recompute, dp2 recompute kept",
)  # fmt: skip
FOUR = cases("fsdp", tied="dp2 tp2, dp2 tp2 packed recompute offload")
RESUMED = cases("fsdp", tied="dp2, tp2")
SAVED_BY = {"tied": ("fsdp tied dp2", "fsdp tied tp2", "one")}
SAVED_BY_FOUR = {"tied": ("fsdp tied dp2", "fsdp tied dp2 tp2")}
BONUS = LossConfig(clip_low=0.1, clip_high=0.15, entropy_coef=0.3)


class GroupCount:
    """A loss over groups, to count them with."""

    name, denominator, metrics = "group_count", "groups", ()

    def __call__(self, inputs: LossInputs) -> TermSums:
        return TermSums(inputs.logprobs.sum(), {})


def count_groups(rank: int) -> float:
    """Give rank 0 the groups 1 and 2 and rank 1 the groups 2, 3 and 4, of which 4 has failed."""
    step = TrainStep(PolicyLoss([(1.0, GroupCount())]), torch.device("cpu"), dist.group.WORLD)  # type: ignore[list-item]
    step.begin(1.0)
    tokens, groups = ([1, 1], [1, 2]) if rank == 0 else ([1, 1, 0], [2, 3, 4])
    ones = torch.ones(2)
    inputs = LossInputs(ones, ones, ones, None, ones, torch.tensor([0, 1]), torch.tensor(tokens))
    with step.accumulating():
        step.add(inputs, np.array(tokens), np.array(groups), None)
    return step.finish(torch.zeros((), dtype=torch.float64)).denominator


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fail(*_: Any, **__: Any) -> None:
    raise OSError("gone")


def sharded_while(backend: FsdpBackend, rank: int, what: str, fails: str = "") -> list[bool]:
    """Pass three microbatches to `what`, accumulate or logprobs. Returns whether this rank held its own shards alone,
    before each of them and at the end; False if it held all weights whole. fails: what fails at the third, `rows` or
    `layer`."""
    seen, layer = list[bool](), backend._policy.model.model.layers[1].mlp

    def note() -> None:
        [kind] = {isinstance(param, DTensor) for param in backend._policy.parameters()}
        seen.append(kind)

    def micros() -> Iterator[MicroBatch]:
        for number in range(3):
            note()
            if fails == "rows" and number == 2:
                fail()
            if fails == "layer" and number == 2:
                layer.forward = fail
            yield micro_batch(random_rows(number, 4 * rank))

    backend.begin_step(TEMPERATURE)
    with contextlib.suppress(OSError):
        getattr(backend, what)(micros(), 3)
    layer.__dict__.pop("forward", None)
    backend.abort_step()
    note()
    return seen


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Run everything that needs two ranks in one start of two processes."""
    result: dict[str, Any] = {"cases": run_cases(rank, world, CASES, folder), "groups": count_groups(rank)}
    result["interrupted"] = [interrupted(rank, case, folder) for case in RESUMED]
    result["resumed"] = resumed(rank, folder, RESUMED, SAVED_BY)

    backend, rows = RESUMED[0].build(rank, folder), random_rows(20, NUM_ROWS)
    result["save elsewhere"] = error_of(lambda: backend.save(f"{folder}/tied"))
    result["first rank"] = error_of(lambda: on_first_rank(lambda: open("/nonexistent/x").close(), rank, world))
    result["first rank, any error"] = error_of(lambda: on_first_rank(lambda: dict[str, None]()["no key"], rank, world))
    keeping = Case("fsdp tied dp2 kept").build(rank, folder)
    ways = (("accumulate", "rows"), ("accumulate", "layer"), ("accumulate", ""), ("logprobs", ""))
    result["kept"] = [sharded_while(keeping, rank, *way) for way in ways]
    for case in RESUMED:
        exporting = case.build(rank, folder)
        train(exporting, case.topology, rank, rows)
        exporting.export_model(f"{folder}/exported/{case.name}")
        result[case.name] = weights_of(exporting)

    whole, logprobs.LOGIT_ELEMENTS = logprobs.LOGIT_ELEMENTS, 4 * VOCAB
    bonus = Case("fsdp tied tp2", {"loss": BONUS}).build(rank, folder)
    result["bonus"] = [run_step(bonus, [rows]) for _ in range(2)]
    logprobs.LOGIT_ELEMENTS = whole
    result["half"] = run_step(Case("fsdp tied tp2 half", {"entropy_metric": True}).build(rank, folder), [rows])
    return result


def one_rank(folder: Path, model: str = "tied", **changes: Any) -> FsdpBackend:
    return FsdpBackend(backend_config(str(folder / model), **changes), 0, 1)


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks has, after one rank has saved two steps as `one`."""
    backend = one_rank(folder)
    for step in (0, 1):
        run_step(backend, [random_rows(step, NUM_ROWS)])
    backend.save(str(folder / "one"))
    return run_on_ranks(on_two_ranks, 2, folder / "run", str(folder))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Any]]:
    return {model: run_reference(str(folder / model)) for model in {case.model for case in CASES}}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_three_steps_equal_a_plain_torch_trainer(
    case: Case, two: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> None:
    assert_as_reference(case, [rank["cases"][case.name] for rank in two], expected[case.model])


def test_kept_weights_are_gathered_once_and_cut_up_at_the_end_or_an_error(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["kept"] == [[True, False, False, True]] * 4


def test_all_ranks_skip_together(two: list[dict[str, Any]], expected: dict[str, dict[str, Any]]) -> None:
    for found in (found for rank in two for found in rank["interrupted"]):
        assert_interrupted(found, expected["tied"]["steps"][0])


def test_groups_are_counted_once(two: list[dict[str, Any]]) -> None:
    assert [result["groups"] for result in two] == [3.0, 3.0]


def test_a_checkpoint_goes_on_at_another_mesh(
    folder: Path, two: list[dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> None:
    third = two[0]["resumed"]["fsdp tied dp2"]["third"]
    assert (third["train/loss"], third["train/grad_norm"]) == pytest.approx(expected["tied"]["steps"][2], rel=1e-5)
    for rank in two:
        for saved_by in SAVED_BY["tied"]:
            for step in rank["resumed"][saved_by].values():
                assert_same_step(step, third)
    for saved_by in SAVED_BY["tied"]:
        loaded = one_rank(folder)
        loaded.load(str(folder / saved_by))
        assert_same_step(run_step(loaded, [random_rows(2, NUM_ROWS)]), third)


def test_an_exported_folder_has_the_weights(folder: Path, two: list[dict[str, Any]]) -> None:
    for case in RESUMED:
        exported = weights_of(one_rank(folder, f"exported/{case.name}"))
        assert exported.keys() == two[0][case.name].keys()
        assert all(torch.equal(value, two[0][case.name][name]) for name, value in exported.items())


def test_an_error_on_the_first_rank_is_everyones(folder: Path, two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["save elsewhere"].startswith("ValueError: ")
        assert f"{folder}/tied: exists already" in result["save elsewhere"]
        assert "No such file or directory: '/nonexistent/x'" in result["first rank"]
    assert two[0]["first rank"].startswith("FileNotFoundError")
    assert two[1]["first rank"].startswith("OSError: rank 0: ")
    assert two[0]["first rank, any error"] == "KeyError: 'no key'"
    assert two[1]["first rank, any error"] == "RuntimeError: rank 0: KeyError: 'no key'"


def test_entropy_of_a_split_vocabulary_has_the_gradient_of_a_whole_one(folder: Path, two: list[dict[str, Any]]) -> None:
    backend, rows = one_rank(folder, loss=BONUS), random_rows(20, NUM_ROWS)
    without = run_step(one_rank(folder, loss=LossConfig(clip_low=0.1, clip_high=0.15)), [rows])
    for step in range(2):
        wanted = run_step(backend, [rows])
        assert 0 < wanted["train/entropy"] < np.log(VOCAB)
        assert_same_step(two[0]["bonus"][step], wanted)
        assert abs(wanted["train/grad_norm"] - without["train/grad_norm"]) > 1e-3, "the bonus has a gradient"


def test_bfloat16_follows_float32(folder: Path, two: list[dict[str, Any]]) -> None:
    wanted = run_step(one_rank(folder, entropy_metric=True), [random_rows(20, NUM_ROWS)])
    for name in ("train/loss", "train/entropy"):
        assert two[0]["half"][name] == pytest.approx(wanted[name], rel=0.02, abs=5e-3)
    assert two[0]["half"]["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=0.05)


def on_four_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {"cases": run_cases(rank, world, FOUR, folder), "resumed": resumed(rank, folder, FOUR, SAVED_BY_FOUR)}


@pytest.mark.slow
def test_two_replicas_of_two_ranks(folder: Path, two: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    results = run_on_ranks(on_four_ranks, 4, folder / "run4", str(folder))
    for case in FOUR:
        assert_as_reference(case, [rank["cases"][case.name] for rank in results], expected["tied"])
    for steps in results[0]["resumed"].values():
        for step in steps.values():
            assert_same_step(step, two[0]["resumed"]["fsdp tied dp2"]["third"])


def test_what_cannot_be_split_is_told(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder / "moe")
    with pytest.raises(ValueError, match="trainer.tp: got 4, expected a divisor of the model's num_key_value_heads"):
        check_split(TrainerConfig(tp=4), config)
    config.num_key_value_heads, config.num_experts = 4, 6
    with pytest.raises(ValueError, match="trainer.tp: got 4, expected a divisor of the model's num_experts = 6"):
        check_split(TrainerConfig(tp=4), config)
    config.num_experts, config.vocab_size = 8, 5
    with pytest.raises(ValueError, match="trainer.tp: got 4, expected fewer ranks, .* of the model's vocab_size = 5"):
        check_split(TrainerConfig(tp=4), config)
    with pytest.raises(ValueError, match="trainer.tp: got 2, expected 1 for a model of type 'gpt2', because transform"):
        check_split(TrainerConfig(tp=2), GPT2Config())
