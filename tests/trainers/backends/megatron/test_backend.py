"""Tests the megatron backend on one rank: steps as computed by hand, errors, and that no partial step is applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    COLUMNS,
    TINY,
    Row,
    backend_config,
    micro_batch,
    random_rows,
    run_step,
    save_tiny_llama,
    save_tiny_model,
    save_tiny_moe,
    weights_of,
)
from headrace.tests.trainers.backends.backend_reference import TEMPERATURE, ReferenceTrainer
from headrace.tests.trainers.backends.megatron.mesh_ranks import (
    Case,
    assert_as_reference,
    run_case,
    run_reference,
)
from headrace.trainers.backends.factory import build_backend

if TYPE_CHECKING:
    from headrace.trainers.backends.megatron.backend import MegatronBackend

pytestmark = pytest.mark.megatron

ZEROS = {name: np.zeros(2, np.float32) for name in COLUMNS}
POISONED = Row(np.array([3, 4], np.int32), np.array([0, 1], np.uint8), ZEROS, float("nan"), 0)
ONE = Topology(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("megatron")
    save_tiny_model(folder / "tied")
    save_tiny_model(folder / "untied", tied=False)
    save_tiny_moe(folder / "experts")
    return folder


def build(folder: Path, model: str = "tied", **changes: Any) -> MegatronBackend:
    return Case("one", model, ONE, changes).build(0, str(folder))


@pytest.fixture
def backend(folder: Path) -> Iterator[MegatronBackend]:
    built = build(folder)
    yield built
    built.close()


@pytest.mark.parametrize(
    "case",
    [
        Case("packed", "tied", ONE),
        Case("unpacked", "tied", ONE, {"packing": "none"}),
        Case("recompute", "untied", ONE, {"recompute": "full", "distributed_optimizer": False}),
        Case("experts", "experts", ONE, {"packing": "dynamic"}),
        Case("selective", "experts", ONE, {"recompute": "selective"}),
    ],
    ids=lambda case: case.name,
)
def test_as_by_hand(folder: Path, case: Case) -> None:
    result = run_case(0, case, str(folder))
    assert_as_reference(case, [result], run_reference(str(folder / case.model)))


def test_half_precision_is_close(folder: Path) -> None:
    backend = build(folder, mixed_precision=True)
    reference = ReferenceTrainer(str(folder / "tied"))
    for step in range(3):
        rows = random_rows(step, 10)
        metrics = run_step(backend, [rows[:5], rows[5:]])
        assert (metrics["train/loss"], metrics["train/grad_norm"]) == pytest.approx(
            reference.step(rows), rel=1e-2, abs=1e-2
        )
    assert {value.dtype for value in weights_of(backend).values()} == {torch.bfloat16}
    backend.close()


def test_nothing_to_train_on_skips_the_step(backend: MegatronBackend) -> None:
    before = weights_of(backend)
    failed = [row for row in random_rows(0, 10) if not row.mask.any()]
    metrics = run_step(backend, [failed, []])
    assert metrics["train/skipped"] == 1 and metrics["train/tokens"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(backend).items())
    assert run_step(backend, [random_rows(1, 10)])["train/lr"] == pytest.approx(1e-3), "the schedule has not moved"


def test_a_gradient_that_is_not_finite_is_not_applied(folder: Path, backend: MegatronBackend) -> None:
    assert run_step(backend, [random_rows(0, 10), [POISONED]])["train/skipped"] == 1
    metrics = run_step(backend, [random_rows(1, 10)])
    expected = ReferenceTrainer(str(folder / "tied")).step(random_rows(1, 10))
    assert (metrics["train/loss"], metrics["train/grad_norm"]) == pytest.approx(expected, rel=1e-5)


def test_an_aborted_step_leaves_nothing(folder: Path, backend: MegatronBackend) -> None:
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro_batch(random_rows(7, 4))], 1)
    backend.abort_step()
    backend.abort_step()
    metrics = run_step(backend, [random_rows(1, 10)])
    expected = ReferenceTrainer(str(folder / "tied")).step(random_rows(1, 10))
    assert (metrics["train/loss"], metrics["train/grad_norm"]) == pytest.approx(expected, rel=1e-5)


def test_a_failed_microbatch_breaks_the_step(backend: MegatronBackend) -> None:
    backend.begin_step()
    with pytest.raises(ValueError, match="has no 'ref_logprobs', which loss.kl_coef needs"):
        backend.accumulate([micro_batch(random_rows(0, 4), ("rollout_logprobs", "prev_logprobs"))], 1)
    with pytest.raises(RuntimeError, match="a microbatch of the open step failed"):
        backend.finish_step()
    backend.abort_step()
    with pytest.raises(ValueError, match="fewer than `count`"):
        backend.logprobs([micro_batch(random_rows(0, 4))], 2)


def test_calls_out_of_order_are_refused(backend: MegatronBackend, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="accumulate: no step is open"):
        backend.accumulate([micro_batch(random_rows(0, 4))], 1)
    backend.begin_step()
    with pytest.raises(RuntimeError, match="save: a step is open"):
        backend.save(str(tmp_path / "checkpoint"))


def test_log_probs_while_a_step_is_open_change_nothing(folder: Path, backend: MegatronBackend) -> None:
    rows = random_rows(1, 10)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([micro_batch(rows[:5])], 1)
    backend.logprobs([micro_batch(rows)], 1, reference=True)
    backend.accumulate([micro_batch(rows[5:])], 1)
    expected = ReferenceTrainer(str(folder / "tied")).step(rows)
    assert backend.finish_step()["train/grad_norm"] == pytest.approx(expected[1], rel=1e-5)


def test_no_reference_is_said(folder: Path) -> None:
    from headrace.trainers.losses.config import LossConfig

    backend = build(folder, with_reference=False, loss=LossConfig(clip_high=0.2))
    with pytest.raises(ValueError, match="with_reference: got False"):
        backend.logprobs([], 0, reference=True)
    backend.close()


@pytest.mark.parametrize("model", ["tied", "experts"])
def test_an_exported_folder_is_the_model(folder: Path, tmp_path: Path, model: str) -> None:
    backend = build(folder, model)
    run_step(backend, [random_rows(0, 10)])
    backend.export_model(str(tmp_path / "out"))
    weights = weights_of(backend)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert list(loaded) == list(weights)
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    with pytest.raises(ValueError, match="exists already"):
        backend.export_model(str(tmp_path / "out"))
    backend.close()


def test_one_backend_at_a_time(folder: Path, backend: MegatronBackend) -> None:
    with pytest.raises(RuntimeError, match="another one is open in this process"):
        build(folder)
    backend.close()
    backend.close()
    build(folder).close()


def test_the_process_sees_no_shim_outside_of_calls(backend: MegatronBackend) -> None:
    run_step(backend, [random_rows(0, 4)])
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.zeros(1).type() == "torch.FloatTensor"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": (
        "tied",
        {"topology": Topology(1, tp=4)},
        "trainer.tp: got 4, expected a divisor of .* num_key_value_heads = 2",
    ),
    "layers": (
        "tied",
        {"topology": Topology(1, pp=3)},
        "trainer.pp: got 3, expected a divisor of .*num_hidden_layers = 2",
    ),
    "experts": (
        "experts",
        {"topology": Topology(8, ep=8)},
        "trainer.ep: got 8, expected a divisor of .*num_experts = 4",
    ),
    "no experts": (
        "tied",
        {"topology": Topology(2, ep=2)},
        "trainer.ep: got 2, expected 1 for a model without experts",
    ),
    "experts need sequence parallelism": (
        "experts",
        {"topology": Topology(1, tp=2)},
        "trainer.sequence_parallel: got false, expected true",
    ),
    "sequence parallelism needs tensor parallelism": (
        "tied",
        {"sequence_parallel": True},
        "trainer.sequence_parallel: got true with trainer.tp=1, expected false",
    ),
    "context parallelism needs packing": (
        "tied",
        {"topology": Topology(1, cp=2), "packing": "none"},
        "trainer.packing: got 'none' with trainer.cp=2, expected 'packed'",
    ),
    "offload": ("tied", {"offload": True}, "trainer.offload: got True, expected False"),
    "head": ("tied", {"head": "full"}, "trainer.head: got 'full', expected 'selected'"),
    "biases": ("biased", {}, "with attention_bias = True, expected False"),
    "no such model": ("nowhere", {}, "model.path: got .*nowhere.*expected a folder"),
}


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_trained_is_refused(folder: Path, model: str, changes: dict[str, Any], message: str) -> None:
    save_tiny_llama(folder / "biased")
    changes = dict(changes)
    case = Case("refused", model, changes.pop("topology", ONE), changes)
    with pytest.raises(ValueError, match=message):
        case.build(0, str(folder))


def test_positions_that_change_with_length_are_refused(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False, rope_parameters=rope))
    model.save_pretrained(folder / "dynamic")
    with pytest.raises(ValueError, match="got rope_type 'dynamic', expected 'default', 'linear' or 'llama3'"):
        build(folder, "dynamic")
    build(folder).close()


def test_the_factory_builds_it(folder: Path) -> None:
    config = backend_config(str(folder / "tied"), backend="megatron", packing="packed")
    backend = build_backend(config, 0, 1)
    assert type(backend).__name__ == "MegatronBackend"
    backend.close()
    with pytest.raises(ValueError, match="world: got 1 ranks, expected the 2"):
        build_backend(dataclasses.replace(config, trainer=config.trainer.model_copy(update={"dp": 2})), 0, 1)
