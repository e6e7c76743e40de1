"""Tests LoRA in the megatron backend: steps, gradients and weights as by hand on each mesh, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from headrace.actors.adapters.base_digest import base_digest
from headrace.actors.adapters.peft_folder import read_adapter, write_adapter
from headrace.actors.adapters.spec import AdapterSpec, module_pairs, tensor_names
from headrace.tests.trainers.backends.backend_ranks import (
    LR,
    WEIGHT_DECAY,
    ReferenceTrainer,
    random_rows,
    run_on_ranks,
    weights_of,
)
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, cases, logprobs, train
from headrace.trainers.backends.hf_model import HfSource
from headrace.trainers.backends.lora.adapted_layers import find_targets
from headrace.trainers.backends.lora.start import start_value
from headrace.trainers.backends.lora_config import LoraConfig

pytestmark = pytest.mark.megatron

RANK, SCALING = 3, 1.5
LORA: dict[str, Any] = {"rank": RANK, "alpha": RANK * SCALING, "lr_factor": 1.0}
FEW = ("v_proj", "layers.0.mlp.up_proj")
CASES = (
    *cases("megatron", {"lora": LORA}, tied=", recompute, selective padded, tp2, tp2 sp whole, dp2, dp2 whole, cp2",
           untied="pp2 recompute", moe="tp2 sp, dp2 ep2", shared="tp2 sp", latent="tp2 ep2 sp recompute"),
    *cases("megatron", {"lora": {**LORA, "targets": FEW}}, llama="tp2"),
)  # fmt: skip


def targets_of(folder: Path, case: Case) -> list[str]:
    lora = LoraConfig.model_validate(case.changes["lora"])
    return find_targets(HfSource(str(folder / case.model)).empty_model(), lora)


def adapter_folder(folder: Path, case: Case) -> str:
    """Write an adapter with random A and B for the case's model, once, and return its folder."""
    path = folder / f"adapter of {case.model}"
    if not path.exists():
        model, tensors = HfSource(str(folder / case.model)).empty_model(), {}
        torch.manual_seed(7)
        for name in targets_of(folder, case):
            rows, columns = model.get_submodule(name).weight.shape
            shapes = ((RANK, columns), (rows, RANK))
            tensors |= {one: 0.2 * torch.randn(shape) for one, shape in zip(tensor_names(name), shapes, strict=True)}
        base, alpha = str(folder / case.model), RANK * SCALING
        write_adapter(str(path), base=base, rank=RANK, alpha=alpha, dropout=0.0, tensors=tensors)
    return str(path)


class LoraReference(ReferenceTrainer):
    """Trains an adapter by its formula, `y = W x + scaling B A x`, on a frozen HF model."""

    def __init__(self, folder: str, adapter: str) -> None:
        super().__init__(folder)
        self.model.requires_grad_(False)
        self.base = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.pairs = {
            name: (nn.Parameter(first), nn.Parameter(second))
            for name, (first, second) in module_pairs(read_adapter(adapter).tensors, RANK).items()
        }
        for name, (first, second) in self.pairs.items():
            layer: Any = self.model.get_submodule(name)
            layer.matrices = nn.ParameterList([first, second])
            layer.register_forward_hook(
                lambda _, inputs, out, first=first, second=second: out + SCALING * (inputs[0] @ first.T) @ second.T
            )
        both = [matrix for pair in self.pairs.values() for matrix in pair]
        self.optimizer = torch.optim.AdamW(both, lr=LR, weight_decay=WEIGHT_DECAY)

    def of_rows(self) -> torch.Tensor:
        """Return the log-probs that `mesh_ranks.logprobs` returns."""
        with torch.no_grad():
            rows = random_rows(50, NUM_ROWS)
            return torch.cat([self.row_logprobs(row) * torch.from_numpy(row.mask) for row in rows])

    def matrices(self) -> dict[str, torch.Tensor]:
        """Return copies of A and B by their own names."""
        return {
            f"{name}.{matrix}.weight": value.detach().clone()
            for name, pair in self.pairs.items()
            for matrix, value in zip(("lora_A", "lora_B"), pair, strict=True)
        }

    def moments(self) -> dict[str, torch.Tensor]:
        """Return the mean gradient that AdamW keeps, by the own names of the matrices."""
        named = zip(self.matrices(), (matrix for pair in self.pairs.values() for matrix in pair), strict=True)
        return {name: self.optimizer.state[value]["exp_avg"].clone() for name, value in named}

    def merged(self) -> dict[str, torch.Tensor]:
        """Return the weights with the adapter added, by HF name."""
        with torch.no_grad():
            added = {f"{name}.weight": SCALING * second @ first for name, (first, second) in self.pairs.items()}
        return {name: value + added.get(name, 0.0) for name, value in self.base.items()}


