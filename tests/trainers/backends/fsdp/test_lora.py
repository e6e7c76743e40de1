"""Tests LoRA in the fsdp backend: against PEFT, on meshes, and its checkpoints, folders and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM

from headrace.actors.adapters.peft_folder import read_adapter, write_adapter
from headrace.actors.adapters.spec import tensor_names
from headrace.tests.trainers.backends.backend_ranks import (
    LR,
    WEIGHT_DECAY,
    ReferenceTrainer,
    assert_same_step,
    backend_config,
    logprobs_of,
    micro_batch,
    random_matrices,
    random_rows,
    run_on_ranks,
    run_step,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, STEPS, Case, run_case
from headrace.trainers.backends.factory import build_backend
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.lora.adapted_layers import find_targets
from headrace.trainers.backends.lora_config import LoraConfig
from headrace.trainers.errors import UserError

RANK = 4
LORA: dict[str, Any] = {"rank": RANK, "lr_factor": 1.0}
MODEL_OF = {"experts": "moe"}
"""Name of an adapter -> name of its model, where they differ."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def settings(model: str) -> dict[str, Any]:
    """Return the section `trainer.lora` for a tiny model. PEFT 0.21 takes the names of the MLP's layers of a model with
    experts for names of its experts, so that only attention is compared there."""
    return {**LORA, "targets": ATTENTION} if Path(model).name == "moe" else LORA


EXPERTS = [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]


def save_adapter(folder: Path, model: str, parameters: Sequence[str] = ()) -> str:
    """Write a random adapter of all target layers of `model`, whose matrices B are not zero. parameters: weights of
    stacked experts that have matrices, too."""
    whole = AutoModelForCausalLM.from_pretrained(model)
    targets = find_targets(whole, LoraConfig.model_validate(settings(model)))
    tensors = random_matrices(whole, targets, RANK)
    for name in parameters:
        experts, rows, columns = whole.get_parameter(name).shape
        first, second = tensor_names(name.rpartition(".")[0] + ("" if name.endswith("down_proj") else ".base_layer"))
        tensors[first] = torch.randn(experts * RANK, columns) * 0.2
        tensors[second] = torch.randn(rows, experts * RANK) * 0.2
    settings_: dict[str, Any] = {"rank": RANK, "alpha": 2.0 * RANK, "dropout": 0.0}
    write_adapter(str(folder), base=model, tensors=tensors, parameters=parameters, **settings_)
    return str(folder)


class PeftTrainer(ReferenceTrainer):
    """Trains an adapter with PEFT's layers and the formulas of `ReferenceTrainer`."""

    def __init__(self, model: str, adapter: str) -> None:
        super().__init__(model)
        self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY)

    def matrices(self) -> dict[str, torch.Tensor]:
        """Return A and B of all layers by their names in PEFT's format."""
        return {
            name.replace(".default", ""): param.detach().clone()
            for name, param in self.model.named_parameters()
            if param.requires_grad
        }


@pytest.fixture(scope="module")
def adapters(folder: Path) -> dict[str, str]:
    found = {name: save_adapter(folder / f"adapter-{name}", str(folder / name)) for name in ("tied", "biased", "moe")}
    return {**found, "experts": save_adapter(folder / "adapter-experts", str(folder / "moe"), EXPERTS)}


def build(model: str, adapter: str | None = None, *, lora: dict[str, Any] | None = None, **changes: Any) -> FsdpBackend:
    config = backend_config(
        model, lora={**settings(model), **(lora or {})}, adapter=adapter, **{"sends_adapter": True, **changes}
    )
    backend: Any = build_backend(config, 0, 1)
    return backend


