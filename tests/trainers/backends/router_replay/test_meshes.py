"""Replayed routes give the same steps, log-probs and weights on every mesh of both backends as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.router_replay.replay_ranks import SP, ReplayCase, outcomes, run_case
from headrace.tests.trainers.backends.router_replay.routed_rows import save_moe

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

AGAIN: dict[str, Any] = {"recompute": "full"}
SHORT = (
    ReplayCase("megatron dp2", "megatron", Topology(2)),
    ReplayCase("megatron tp2 sp", "megatron", Topology(1, tp=2), SP),
    ReplayCase("megatron cp2", "megatron", Topology(1, cp=2)),
    ReplayCase("megatron pp2 recompute", "megatron", Topology(1, pp=2), AGAIN),
    ReplayCase("megatron ep2", "megatron", Topology(2, ep=2)),
)
PRODUCT = (
    ReplayCase("megatron pp2", "megatron", Topology(1, pp=2)),
    ReplayCase("megatron dp2 padded", "megatron", Topology(2), {"packing": "none"}),
    ReplayCase("megatron dp2 recompute", "megatron", Topology(2), AGAIN),
    ReplayCase("megatron cp2 recompute", "megatron", Topology(1, cp=2), AGAIN),
    ReplayCase("megatron ep2 recompute", "megatron", Topology(2, ep=2), AGAIN),
    ReplayCase("megatron tp2 sp recompute", "megatron", Topology(1, tp=2), {**SP, **AGAIN}),
    ReplayCase("fsdp dp2", "fsdp", Topology(2)),
    ReplayCase("fsdp dp2 padded, recompute", "fsdp", Topology(2), {"packing": "none", **AGAIN}),
    ReplayCase("fsdp tp2", "fsdp", Topology(1, tp=2)),
    ReplayCase("fsdp tp2 recompute", "fsdp", Topology(1, tp=2), AGAIN),
    ReplayCase("megatron tp2 pp2", "megatron", Topology(1, tp=2, pp=2), {**SP, **AGAIN}),
    ReplayCase("megatron cp2 pp2", "megatron", Topology(1, cp=2, pp=2)),
    ReplayCase("megatron dp2 pp2 ep2", "megatron", Topology(2, pp=2, ep=2), AGAIN),
    ReplayCase("megatron tp2 cp2 ep2", "megatron", Topology(1, tp=2, cp=2, ep=2), SP),
    ReplayCase("fsdp dp2 tp2", "fsdp", Topology(2, tp=2)),
    ReplayCase("megatron tp2 cp2 pp2 ep2", "megatron", Topology(1, tp=2, cp=2, pp=2, ep=2), {**SP, **AGAIN}),
    ReplayCase("megatron dp2 tp2 pp2 ep4", "megatron", Topology(2, tp=2, pp=2, ep=4), SP),
    ReplayCase("megatron dp2 cp2 pp2 ep2", "megatron", Topology(2, cp=2, pp=2, ep=2), AGAIN),
    ReplayCase("megatron dp2 tp2 cp2 ep4", "megatron", Topology(2, tp=2, cp=2, ep=4), {**SP, **AGAIN}),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """Steps, log-probs and weights of the fsdp backend on one rank, without packing or recomputation."""
    return run_case(0, ReplayCase("one rank", "fsdp", Topology(1), {"packing": "none"}), model)


def assert_alike(case: ReplayCase, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    names = ("train/loss", "train/grad_norm", "logprob/mismatch_mean", "logprob/mismatch_max")
    for rank in ranks:
        for got, wanted in zip(rank["steps"], expected["steps"], strict=True):
            assert {name: got[name] for name in names} == pytest.approx({n: wanted[n] for n in names}, rel=1e-4)
    for step, wanted in zip(ranks[0]["steps"], expected["steps"], strict=True):
        # The first microbatch, which is measured, has other rows with several replicas.
        measured = {name for name in wanted if name.startswith("routes/")}
        assert {name for name in step if name.startswith("routes/")} == measured and len(measured) == 8
        if case.topology.dp == 1:
            assert {n: step[n] for n in measured} == pytest.approx({n: wanted[n] for n in measured}, rel=1e-3)
    for dp in range(case.topology.dp):
        writer = ranks[case.topology.writer(dp)]
        torch.testing.assert_close(writer["logprobs"], expected["logprobs"], rtol=0, atol=2e-5)
        torch.testing.assert_close(writer["reference"], expected["reference"], rtol=0, atol=2e-5)
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(
            ranks[0]["weights"][name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n} {m}"
        )


def test_each_mesh_replays_as_one_rank_does(model: str, expected: dict[str, Any], tmp_path: Path) -> None:
    for case, ranks in outcomes(2, tmp_path / "run", SHORT, model):
        assert_alike(case, ranks, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_full_product(model: str, expected: dict[str, Any], tmp_path: Path, world: int) -> None:
    for case, ranks in outcomes(world, tmp_path / "run", PRODUCT, model):
        assert_alike(case, ranks, expected)