def state_of(backend: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, whole. Collective."""
    state = {**backend._state(), **backend._adapter.state()}
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def run_lora(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Return log-probs, two steps, and the state after each."""
    path = adapter_folder(Path(folder), case)
    given = dataclasses.replace(case, changes={**case.changes, "adapter": path})
    with contextlib.closing(given.build(rank, folder)) as backend:
        result: dict[str, Any] = {"before": logprobs(backend, case.topology, rank)}
        result["steps"] = [train(backend, case.topology, rank, random_rows(0, NUM_ROWS))]
        result["states"] = [state_of(backend)]
        result["steps"].append(train(backend, case.topology, rank, random_rows(1, NUM_ROWS)))
        result["states"].append(state_of(backend))
        result["after"] = logprobs(backend, case.topology, rank)
        result["reference"] = logprobs(backend, case.topology, rank, reference=True)
        result["weights"] = weights_of(backend)
        return result


def bare(rank: int, case: Case, folder: str) -> list[list[torch.Tensor]]:
    """Return log-probs of a model without an adapter, of one with a new adapter, and of the reference of the latter."""
    found = []
    for lora in ({"rank": 0}, LORA, {**LORA, "targets": FEW}):
        plain = dataclasses.replace(case, changes={"lora": lora})
        with contextlib.closing(plain.build(rank, folder)) as backend:
            found += [logprobs(backend, case.topology, rank, reference=one) for one in (False, True)]
    return found


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """Save after a step on two meshes, and load each checkpoint on both."""
    chosen = cases("megatron", {"lora": LORA}, tied="tp2, dp2")
    found: dict[str, Any] = {}
    for case in chosen:
        with contextlib.closing(case.build(rank, folder)) as backend:
            train(backend, case.topology, rank, random_rows(0, NUM_ROWS))
            backend.save(f"{folder}/lora {case.name}")
            train(backend, case.topology, rank, random_rows(1, NUM_ROWS))
            found[case.name] = state_of(backend)
    for case in chosen:
        for saved in chosen:
            with contextlib.closing(case.build(rank, folder)) as backend:
                backend.load(f"{folder}/lora {saved.name}")
                train(backend, case.topology, rank, random_rows(1, NUM_ROWS))
                found[f"{saved.name} on {case.name}"] = state_of(backend)
    return found


def sent(rank: int, folder: str) -> dict[str, torch.Tensor]:
    case = Case("megatron tied tp2 half", {"lora": LORA, "sends_adapter": True})
    with contextlib.closing(case.build(rank, folder)) as backend:
        assert backend.adapter == AdapterSpec(RANK, RANK * SCALING, base_digest(f"{folder}/tied"))
        return weights_of(backend)


def without_target(rank: int, folder: str) -> str:
    """Return how an adapter is refused that one of two pipeline stages lacks."""
    case = Case("megatron tied pp2", {"lora": {**LORA, "targets": ["layers.1.mlp.up_proj"]}})
    with pytest.raises(ValueError, match="trainer.lora.targets") as error:
        case.build(rank, folder)
    return str(error.value)


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Any]:
    return {
        "cases": {case.name: run_lora(rank, case, folder) for case in CASES if case.topology.world == world},
        "bare": {mesh: bare(rank, Case(f"megatron {mesh}"), folder) for mesh in ("tied tp2", "moe tp2 sp", "tied cp2")},
        "resumed": resumed(rank, folder),
        "sent": sent(rank, folder),
        "stage": without_target(rank, folder),
    }


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    for case in CASES:
        adapter_folder(folder, case)
    return run_on_ranks(on_two_ranks, 2, folder / "lora", str(folder))