def expected(folder: Path, name: str, adapter: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Return loss and gradient norm of the steps of PEFT's model, and its matrices afterwards."""
    trainer = PeftTrainer(str(folder / name), adapter)
    return [trainer.step(random_rows(step, NUM_ROWS)) for step in range(STEPS)], trainer.matrices()


def assert_as_peft(found: dict[str, Any], steps: list[tuple[float, float]], matrices: dict[str, torch.Tensor]) -> None:
    for got, (loss, norm) in zip(found["steps"], steps, strict=True):
        assert (got["train/loss"], got["train/grad_norm"]) == pytest.approx((loss, norm), rel=1e-3, abs=1e-5)
    assert found["weights"].keys() == matrices.keys()
    for name, value in found["weights"].items():
        torch.testing.assert_close(value, matrices[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", ["tied", "biased", "moe", "experts"])
def test_steps_are_those_of_peft(folder: Path, adapters: dict[str, str], name: str) -> None:
    """Eight updates have PEFT's losses, gradient norms and matrices, padded and packed."""
    model, lora = str(folder / MODEL_OF.get(name, name)), {"experts": name == "experts"}
    trainer = PeftTrainer(model, adapters[name])
    backends = [build(model, adapters[name], lora=lora, packing=packing) for packing in ("none", "packed")]
    for step in range(8):
        rows = random_rows(step, NUM_ROWS)
        loss, norm = trainer.step(rows)
        for backend in backends:
            got = run_step(backend, [rows[:6], [], rows[6:]])
            assert got["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
            # A ratio at a clip bound makes later norms sensitive to the last bits of the log-probs.
            assert got["train/grad_norm"] == pytest.approx(norm, rel=1e-3 if step else 1e-5)
    for backend in backends:
        for key, value in weights_of(backend).items():
            torch.testing.assert_close(value, trainer.matrices()[key], rtol=0, atol=1e-5, msg=key)


def test_a_new_adapter_changes_nothing(folder: Path) -> None:
    """With B = 0 the log-probs are bit-equal to the base's, and A is drawn as PEFT draws it."""
    model, micro = str(folder / "tied"), micro_batch(random_rows(1, 6))
    backend = build(model)
    base: Any = build_backend(backend_config(model), 0, 1)
    assert torch.equal(logprobs_of(backend, micro), logprobs_of(base, micro))
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), PeftConfig(r=RANK, target_modules="all-linear"))
    theirs = {name.replace(".default", ""): value for name, value in peft.named_parameters() if value.requires_grad}
    ours = weights_of(backend)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.shape == theirs[name].shape
        assert value.std() == pytest.approx(float(theirs[name].detach().std()), rel=0.3)


def test_the_reference_is_the_base(folder: Path, adapters: dict[str, str]) -> None:
    model, micro = str(folder / "tied"), micro_batch(random_rows(1, 6))
    backend = build(model, adapters["tied"])
    base: Any = build_backend(backend_config(model), 0, 1)
    assert torch.equal(logprobs_of(backend, micro, reference=True), logprobs_of(base, micro))
    assert (logprobs_of(backend, micro) - logprobs_of(base, micro)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["tied", "moe", "experts"])
def test_folders(folder: Path, tmp_path: Path, adapters: dict[str, str], name: str) -> None:
    """PEFT reads our folder, and transformers the merged one, with our log-probs."""
    model, rows, lora = str(folder / MODEL_OF.get(name, name)), random_rows(3, 6), {"experts": name == "experts"}
    backend = build(model, adapters[name], lora=lora)
    run_step(backend, [rows])
    backend.export_model(str(tmp_path / "out"))
    ours = logprobs_of(backend, micro_batch(rows))
    base = AutoModelForCausalLM.from_pretrained(model)
    peft: Any = ReferenceTrainer(model)
    merged = ReferenceTrainer(str(tmp_path / "out"))
    peft.model = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter"))
    for trainer in (peft, merged):
        theirs = torch.cat([trainer.row_logprobs(row, 1.0) * torch.from_numpy(row.mask) for row in rows])
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-5)
    again = build(model, str(tmp_path / "out" / "adapter"), lora=lora)
    assert torch.equal(logprobs_of(again, micro_batch(rows)), ours)


def test_merged_weights(folder: Path, adapters: dict[str, str]) -> None:
    """Merged weights have the model's names, and are W + scaling B A, rounded once."""
    model, given = str(folder / "tied"), read_adapter(adapters["tied"]).tensors
    for half in (False, True):
        backend = build(model, adapters["tied"], sends_adapter=False, mixed_precision=half)
        assert backend.adapter is None
        dtype = torch.bfloat16 if half else torch.float32
        base = AutoModelForCausalLM.from_pretrained(model).state_dict()
        for name, value in weights_of(backend).items():
            first, second = (given.get(part) for part in tensor_names(name.removesuffix(".weight")))
            wanted = base[name].to(dtype).float()
            if first is not None and second is not None:
                wanted = wanted + 2.0 * (second @ first)
            assert torch.equal(value, wanted.to(dtype)), name


def test_checkpoints(folder: Path, tmp_path: Path, adapters: dict[str, str]) -> None:
    """A resumed run continues exactly; a checkpoint has the adapter alone, and is refused on another base."""
    model = str(folder / "tied")
    backend = build(model, adapters["tied"])
    run_step(backend, [random_rows(0, 8)])
    backend.save(str(tmp_path / "saved"))
    wanted = run_step(backend, [random_rows(1, 8)])
    names = FileSystemReader(str(tmp_path / "saved")).read_metadata().state_dict_metadata
    assert all("lora" in name for name in names if name.startswith(("model.", "optimizer.")))
    resumed = build(model)
    resumed.load(str(tmp_path / "saved"))
    assert run_step(resumed, [random_rows(1, 8)]) == wanted
    assert all(torch.equal(value, weights_of(backend)[name]) for name, value in weights_of(resumed).items())
    whole = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        next(whole.parameters())[0, 0] += 1.0
    whole.save_pretrained(tmp_path / "other")
    other = build(str(tmp_path / "other"))
    with pytest.raises(UserError, match="model.path: its weights have the digest .*, expected .*, that of the base"):
        other.load(str(tmp_path / "saved"))


def test_dropout_is_of_training_passes_alone(folder: Path, adapters: dict[str, str]) -> None:
    model, rows = str(folder / "tied"), random_rows(0, 8)
    plain, dropped = build(model, adapters["tied"]), build(model, adapters["tied"], lora={"dropout": 0.5})
    micro = micro_batch(rows)
    assert torch.equal(logprobs_of(plain, micro), logprobs_of(dropped, micro))
    torch.manual_seed(0)
    assert run_step(plain, [rows])["train/loss"] != pytest.approx(run_step(dropped, [rows])["train/loss"], abs=1e-4)


def test_mixed_precision_and_recompute(folder: Path, adapters: dict[str, str]) -> None:
    """With mixed precision the base takes two bytes per parameter, and the matrices stay in float32."""
    model, rows = str(folder / "tied"), random_rows(0, 8)
    backend = build(model, adapters["tied"], mixed_precision=True)
    kinds = {(param.dtype, param.requires_grad) for param in backend._policy.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    got = run_step(backend, [rows])
    wanted = run_step(build(model, adapters["tied"], mixed_precision=True, recompute="full"), [rows])
    assert_same_step(got, wanted)
    full = run_step(build(model, adapters["tied"]), [rows])
    assert got["train/loss"] == pytest.approx(full["train/loss"], abs=0.02)


@pytest.mark.parametrize(
    ("lora", "adapter", "words"),
    [
        ({"targets": ["q_projj"]}, None, "trainer.lora.targets: got 'q_projj'"),
        ({"rank": 8}, "tied", "trainer.lora.rank: got 8, expected 4"),
        ({"alpha": 3.0}, "tied", "trainer.lora.alpha: got 3.0, expected 8.0"),
        ({"targets": "q_proj"}, "tied", "expected matrices for exactly the layers of trainer.lora.targets"),
        ({"rank": 0}, "tied", "expected trainer.lora.rank to be set"),
        ({}, "nowhere", "expected a folder in PEFT's format"),
        ({}, "biased", "model.adapter: the folder has"),
    ],
)
def test_refusals(
    folder: Path, adapters: dict[str, str], lora: dict[str, Any], adapter: str | None, words: str
) -> None:
    given = None if adapter is None else adapters.get(adapter, adapter)
    with pytest.raises(ValueError, match=words.replace("(", r"\(")) as caught:
        build(str(folder / "moe"), given, lora=lora) if adapter == "biased" else build(
            str(folder / "tied"), given, lora=lora
        )
    assert "\n" not in str(caught.value)


CASES = ["fsdp tied dp2 packed", "fsdp tied tp2 packed recompute offload"]
EXPERT_CASES = ["fsdp moe dp2 ep2 packed"]
MORE_CASES = ["fsdp tied dp2", "fsdp tied tp2", "fsdp biased tp2", "fsdp moe tp2", "fsdp moe dp2 ep2"]
MORE_EXPERT_CASES = ["fsdp moe tp2 padded", "fsdp moe dp2 recompute"]


def on_ranks(
    rank: int, world: int, folder: str, adapters: dict[str, str], plain: list[str], with_experts: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*plain, *with_experts):
        model, experts = name.split()[1], name in with_experts
        lora = {**settings(model), "experts": experts}
        changes = {"lora": lora, "adapter": adapters["experts" if experts else model], "sends_adapter": True}
        found[name] = run_case(rank, Case(name, changes), folder)
    case = Case("fsdp tied dp2", {"lora": LORA, "adapter": adapters["tied"], "mixed_precision": True})
    with contextlib.closing(case.build(rank, folder)) as backend:
        backend.export_model(f"{folder}/merged-half-{len(found)}")
        found["bytes"] = sum(param.to_local().numel() * param.element_size() for param in backend._policy.parameters())
        found["params"] = sum(param.numel() for param in backend._policy.parameters())
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plain", "with_experts"),
    [(CASES, EXPERT_CASES), pytest.param(MORE_CASES, MORE_EXPERT_CASES, marks=pytest.mark.slow)],
)
def test_meshes(
    folder: Path, tmp_path: Path, adapters: dict[str, str], plain: list[str], with_experts: list[str]
) -> None:
    """On each mesh, steps, matrices and the reference are those of PEFT on one rank."""
    ranks = run_on_ranks(on_ranks, 2, tmp_path, str(folder), adapters, plain, with_experts)
    assert ranks[0]["bytes"] < 0.75 * 2 * ranks[0]["params"], "the base takes two bytes per parameter, sharded"
    for name in (*plain, *with_experts):
        model = name.split()[1]
        adapter = adapters["experts" if name in with_experts else model]
        assert_as_peft(ranks[0][name], *expected(folder, model, adapter))
        base = build(str(folder / model))
        alone = logprobs_of(base, micro_batch(random_rows(50, NUM_ROWS)[:6]), temperature=1.3)
        np.testing.assert_allclose(ranks[0][name]["reference"][0], alone, rtol=0, atol=1e-5)
