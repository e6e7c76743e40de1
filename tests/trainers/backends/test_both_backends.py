"""Tests what both train backends promise of steps that must not be applied, of calls out of order and of exports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    ReferenceTrainer,
    micro_batch,
    poisoned_row,
    random_rows,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import Case
from headrace.trainers.losses.config import LossConfig


@pytest.fixture(params=["fsdp", pytest.param("megatron", marks=pytest.mark.megatron)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(kind: str, folder: Path) -> Iterator[Any]:
    with contextlib.closing(Case(f"{kind} tied").build(0, folder)) as backend:
        yield backend


@pytest.fixture
def untouched(kind: str, folder: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and weights of the step of `random_rows(6, 6)` that is a backend's first one."""
    with contextlib.closing(Case(f"{kind} tied").build(0, folder)) as backend:
        return run_step(backend, [random_rows(6, 6)]), weights_of(backend)


def assert_untouched(backend: Any, untouched: tuple[dict[str, float], dict[str, torch.Tensor]]) -> None:
    assert run_step(backend, [random_rows(6, 6)]) == untouched[0]
    assert all(torch.equal(value, untouched[1][name]) for name, value in weights_of(backend).items())


def test_nothing_to_train_on_skips(backend: Any) -> None:
    before = weights_of(backend)
    failed = [row for row in random_rows(0, 10) if not row.mask.any()]
    assert len(failed) == 2
    for chunks in ([], [[]], [failed], [[], failed], [failed, []]):
        metrics = run_step(backend, chunks)
        assert metrics["train/skipped"] == 1 and metrics["train/tokens"] == 0 and metrics["train/loss"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
    assert run_step(backend, [random_rows(0, 4)])["train/lr"] == 1e-3, "skipped steps do not move the schedule"


def test_a_gradient_that_is_not_finite_skips_and_the_next_step_is_clean(untouched: Any, backend: Any) -> None:
    before = weights_of(backend)
    metrics = run_step(backend, [[poisoned_row()], random_rows(1, 8)])
    assert metrics["train/skipped"] == 1 and np.isnan(metrics["train/grad_norm"])
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
    assert_untouched(backend, untouched)


def test_abort_leaves_no_trace(untouched: Any, backend: Any) -> None:
    backend.abort_step()
    backend.begin_step()
    backend.accumulate([micro_batch(random_rows(5, 6))], 1)
    backend.abort_step()
    backend.abort_step()
    assert_untouched(backend, untouched)


def test_calls_out_of_order_and_missing_columns(backend: Any) -> None:
    rows = random_rows(0, 4)
    with pytest.raises(RuntimeError, match="accumulate: no step is open"):
        backend.accumulate([micro_batch(rows)], 1)
    with pytest.raises(RuntimeError, match="finish_step: no step is open"):
        backend.finish_step()
    for columns, message in (
        (("rollout_logprobs",), "has no 'prev_logprobs', which prev = 'recompute' needs"),
        (("rollout_logprobs", "prev_logprobs"), "has no 'ref_logprobs', which loss.kl_coef needs"),
    ):
        backend.begin_step()
        with pytest.raises(RuntimeError, match="begin_step: a step is open"):
            backend.begin_step()
        with pytest.raises(RuntimeError, match="save: a step is open"):
            backend.save("nowhere")
        with pytest.raises(ValueError, match=message):
            backend.accumulate([micro_batch(rows, columns)], 1)
        with pytest.raises(RuntimeError, match="a microbatch of the open step failed"):
            backend.finish_step()
        backend.abort_step()


def test_fewer_microbatches_than_counted_are_refused(untouched: Any, backend: Any) -> None:
    micros = [micro_batch(random_rows(0, 4))]
    with pytest.raises(ValueError, match="got 1, fewer than `count`=2"):
        backend.logprobs(micros, 2)
    backend.begin_step()
    with pytest.raises(ValueError, match="got 1, fewer than `count`=2"):
        backend.accumulate(micros, 2)
    backend.abort_step()
    assert_untouched(backend, untouched)


def test_log_probs_while_a_step_is_open_change_nothing(folder: Path, backend: Any) -> None:
    rows = random_rows(1, 10)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro_batch(rows[:5])], 1)
    backend.logprobs([micro_batch(rows)], 1, reference=True)
    backend.accumulate([micro_batch(rows[5:])], 1)
    expected = ReferenceTrainer(str(folder / "tied")).step(rows)
    assert backend.finish_step()["train/grad_norm"] == pytest.approx(expected[1], rel=1e-5)


def test_no_reference_is_said(kind: str, folder: Path) -> None:
    case = Case(f"{kind} tied", {"with_reference": False, "loss": LossConfig(clip_high=0.2)})
    with (
        contextlib.closing(case.build(0, folder)) as backend,
        pytest.raises(ValueError, match="with_reference: got False"),
    ):
        backend.logprobs([micro_batch(random_rows(2, 6))], 1, reference=True)


@pytest.mark.parametrize("model", ["tied", "moe"])
def test_an_exported_folder_is_the_model(kind: str, folder: Path, tmp_path: Path, model: str) -> None:
    with contextlib.closing(Case(f"{kind} {model}").build(0, folder)) as backend:
        run_step(backend, [random_rows(0, 10)])
        backend.export_model(str(tmp_path / "out"))
        weights = weights_of(backend)
        with pytest.raises(ValueError, match="out: exists already"):
            backend.export_model(str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert list(dict(loaded.named_parameters())) == list(weights)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights.items())
    tied = model == "tied"
    assert torch.equal(loaded.state_dict()["lm_head.weight"], weights["model.embed_tokens.weight"]) == tied
    with contextlib.closing(Case(f"{kind} out").build(0, tmp_path)) as again:
        run_step(again, [random_rows(1, 8)])


def test_half_precision_is_close(kind: str, folder: Path) -> None:
    reference = ReferenceTrainer(str(folder / "tied"))
    with contextlib.closing(Case(f"{kind} tied half").build(0, folder)) as backend:
        for step in range(3):
            rows = random_rows(step, 10)
            metrics, (loss, norm) = run_step(backend, [rows[:5], rows[5:]]), reference.step(rows)
            assert metrics["train/loss"] == pytest.approx(loss, rel=1e-2, abs=5e-3)
            assert metrics["train/loss"] != loss
            assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-2)
        assert {value.dtype for value in weights_of(backend).values()} == {torch.bfloat16}
