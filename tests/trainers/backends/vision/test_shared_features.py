"""Tests that ranks of tensor parallelism get the features of pictures from the one that runs a frozen tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.train.step_rows import without_pixels
from headrace.actors.train.topology import Topology
from headrace.actors.train_backend import MicroBatch
from headrace.tests.trainers.backends.backend_ranks import (
    TEMPERATURE,
    backend_config,
    gradients_of,
    logprobs_of,
    run_on_ranks,
)
from headrace.tests.trainers.backends.vision.tiny_vlms import save_vlm, shown_rows
from headrace.trainers.backends.fsdp.backend import FsdpBackend

FREEZE = {"qwen2_5_vl": ["vision"], "gemma3": ["vision", "*multi_modal_projector*", "*.[qk]_norm.*"]}
"""Patterns of all weights between pixels and features, of the families with a plan for tensor parallelism. Each rank
has only its own part of the gradient of Gemma's norms of heads, until the step ends, so these are frozen, too."""


def blind(micro: MicroBatch) -> MicroBatch:
    assert micro.pictures is not None
    return replace(micro, pictures=without_pixels(micro.pictures))


def share(rank: int, world: int, folder: str, name: str, mesh: Topology) -> dict[str, Any]:
    """Return a rank's log-probs and gradients, and how often it ran the tower.

    It has pixels only if it is the first of its replica. With dp 2 the second replica has a row without pictures.
    """
    backend = FsdpBackend(backend_config(folder, topology=mesh, freeze=FREEZE[name]), rank, world)
    shown, place, runs = shown_rows(name), mesh.place(rank), list[int]()
    assert backend.shares_features
    tower = backend._policy.model.get_encoder(modality="image")
    tower.register_forward_hook(lambda *_: runs.append(1))
    rows = [range(4)] if mesh.dp == 1 else [range(3), [3]]
    micro = shown.micro(rows[place.dp], beside=shown.pictures[0])
    micro = micro if place.tp == 0 else blind(micro)
    scores = [backend.logprobs([micro], 1, temperature=TEMPERATURE) for _ in range(2)]
    first, second = (torch.cat(one or [torch.zeros(0)]) for one in scores)
    assert torch.equal(first, second)
    found = {"logprobs": first, "gradients": gradients_of(backend, [micro]), "runs": len(runs)}
    backend.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("qwen2_5_vl", Topology(1, tp=2)), ("gemma3", Topology(1, tp=2)), ("qwen2_5_vl", Topology(2, tp=2))],
    ids=["qwen2_5_vl", "gemma3", "dp2"],
)
def test_siblings_compute_the_same_without_pixels(name: str, mesh: Topology, tmp_path: Path) -> None:
    folder, shown = save_vlm(tmp_path / name, name), shown_rows(name)
    alone = FsdpBackend(backend_config(folder, freeze=FREEZE[name]), 0, 1)
    wanted, gradients = logprobs_of(alone, shown.micro(), temperature=TEMPERATURE), gradients_of(alone, [shown.micro()])
    assert not alone.shares_features, "a rank alone has nobody to share with"
    alone.close()
    ranks = run_on_ranks(share, mesh.world, tmp_path / "ranks", folder, name, mesh)
    assert (torch.cat([one["logprobs"] for one in ranks]) - wanted).abs().max() <= 1e-5
    for number, rank in enumerate(ranks):
        assert rank["runs"] == (3 if mesh.place(number).tp == 0 else 0)
        assert set(rank["gradients"]) == set(gradients)
        for key, expected in gradients.items():
            assert torch.linalg.norm(rank["gradients"][key] - expected) <= 1e-4 * torch.linalg.norm(expected), key


def refuse(rank: int, world: int, folder: str, freeze: list[str]) -> bool:
    backend = FsdpBackend(backend_config(folder, topology=Topology(1, tp=2), freeze=freeze), rank, world)
    found = backend.shares_features
    backend.close()
    return found


@pytest.mark.processes
def test_a_trained_projector_needs_pixels_on_all_ranks(tmp_path: Path) -> None:
    folder = save_vlm(tmp_path / "gemma3", "gemma3")
    assert run_on_ranks(refuse, 2, tmp_path / "ranks", folder, ["vision"]) == [False, False]