def assert_case(folder: Path, case: Case, ranks: Sequence[dict[str, Any]]) -> None:
    """Compare each rank's results of `run_lora` with those by hand."""
    by_hand = LoraReference(str(folder / case.model), adapter_folder(folder, case))
    writers = [ranks[case.topology.writer(dp)] for dp in range(case.topology.dp)]
    atol = 1e-4 if case.model in ("shared", "latent") else 1e-5  # Their log-probs spread by nats.
    for rank in writers:
        torch.testing.assert_close(torch.cat(rank["before"]), by_hand.of_rows(), rtol=0, atol=1e-5)
        base = ReferenceTrainer(str(folder / case.model))
        plain = LoraReference.of_rows(base)  # pyright: ignore[reportArgumentType]  # needs only its log-probs
        torch.testing.assert_close(torch.cat(rank["reference"]), plain, rtol=0, atol=1e-5)
    for step in (0, 1):
        expected = by_hand.step(random_rows(step, NUM_ROWS))
        for rank in ranks:
            got = rank["steps"][step]
            assert (got["train/loss"], got["train/grad_norm"]) == pytest.approx(expected, rel=10 * atol, abs=1e-7)
        state = {name: value for rank in ranks for name, value in rank["states"][step].items()}
        square, total = torch.zeros(()), torch.zeros(())
        for name, gradient in by_hand.moments().items():
            difference = (state[f"optimizer.{name}.exp_avg"] - gradient).norm()
            assert difference <= 3e-5 * gradient.norm(), (step, name)
            square, total = square + difference**2, total + gradient.norm() ** 2
        assert square.sqrt() <= 2e-5 * total.sqrt(), "float32 rounds the gradient by 0.5e-5 by hand, too"
        for name, matrix in by_hand.matrices().items():
            torch.testing.assert_close(state[f"model.{name}"], matrix, rtol=0, atol=4 * atol)
    for rank in writers:
        torch.testing.assert_close(torch.cat(rank["after"]), by_hand.of_rows(), rtol=0, atol=10 * atol)
    merged, weights = by_hand.merged(), ranks[0]["weights"]
    for name, value in weights.items():
        torch.testing.assert_close(value, merged[name], rtol=0, atol=4 * atol)
        changed = name.removesuffix(".weight") in by_hand.pairs
        assert torch.equal(value, by_hand.base[name]) != changed, name
    assert set(merged) - set(weights) <= {"lm_head.weight"}, "only a tied output layer is left out"


ONE = [case for case in CASES if case.topology.world == 1]
TWO = [case for case in CASES if case.topology.world == 2]


@pytest.mark.parametrize("case", ONE, ids=[case.name for case in ONE])
def test_one_rank_is_as_by_hand(folder: Path, case: Case) -> None:
    assert_case(folder, case, [run_lora(0, case, str(folder))])


@pytest.mark.processes
@pytest.mark.parametrize("case", TWO, ids=[case.name for case in TWO])
def test_two_ranks_are_as_by_hand(folder: Path, case: Case, two: list[dict[str, Any]]) -> None:
    assert_case(folder, case, [rank["cases"][case.name] for rank in two])


@pytest.mark.processes
def test_a_new_adapter_changes_no_bit(two: list[dict[str, Any]]) -> None:
    for found in two[0]["bare"].values():
        first, *others = [torch.cat(part) for part in found]
        assert len(others) == 5 and all(torch.equal(first, other) for other in others)


@pytest.mark.processes
def test_a_checkpoint_goes_on_on_any_mesh(two: list[dict[str, Any]]) -> None:
    found, names = two[0]["resumed"], ("megatron tied tp2", "megatron tied dp2")
    for saved in names:
        for mesh in names:
            state = found[f"{saved} on {mesh}"]
            assert set(state) == set(found[saved]) and not any("embed" in name for name in state)
            for name, value in found[saved].items():
                atol = 0 if mesh == saved else 1e-5
                torch.testing.assert_close(state[name], value, rtol=0, atol=atol, msg=f"{name} of {saved} on {mesh}")


@pytest.mark.processes
def test_what_is_sent_is_the_adapter(folder: Path, two: list[dict[str, Any]]) -> None:
    model, pairs = HfSource(str(folder / "tied")).empty_model(), module_pairs(two[0]["sent"], RANK)
    assert list(pairs) == targets_of(folder, ONE[0]) and len(pairs) == 14
    for name, (first, second) in pairs.items():
        rows, columns = model.get_submodule(name).weight.shape
        start = start_value(name, (RANK, columns), "kaiming", 0, RANK)
        assert second.shape == (rows, RANK) and second.dtype == torch.bfloat16 and not second.any()
        assert torch.equal(first, start.bfloat16()), "the start does not depend on the mesh"


