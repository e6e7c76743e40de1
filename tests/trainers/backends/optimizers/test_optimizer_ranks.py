"""Every optimizer gives the same weights on two ranks as on one, and a resumed run goes on exactly."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import TINY, backend_config, random_rows, run_on_ranks, weights_of
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, train
from headrace.trainers.backends.fsdp.backend import FsdpBackend

pytestmark = pytest.mark.processes

SETTINGS: dict[str, dict[str, Any]] = {
    "adamw in host memory": {"offload_optimizer": True},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adamw_8bit in host memory": {"optimizer": "adamw_8bit", "offload_optimizer": True},
    "adamw_8bit with all in host memory": {"optimizer": "adamw_8bit", "offload": True},
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "muon": {"optimizer": "muon", "groups": ({"pattern": "*.mlp.*", "lr_factor": 2.0},)},
    "frozen": {"freeze": ("model.embed_tokens.*", "*.1.mlp.*"), "recompute": "full"},
    "half frozen": {"freeze": ("model.embed_tokens.*", "*.1.mlp.*"), "mixed_precision": True},
}
MESHES = {"dp2": Topology(2), "tp2": Topology(1, tp=2)}
CLOSE = {"adamw_bf16": 2e-3, "muon": 1e-3, "adamw_8bit": 1e-3, "half": 8e-3}  # weights are streamed in bfloat16
"""Largest difference of a weight on two ranks, at a rate of 2e-3, for optimizers whose rounding depends on pieces."""


def save_wide_model(folder: Path) -> str:
    """Write a random model whose matrices are large enough for moments in 8 bits, on two ranks, too."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    Qwen3ForCausalLM(Qwen3Config(**{**TINY, **sizes}, tie_word_embeddings=False)).save_pretrained(folder)
    return str(folder)


def run(rank: int, world: int, topology: Topology, name: str, model: str, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint and a third step, and the third again in a backend that has loaded the checkpoint."""
    settings = (
        SETTINGS[name] if world > 1 else {key: value for key, value in SETTINGS[name].items() if key != "offload"}
    )
    config = backend_config(model, topology=topology, grad_clip=None, **settings)
    third: Any = []
    path = f"{folder}/{name} {topology.dp} {topology.tp}".replace(" ", "-")
    for resumes in (False, True):
        with contextlib.closing(FsdpBackend(config, rank, world)) as backend:
            if resumes:
                backend.load(path)
            else:
                for step in (0, 1):
                    train(backend, topology, rank, random_rows(step, NUM_ROWS))
                backend.save(path, wait=False)
            figures = train(backend, topology, rank, random_rows(2, NUM_ROWS))
            backend.wait_saved()
            third.append((figures, weights_of(backend)))
            numbers = sum(value.numel() * value.element_size() for value in map(_piece, backend._optimizer.tensors()))
            params = sum(_piece(param).numel() for param in backend._policy.parameters())
    return {"third": third, "bytes": numbers / params}


def _piece(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def run_all(rank: int, world: int, model: str, folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (name, mesh): run(rank, world, topology, name, model, folder)
        for name in SETTINGS
        for mesh, topology in MESHES.items()
        if mesh == "dp2" or name in ("adamw_8bit", "muon")
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(run_all, 2, folder, model, str(folder))


@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_train_as_one_and_a_resumed_run_goes_on_exactly(
    name: str, model: str, ranks: list[dict[tuple[str, str], dict[str, Any]]], tmp_path: Path
) -> None:
    alone = run(0, 1, Topology(1), name, model, str(tmp_path))
    (figures, weights), again = alone["third"]
    assert again[0] == figures and all(torch.equal(again[1][name], value) for name, value in weights.items())
    start = Qwen3ForCausalLM.from_pretrained(model).state_dict()
    assert max(float((value - start[name]).abs().max()) for name, value in weights.items()) > 4e-3
    for mesh in MESHES:
        if (name, mesh) not in ranks[0]:
            continue
        one, two = (rank[name, mesh]["third"] for rank in ranks)
        assert one[0][0] == one[1][0] == two[0][0] == two[1][0]
        assert all(torch.equal(one[0][1][name], value) for name, value in one[1][1].items()), "a resumed run"
        atol = next((bound for start, bound in CLOSE.items() if name.startswith(start)), 2e-6)
        for weight, value in one[0][1].items():
            apart = (value - weights[weight]).abs()
            # Processors differ in the order of their sums, and a step divides tiny gradients by their own size.
            assert float((apart > atol).float().mean()) < 1e-3 and float(apart.max()) < 10 * atol, weight


def test_the_bytes_of_the_state(model: str, ranks: list[dict[tuple[str, str], dict[str, Any]]]) -> None:
    found = {name: ranks[0][name, "dp2"]["bytes"] for name in SETTINGS}
    assert found["adamw in host memory"] == pytest.approx(8, abs=0.01)
    assert found["adamw_8bit"] == pytest.approx(2 * (1 + 4 / 256), abs=0.1)  # vectors stay in float32
    assert found["adamw_bf16"] == pytest.approx(4, abs=0.01)
    params = dict(Qwen3ForCausalLM.from_pretrained(model).named_parameters())
    sizes, total = {name: param.numel() for name, param in params.items()}, sum(map(torch.numel, params.values()))
    hidden = sum(size for name, size in sizes.items() if ".layers." in name and "norm" not in name)
    assert found["muon"] == pytest.approx(8 - 4 * hidden / total, abs=0.01)
    frozen = sum(size for name, size in sizes.items() if "embed" in name or ".1.mlp." in name)
    assert found["frozen"] == found["half frozen"] == pytest.approx(8 * (1 - frozen / total), abs=0.01)
