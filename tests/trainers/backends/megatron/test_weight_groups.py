"""Megatron freezes and groups weights by their HF names as the fsdp backend does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.tests.trainers.backends.backend_ranks import random_rows, run_on_ranks, weights_of
from headrace.tests.trainers.backends.families import save_megatron
from headrace.tests.trainers.backends.mesh_ranks import NUM_ROWS, Case, train

pytestmark = pytest.mark.megatron

SETTINGS: dict[str, Any] = {
    "freeze": ("model.embed_tokens.*", "*.1.self_attn.?_proj.weight", "*mlp.gate.*"),
    "groups": (
        {"pattern": "*.mlp.*", "lr_factor": 0.5, "weight_decay": 0.2},
        {"pattern": "*layernorm*", "lr_factor": 2.0, "weight_decay": 0.05},
    ),
    "eps": 1e-6, "betas": (0.8, 0.95), "grad_clip": None, "recompute": "full",
}  # fmt: skip


def steps(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step, and the third step of a backend that has loaded the checkpoint."""
    path = f"{folder}/{case.name}-groups"
    with contextlib.closing(case.build(rank, folder)) as backend:
        before = weights_of(backend)
        for step in (0, 1):
            train(backend, case.topology, rank, random_rows(step, NUM_ROWS))
        backend.save(path)
        third = train(backend, case.topology, rank, random_rows(2, NUM_ROWS))
        after = weights_of(backend)
    with contextlib.closing(case.build(rank, folder)) as backend:
        backend.load(path)
        assert train(backend, case.topology, rank, random_rows(2, NUM_ROWS)) == third
        resumed = weights_of(backend)
    return {"third": third, "before": before, "after": after, "resumed": resumed}


def run_cases(rank: int, world: int, chosen: tuple[Case, ...], folder: str) -> list[dict[str, Any]]:
    return [steps(rank, case, folder) for case in chosen]


def cases(meshes: str) -> tuple[Case, ...]:
    settings = {**SETTINGS, "freeze": SETTINGS["freeze"][: 3 if "moe" in meshes else 2]}
    return tuple(Case(f"megatron {mesh}", settings) for mesh in meshes.split(", "))


def assert_as_fsdp(found: dict[str, Any], folder: Path, model: str) -> None:
    [case] = cases(model)
    fsdp = steps(0, Case(f"fsdp {model}", case.changes), str(folder))
    assert found["third"]["train/grad_norm"] == pytest.approx(fsdp["third"]["train/grad_norm"], rel=1e-4)
    for name, value in fsdp["after"].items():
        assert torch.equal(found["after"][name], found["resumed"][name])
        torch.testing.assert_close(found["after"][name], value, rtol=0, atol=4e-5)
    fixed = {name for name, value in found["after"].items() if torch.equal(value, found["before"][name])}
    assert any(".1.self_attn.q_proj" in name for name in fixed) and not any("norm" in name for name in fixed)
    assert len(fixed) == 5 + (model == "moe")


@pytest.mark.parametrize("model", ["untied", "moe"])
def test_one_rank_trains_as_the_fsdp_backend(folder: Path, model: str) -> None:
    [case] = cases(model)
    assert_as_fsdp(steps(0, case, str(folder)), folder, model)


@pytest.mark.slow
@pytest.mark.processes
def test_two_ranks_train_as_the_fsdp_backend(folder: Path, tmp_path: Path) -> None:
    [tensor, stages, data], _ = run_on_ranks(
        run_cases, 2, tmp_path, cases("untied tp2 sp, untied pp2, untied dp2"), str(folder)
    )
    for found in (tensor, stages, data):
        assert_as_fsdp(found, folder, "untied")


@pytest.mark.parametrize("kind", ["fsdp", "megatron"])
def test_weights_that_are_frozen_later_stay_as_they_were_trained(kind: str, folder: Path) -> None:
    """The second resume is that of a train worker that died."""
    trained, before = Case(f"{kind} untied"), dict[str, torch.Tensor]()
    frozen = Case(f"{kind} untied", {"freeze": ("model.embed_tokens.*",)})
    for number, case in enumerate((trained, frozen, frozen)):
        with contextlib.closing(case.build(0, folder)) as backend:
            if number:
                backend.load(f"{folder}/{kind}-freeze-{number - 1}")
                found = weights_of(backend)
                assert all(torch.equal(found[name], value) for name, value in before.items())
            train(backend, case.topology, 0, random_rows(number, NUM_ROWS))
            backend.save(f"{folder}/{kind}-freeze-{number}")
            before = weights_of(backend)


def test_stacked_biases_of_experts_have_no_weight_decay(folder: Path) -> None:
    save_megatron(folder / "sinks")
    with contextlib.closing(Case("megatron sinks", {"weight_decay": 0.1}).build(0, folder)) as backend:
        params = dict(backend._policy.named_parameters())
        decayed = {param for group in backend._parts.optimizer.param_groups if group["wd_mult"]
                   for param in group["params"]}  # fmt: skip
        biases = {name: param for name, param in params.items() if "bias" in name and param.ndim > 1}
        assert biases and len(decayed) == sum(param.group_settings[0] > 0 for param in params.values())
        assert {param.group_settings for param in biases.values()} == {(0.0, 1.0)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ("*.q_proj.*",)}, r"trainer.freeze: got \['\*.q_proj.\*'\], which match a part of .*k_proj.* M"),
        ({"freeze": ("*.layers.*",)}, r"trainer.freeze: got \['\*.layers.\*'\], expected patterns that leave w"),
        ({"freeze": ("*.nothing",)}, r"trainer.freeze: got the pattern '\*.nothing', which matches no"),
        ({"groups": ({"pattern": "*.up_proj.*", "lr_factor": 2},)}, r"trainer.groups: got .*match a part of .*gate"),
        ({"groups": ({"pattern": "*"},), "lora": {"rank": 2}}, r"trainer.groups: got 1 entries with trainer.lora"),
        ({"optimizer": "muon"}, "trainer.optimizer: got 'muon', expected 'adamw' with trainer.backend = 'megatron'"),
        ({"offload_optimizer": True}, "trainer.offload_optimizer: got True, expected False with trainer.backend = 'me"),
    ],
)  # fmt: skip
def test_what_megatron_cannot_do_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Case("megatron untied", changes).build(0, folder)