@pytest.mark.processes
def test_every_pipeline_stage_needs_a_target(two: list[dict[str, Any]]) -> None:
    assert two[0]["stage"] == two[1]["stage"] and "none is among the decoder layers 0 to 0" in two[0]["stage"]


def build(folder: Path, name: str = "tied", **changes: Any) -> Any:
    lora = {**LORA, **changes.pop("lora", {})}
    return Case(f"megatron {name}", {"lora": lora, **changes}).build(0, folder)


def test_only_the_adapter_has_gradients_and_an_optimizer(folder: Path) -> None:
    with contextlib.closing(build(folder, "tied half")) as backend:
        params, buffers = list(backend._policy.parameters()), backend._parts.model.buffers
        trained = [param for param in params if param.requires_grad]
        assert {param.dtype for param in params if not param.requires_grad} == {torch.bfloat16}
        assert {param.dtype for param in trained} == {torch.float32} and len(trained) == 28
        assert [len(buffer.params) for buffer in buffers] == [28]
        [part] = backend._parts.optimizer.chained_optimizers
        size = sum(value["exp_avg"].numel() for value in part.optimizer.state.values())
        assert size == sum(param.numel() for param in trained)
        train(backend, ONE[0].topology, 0, random_rows(0, NUM_ROWS))
        assert torch.isfinite(torch.cat(logprobs(backend, ONE[0].topology, 0))).all()


def test_dropout_is_part_of_training_passes_only(folder: Path) -> None:
    topology, path = ONE[0].topology, adapter_folder(folder, ONE[0])
    found = []
    for dropout in (0.0, 0.5):
        with contextlib.closing(build(folder, lora={"dropout": dropout}, adapter=path)) as backend:
            predicted = torch.cat(logprobs(backend, topology, 0))
            found.append((predicted, train(backend, topology, 0, random_rows(0, NUM_ROWS))["train/loss"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] != found[1][1]


def test_a_checkpoint_of_another_base_is_refused(folder: Path, tmp_path: Path) -> None:
    with contextlib.closing(build(folder)) as backend:
        backend.save(str(tmp_path / "saved"))
    shutil.copytree(folder / "tied", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    digests = f"{base_digest(str(tmp_path / 'other'))}, expected {base_digest(str(folder / 'tied'))}"
    with contextlib.closing(build(tmp_path, "other")) as backend, pytest.raises(ValueError, match=digests):
        backend.load(str(tmp_path / "saved"))


def test_an_exported_folder_has_the_merged_model_and_the_adapter(folder: Path, tmp_path: Path) -> None:
    path = adapter_folder(folder, ONE[0])
    with contextlib.closing(build(folder, adapter=path)) as backend:
        expected = weights_of(backend)
        backend.export_model(str(tmp_path / "out"))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported and all(torch.equal(value, expected[name]) for name, value in exported.items())
    again, given = read_adapter(str(tmp_path / "out" / "adapter")), read_adapter(path)
    assert (again.rank, again.alpha) == (RANK, RANK * SCALING) and set(again.tensors) == set(given.tensors)
    assert all(torch.equal(value, given.tensors[name]) for name, value in again.tensors.items())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("moe", {"lora": {"experts": True}}, "trainer.lora.experts: got True, expected False"),
    "base": ("tied", {"lora": {"base": "nf4"}, "rounded": "folder"}, "trainer.lora.base: got 'nf4', expected 'model'"),
    "biases": ("latent", {"moe": {"bias_update_rate": 0.1}}, "bias_update_rate: got 0.1, expected 0 with trainer.lora"),
    "dropout": ("tied selective", {"lora": {"dropout": 0.1}}, "trainer.lora.dropout: got 0.1, expected 0"),
    "no such target": ("tied", {"lora": {"targets": ["query"]}}, "trainer.lora.targets: got 'query'"),
    "a gate": ("shared", {"lora": {"targets": ["shared_expert_gate"]}}, "targets: got 'shared_expert_gate', expected"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_adapted_is_refused(folder: Path, model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(folder, model, **changes)
