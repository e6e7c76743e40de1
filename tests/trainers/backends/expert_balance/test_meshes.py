"""The balance of experts gives the same steps and weights on every mesh of both backends as on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.train.topology import Topology
from headrace.tests.trainers.backends.router_replay.replay_ranks import SP, ReplayCase, outcomes, run_case
from headrace.tests.trainers.backends.router_replay.routed_rows import save_moe

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

OFF = RouterReplayConfig()
MOE: dict[str, Any] = {"moe": {"aux_loss_coef": 0.3}}
FULL: dict[str, Any] = {**MOE, "recompute": "full"}
SELECTIVE: dict[str, Any] = {**MOE, "recompute": "selective"}
ONE = (
    ReplayCase("megatron", "megatron", Topology(1), MOE, OFF),
    ReplayCase("megatron recompute", "megatron", Topology(1), FULL, OFF),
    ReplayCase("megatron selective", "megatron", Topology(1), SELECTIVE, OFF),
)
SHORT = (
    ReplayCase("megatron tp2 sp", "megatron", Topology(1, tp=2), {**SP, **MOE}, OFF),
    ReplayCase("megatron pp2 recompute", "megatron", Topology(1, pp=2), FULL, OFF),
)
PRODUCT = (
    ReplayCase("fsdp dp2", "fsdp", Topology(2), FULL, OFF),
    ReplayCase("megatron cp2 recompute", "megatron", Topology(1, cp=2), FULL, OFF),
    ReplayCase("megatron ep2", "megatron", Topology(2, ep=2), MOE, OFF),
    ReplayCase("fsdp tp2", "fsdp", Topology(1, tp=2), MOE, OFF),
    ReplayCase("fsdp tp2 recompute", "fsdp", Topology(1, tp=2), FULL, OFF),
    ReplayCase("fsdp dp2 padded", "fsdp", Topology(2), {**MOE, "packing": "none"}, OFF),
    ReplayCase("megatron pp2", "megatron", Topology(1, pp=2), MOE, OFF),
    ReplayCase("megatron pp2 selective", "megatron", Topology(1, pp=2), SELECTIVE, OFF),
    ReplayCase("megatron tp2 sp recompute", "megatron", Topology(1, tp=2), {**SP, **FULL}, OFF),
    ReplayCase("megatron dp2 padded", "megatron", Topology(2), {**MOE, "packing": "none"}, OFF),
    ReplayCase("megatron tp2 cp2", "megatron", Topology(1, tp=2, cp=2), {**SP, **FULL}, OFF),
    ReplayCase("megatron tp2 pp2", "megatron", Topology(1, tp=2, pp=2), {**SP, **FULL}, OFF),
    ReplayCase("megatron cp2 pp2", "megatron", Topology(1, cp=2, pp=2), MOE, OFF),
    ReplayCase("megatron dp2 pp2 ep2", "megatron", Topology(2, pp=2, ep=2), SELECTIVE, OFF),
    ReplayCase("fsdp dp2 tp2", "fsdp", Topology(2, tp=2), MOE, OFF),
    ReplayCase("megatron tp2 cp2 pp2 ep2", "megatron", Topology(1, tp=2, cp=2, pp=2, ep=2), {**SP, **FULL}, OFF),
)
REPLAYED = (
    ReplayCase("fsdp dp2 replayed", "fsdp", Topology(2), FULL),
    ReplayCase("megatron tp2 sp replayed", "megatron", Topology(1, tp=2), {**SP, **FULL}),
    ReplayCase("megatron cp2 replayed", "megatron", Topology(1, cp=2), MOE),
    ReplayCase("megatron pp2 replayed", "megatron", Topology(1, pp=2), SELECTIVE),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """Steps, log-probs and weights of the fsdp backend on one rank, without packing or recomputation."""
    return run_case(0, ReplayCase("one rank", "fsdp", Topology(1), {"packing": "none", **MOE}, OFF), model)


def assert_alike(case: ReplayCase, ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    names = ["train/loss", "train/grad_norm", "logprob/mismatch_mean"]
    names += [name for name in expected["steps"][0] if name.startswith("moe/")]
    assert len(names) == 10
    for rank in ranks:
        for got, wanted in zip(rank["steps"], expected["steps"], strict=True):
            assert {name: got[name] for name in names} == pytest.approx({n: wanted[n] for n in names}, rel=1e-4), case
    for name, tensor in expected["weights"].items():
        torch.testing.assert_close(
            ranks[0]["weights"][name], tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n} {m}"
        )


def test_megatron_on_one_rank(model: str, expected: dict[str, Any]) -> None:
    quiet = run_case(0, ReplayCase("quiet", "fsdp", Topology(1), {"packing": "none"}, OFF), model)
    norms = [[step["train/grad_norm"] for step in run["steps"]] for run in (quiet, expected)]
    assert norms[0] != pytest.approx(norms[1], rel=0.05), "the auxiliary loss is a good part of the gradient"
    for case in ONE:
        assert_alike(case, [run_case(0, case, model)], expected)


def test_each_mesh_balances_as_one_rank_does(model: str, expected: dict[str, Any], tmp_path: Path) -> None:
    for case, ranks in outcomes(2, tmp_path / "run", SHORT, model):
        assert_alike(case, ranks, expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_full_product(model: str, expected: dict[str, Any], tmp_path: Path, world: int) -> None:
    for case, ranks in outcomes(world, tmp_path / "run", PRODUCT, model):
        assert_alike(case, ranks, expected)


@pytest.mark.slow
def test_meshes_count_replayed_experts(model: str, tmp_path: Path) -> None:
    one = run_case(0, ReplayCase("one rank", "fsdp", Topology(1), {"packing": "none", **MOE}), model)
    for case, ranks in outcomes(2, tmp_path / "run", REPLAYED, model):
        assert_alike(case, ranks, one)
