"""Tests the megatron backend on one rank: steps as computed by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.tests.trainers.backends.backend_ranks import TINY, backend_config, random_rows, run_step
from headrace.tests.trainers.backends.mesh_ranks import Case, assert_as_reference, cases, run_case, run_reference
from headrace.trainers.backends.factory import build_backend

pytestmark = pytest.mark.megatron


def build(folder: Path, model: str = "tied", **changes: Any) -> Any:
    return Case(f"megatron {model}", changes).build(0, folder)


@pytest.fixture
def backend(folder: Path) -> Iterator[Any]:
    built = build(folder)
    yield built
    built.close()


@pytest.mark.parametrize(
    "case",
    [
        *cases("megatron", tied=", padded", untied="recompute whole", moe="selective"),
        Case("megatron moe", {"packing": "dynamic"}),
    ],
    ids=lambda case: case.name,
)
def test_as_by_hand(folder: Path, case: Case) -> None:
    result = run_case(0, case, str(folder))
    assert_as_reference(case, [result], run_reference(str(folder / case.model)))


def test_one_backend_at_a_time(folder: Path, backend: Any) -> None:
    with pytest.raises(RuntimeError, match="another megatron backend is open in this process"):
        build(folder)
    backend.close()
    backend.close()
    build(folder).close()


def test_the_process_sees_no_shim_outside_of_calls(backend: Any) -> None:
    run_step(backend, [random_rows(0, 4)])
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert torch.zeros(1).type() == "torch.FloatTensor"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("tied tp4", {}, "trainer.tp: got 4, expected a divisor of .* num_key_value_heads = 2"),
    "layers": ("tied pp3", {}, "trainer.pp: got 3, expected a divisor of .*num_hidden_layers = 2"),
    "experts": ("moe dp8 ep8", {}, "trainer.ep: got 8, expected a divisor of .*num_experts = 4"),
    "no experts": ("tied dp2 ep2", {}, "trainer.ep: got 2, expected 1 for a model without experts"),
    "experts need sequence parallelism": ("moe tp2", {}, "trainer.sequence_parallel: got false, expected true"),
    "sequence parallelism needs tensor parallelism": (
        "tied sp", {}, "trainer.sequence_parallel: got true with trainer.tp=1, expected false",
    ),
    "context parallelism needs packing": (
        "tied cp2 padded", {}, "trainer.packing: got 'none' with trainer.cp=2, expected 'packed'",
    ),
    "offload": ("tied", {"offload": True}, "trainer.offload: got True, expected False"),
    "head": ("tied", {"head": "full"}, "trainer.head: got 'full', expected 'auto' or 'selected'"),
    "biases": ("biased", {}, "with attention_bias = True, expected False"),
    "no such model": ("nowhere", {}, "model.path: got .*nowhere.*expected a folder"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_trained_is_refused(folder: Path, model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(folder, model, **changes)


def test_positions_that_change_with_length_are_refused(folder: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=False, rope_parameters=rope))
    model.save_pretrained(folder / "dynamic")
    with pytest.raises(ValueError, match="with rope_type = dynamic, expected 'default', 'linear', 'llama3' or 'y"):
        build(folder, "dynamic")
    build(folder).close()


def test_the_factory_builds_it(folder: Path) -> None:
    config = backend_config(str(folder / "tied"), backend="megatron", packing="packed")
    backend = build_backend(config, 0, 1)
    assert type(backend).__name__ == "MegatronBackend"
    backend.close()
    with pytest.raises(ValueError, match="world: got 1 ranks, expected the 2"):
        build_backend(dataclasses.replace(config, trainer=config.trainer.model_copy(update={"dp": 2})), 0, 1)
