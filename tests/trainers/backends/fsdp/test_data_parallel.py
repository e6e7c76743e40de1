"""Tests that gradients, steps and checkpoints of the fsdp backend on two data-parallel ranks are those of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.actors.protocols import MicroBatch
from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    VOCAB,
    ReferenceTrainer,
    Row,
    assert_same_step,
    backend_config,
    flat_gradients,
    logprobs_of,
    micro_batch,
    poisoned_row,
    random_rows,
    run_on_ranks,
    run_step,
    summed_gradients,
    weights_of,
)
from headrace.trainers.backends.checkpoint_files import on_first_rank
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.train_step import TrainStep
from headrace.trainers.backends.vocab import logprobs as vocab_logprobs
from headrace.trainers.losses.terms import LossInputs, PolicyLoss, TermSums

pytestmark = pytest.mark.processes

STEPS = 3


def chunks_of(rows: Sequence[Row], seed: int, rank: int) -> list[list[Row]]:
    """Return the rank's share of a random split of `rows` over two ranks and three microbatches, some of them empty."""
    rng = np.random.default_rng(seed)
    place = rng.permutation(np.repeat([0, 1, 2, 4, 5], len(rows) // 5))  # no row goes to microbatch 3: rank 1's first
    return [[row for row, at in zip(rows, place, strict=True) if at == rank * 3 + micro] for micro in range(3)]


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


def sharded(backend: FsdpBackend) -> bool:
    """Return whether this rank holds its own shards of all weights; False if it holds all weights whole. Fails if it
    holds some of both."""
    kinds = {isinstance(param, DTensor) for param in backend._policy.parameters()}
    assert len(kinds) == 1
    return kinds.pop()


def fail(*_: Any, **__: Any) -> None:
    raise OSError("gone")


def step_that_keeps_weights(backend: FsdpBackend, rank: int, *, fails: str = "") -> dict[str, Any]:
    """Run a step of three microbatches at once, and note whether this rank holds its own shards alone. It is noted
    before each microbatch and at the end. fails: what fails at the third, `rows` or `layer`."""
    seen = list[bool]()
    layer = backend._policy.model.model.layers[1].mlp

    def micros() -> Iterator[MicroBatch]:
        for number, chunk in enumerate(chunks_of(random_rows(0, 10), 0, rank)):
            seen.append(sharded(backend))
            if fails == "rows" and number == 2:
                fail()
            if fails == "layer" and number == 2:
                layer.forward = fail
            yield micro_batch(chunk)

    backend.begin_step(TEMPERATURE)
    try:
        backend.accumulate(micros(), 3)
    except OSError:
        layer.__dict__.pop("forward", None)
        backend.abort_step()
        return {"sharded": [*seen, sharded(backend)]}
    seen.append(sharded(backend))
    flat = torch.cat([grad.flatten() for grad in summed_gradients(backend).values()])
    return {"sharded": seen, "gradients": flat, "step": backend.finish_step()}


def logprobs_that_keep_weights(backend: FsdpBackend, batch: MicroBatch) -> tuple[torch.Tensor, list[bool]]:
    """Return the log-probs of the second of two equal microbatches, and what this rank held. It is noted before each of
    them, and at the end, whether it held its own shards alone."""
    seen = list[bool]()

    def micros() -> Iterator[MicroBatch]:
        for _ in range(2):
            seen.append(sharded(backend))
            yield batch

    values = backend.logprobs(micros(), 2)[1]
    return values, [*seen, sharded(backend)]


def on_two_ranks(rank: int, world: int, model: str, folder: str) -> dict[str, Any]:
    """Run everything that needs two ranks in one start of two processes."""
    backend = FsdpBackend(backend_config(model, topology=Topology(world)), rank, world)
    rows = random_rows(20, 10)
    result: dict[str, Any] = {"groups": count_groups(rank)}
    result["gradients"] = [flat_gradients(backend, chunks_of(rows, seed, rank)) for seed in range(4)]
    batch = micro_batch(rows[rank * 5 : rank * 5 + 5])
    result["logprobs"] = logprobs_of(backend, batch)

    whole, vocab_logprobs.LOGIT_ELEMENTS = vocab_logprobs.LOGIT_ELEMENTS, 4 * VOCAB
    result["chunked"] = flat_gradients(backend, chunks_of(rows, 0, rank))
    vocab_logprobs.LOGIT_ELEMENTS = whole

    nothing = [[] if rank else [row for row in rows if not row.mask.any()]]
    result["nothing"] = run_step(backend, nothing)
    result["poisoned"] = run_step(backend, [[poisoned_row()] if rank else rows])
    result["steps"] = [run_step(backend, chunks_of(random_rows(step, 10), step, rank)) for step in range(STEPS)]
    result["reference"] = logprobs_of(backend, batch, reference=True)
    result["weights"] = weights_of(backend)

    result["save"] = error_of(lambda: backend.save(f"{folder}/two"))
    result["save elsewhere"] = error_of(lambda: backend.save(model))
    result["first rank"] = error_of(lambda: on_first_rank(lambda: open("/nonexistent/x").close(), rank, world))
    result["first rank, any error"] = error_of(lambda: on_first_rank(lambda: dict[str, None]()["no key"], rank, world))
    result["next"] = run_step(backend, chunks_of(random_rows(9, 10), 9, rank))
    result["export"] = error_of(lambda: backend.export_model(f"{folder}/exported"))
    backend.load(f"{folder}/one")
    result["next of one"] = run_step(backend, chunks_of(random_rows(9, 10), 9, rank))

    keeping = FsdpBackend(backend_config(model, reshard_after_forward=False, topology=Topology(world)), rank, world)
    result["kept, failed"] = [step_that_keeps_weights(keeping, rank, fails=what) for what in ("rows", "layer")]
    result["kept, logprobs"] = logprobs_that_keep_weights(keeping, batch)
    result["kept"] = step_that_keeps_weights(keeping, rank)
    result["kept, reference"] = logprobs_of(keeping, batch, reference=True)
    result["kept, steps"] = [run_step(keeping, chunks_of(random_rows(step, 10), step, rank)) for step in (1, 2)]
    result["kept, weights"] = weights_of(keeping)

    untied = FsdpBackend(
        backend_config(f"{folder}/untied", mixed_precision=True, topology=Topology(world)), rank, world
    )
    result["half"] = run_step(untied, chunks_of(rows, 1, rank))
    result["untied"] = weights_of(untied)
    return result


@pytest.fixture(scope="module")
def one(model: str, folder: Path) -> FsdpBackend:
    """Run the same steps on one rank, saved as `one`."""
    backend = FsdpBackend(backend_config(model), 0, 1)
    for step in range(STEPS):
        run_step(backend, [random_rows(step, 10)])
    backend.save(str(folder / "one"))
    return backend


@pytest.fixture(scope="module")
def two(model: str, folder: Path, one: FsdpBackend) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, folder / "run", model, str(folder))


def test_gradients_are_those_of_one_rank_however_rows_are_spread(model: str, two: list[dict[str, Any]]) -> None:
    whole = flat_gradients(FsdpBackend(backend_config(model), 0, 1), [random_rows(20, 10)])
    for result in two:
        for spread in (*result["gradients"], result["chunked"]):
            assert torch.linalg.norm(spread - whole) <= 1e-6 * torch.linalg.norm(whole)


def test_three_steps_equal_a_plain_torch_trainer(model: str, two: list[dict[str, Any]]) -> None:
    plain = ReferenceTrainer(model)
    for step in range(STEPS):
        loss, norm = plain.step(random_rows(step, 10))
        for result in two:
            assert result["steps"][step]["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
            assert result["steps"][step]["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert two[0]["steps"] == two[1]["steps"], "metrics are global"
    for name, value in two[0]["weights"].items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=0, atol=2e-6)
    assert not two[1]["weights"], "only rank 0 keeps what is gathered"


def test_weights_that_are_kept_change_nothing_but_how_often_they_are_gathered(
    model: str, two: list[dict[str, Any]]
) -> None:
    whole = flat_gradients(FsdpBackend(backend_config(model), 0, 1), [random_rows(0, 10)])
    for result in two:
        for failed in result["kept, failed"]:
            assert failed["sharded"] == [True, False, False, True]
        assert result["kept"]["sharded"] == [True, False, False, True]
        assert torch.linalg.norm(result["kept"]["gradients"] - whole) <= 1e-6 * torch.linalg.norm(whole)
        values, alone = result["kept, logprobs"]
        assert alone == [True, False, True] and torch.equal(values, result["logprobs"])
        assert torch.equal(result["kept, reference"], result["reference"])
        for own, usual in zip((result["kept"]["step"], *result["kept, steps"]), result["steps"], strict=True):
            assert_same_step({name: own[name] for name in usual}, usual)
    for name, value in two[0]["kept, weights"].items():
        torch.testing.assert_close(value, two[0]["weights"][name], rtol=0, atol=2e-6)


def test_all_ranks_skip_together(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["nothing"]["train/skipped"] == result["poisoned"]["train/skipped"] == 1
        assert result["nothing"]["train/tokens"] == 0
        assert np.isnan(result["poisoned"]["train/grad_norm"])
        assert result["steps"][0]["train/lr"] == 1e-3, "skipped steps do not move the schedule"


def test_groups_are_counted_once(two: list[dict[str, Any]]) -> None:
    assert [result["groups"] for result in two] == [3.0, 3.0]


def test_logprobs_and_reference(model: str, two: list[dict[str, Any]]) -> None:
    backend = FsdpBackend(backend_config(model), 0, 1)
    rows = random_rows(20, 10)
    for rank, result in enumerate(two):
        expected = logprobs_of(backend, micro_batch(rows[rank * 5 : rank * 5 + 5]))
        torch.testing.assert_close(result["logprobs"], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(result["reference"], result["logprobs"])


def test_saved_at_two_goes_on_at_one_and_back(
    model: str, folder: Path, one: FsdpBackend, two: list[dict[str, Any]]
) -> None:
    rows = random_rows(9, 10)
    loaded = FsdpBackend(backend_config(model), 0, 1)
    loaded.load(str(folder / "two"))
    assert [result["save"] for result in two] == ["no error", "no error"]
    assert_same_step(run_step(loaded, [rows]), two[0]["next"])
    assert_same_step(two[0]["next of one"], run_step(one, [rows]))


def test_an_error_on_the_first_rank_is_everyones(folder: Path, two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["save elsewhere"].startswith("ValueError: ")
        assert f"{folder}/tied: exists already" in result["save elsewhere"]
        assert "No such file or directory: '/nonexistent/x'" in result["first rank"]
    assert two[0]["first rank"].startswith("FileNotFoundError")
    assert two[1]["first rank"].startswith("OSError: rank 0: ")
    assert two[0]["first rank, any error"] == "KeyError: 'no key'"
    assert two[1]["first rank, any error"] == "RuntimeError: rank 0: KeyError: 'no key'"


def test_bfloat16_and_untied_weights(folder: Path, two: list[dict[str, Any]]) -> None:
    full = FsdpBackend(backend_config(str(folder / "untied")), 0, 1)
    expected = run_step(full, [random_rows(20, 10)])
    assert two[0]["half"]["train/loss"] == pytest.approx(expected["train/loss"], rel=0.02, abs=5e-3)
    assert two[0]["half"]["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)
    untied, tied = two[0]["untied"], two[0]["weights"]
    assert list(untied) == list(full.weight_specs()) == [*tied, "lm_head.weight"]
    assert {value.dtype for value in untied.values()} == {torch.bfloat16}
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])


def test_a_folder_exported_by_two_ranks_loads(folder: Path, two: list[dict[str, Any]]) -> None:
    assert [result["export"] for result in two] == ["no error", "no error"]
    exported = weights_of(FsdpBackend(backend_config(str(folder / "exported")), 0, 1))
    loaded = FsdpBackend(backend_config(str(folder / "tied")), 0, 1)
    loaded.load(str(folder / "two"))
    run_step(loaded, [random_rows(9, 10)])
    for name, value in weights_of(loaded).items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=2e-6)
