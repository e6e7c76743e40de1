"""Tests that replayed routes and balanced experts give on every mesh of both backends what they give on one rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.train_backend import MicroBatch
from headrace.codecs.tokens.routes import RouteSpec
from headrace.tests.trainers.backends.backend_ranks import TEMPERATURE, random_rows, run_on_ranks, weights_of
from headrace.tests.trainers.backends.experts.routed_rows import random_routes, routed, spec_of
from headrace.tests.trainers.backends.mesh_ranks import Case, cases, piece

pytestmark = [pytest.mark.megatron, pytest.mark.processes]

NUM_ROWS, STEPS = 12, 2
Ranks = list[dict[str, Any]]
Expected = Callable[[str], dict[str, Any]]
ON = RouterReplayConfig(enabled=True, verify="forward", verify_steps=STEPS, native_agreement_every=1)
REPLAY: dict[str, Any] = {"packing": "packed", "router_replay": ON}
MOE: dict[str, Any] = {"packing": "packed", "moe": {"aux_loss_coef": 0.3}}
SHORT = {
    "replay": cases("megatron", REPLAY, routed="dp2, tp2 sp, cp2, pp2 recompute, dp2 ep2"),
    "balance": cases("megatron", MOE, routed="tp2 sp, pp2 recompute"),
}
PRODUCT = {
    "replay": (
        *cases("fsdp", REPLAY, routed="dp2, dp2 padded recompute, tp2, tp2 recompute, dp2 tp2"),
        *cases("megatron", REPLAY, routed="pp2, dp2 padded, dp2 recompute, cp2 recompute, dp2 ep2 recompute"),
        *cases("megatron", REPLAY, routed="tp2 sp recompute, tp2 pp2 sp recompute, cp2 pp2, dp2 pp2 ep2 recompute"),
        *cases("megatron", REPLAY, routed="tp2 cp2 ep2 sp, tp2 cp2 pp2 ep2 sp recompute, dp2 tp2 pp2 ep4 sp"),
        *cases("megatron", REPLAY, routed="dp2 cp2 pp2 ep2 recompute, dp2 tp2 cp2 ep4 sp recompute"),
    ),
    "balance": (
        *cases("fsdp", MOE, routed="dp2 recompute, tp2, tp2 recompute, dp2 padded, dp2 tp2"),
        *cases("megatron", MOE, routed="cp2 recompute, dp2 ep2, pp2, pp2 selective, tp2 sp recompute, dp2 padded"),
        *cases("megatron", MOE, routed="tp2 cp2 sp recompute, tp2 pp2 sp recompute, cp2 pp2, dp2 pp2 ep2 selective"),
        *cases("megatron", MOE, routed="tp2 cp2 pp2 ep2 sp recompute"),
    ),
}
REPLAYED = (
    *cases("fsdp", REPLAY | MOE, routed="dp2 recompute"),
    *cases("megatron", REPLAY | MOE, routed="tp2 sp recompute, cp2, pp2 selective"),
)


def shares(case: Case, rank: int, spec: RouteSpec, seed: int) -> list[MicroBatch]:
    """Return three microbatches of a replica's rows, one of them empty on the first replica."""
    topology, place = case.topology, case.topology.place(rank)
    rows = random_rows(seed, NUM_ROWS)
    routes = random_routes(rows, spec, seed)
    routes[3][1:] = spec.mark  # all but the first token of a row have no route
    mine = list(range(place.dp, NUM_ROWS, topology.dp))
    parts = [mine[:2], [], mine[2:]] if place.dp == 0 else [mine[:1], mine[1:2], mine[2:]]
    micros = [routed([rows[i] for i in part], [routes[i] for i in part], spec) for part in parts]
    return [piece(micro, topology, place, spec) for micro in micros]


def run_case(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    """Return the steps, log-probs and weights of one case on one rank."""
    spec = spec_of(f"{folder}/{case.model}")
    with contextlib.closing(case.build(rank, folder)) as backend:
        steps = []
        for step in range(STEPS):
            micros = shares(case, rank, spec, step)
            backend.begin_step(TEMPERATURE)
            backend.accumulate(micros[:1], 1)
            backend.accumulate(iter(micros[1:]), 2)
            steps.append(backend.finish_step())
        rows = random_rows(50, NUM_ROWS)
        micro = piece(routed(rows, random_routes(rows, spec, 50), spec), case.topology, case.topology.place(rank), spec)
        found: dict[str, Any] = {"steps": steps, "logprobs": backend.logprobs([micro], 1, temperature=TEMPERATURE)}
        found["reference"] = backend.logprobs([micro], 1, reference=True, temperature=TEMPERATURE)
        return {**found, "weights": weights_of(backend)}


def run_cases(rank: int, world: int, chosen: Sequence[Case], folder: Path) -> dict[str, Any]:
    """Return the results of all cases, which have `world` ranks, run one after the other."""
    return {case.name: run_case(rank, case, folder) for case in chosen}


def outcomes(world: int, run: Path, folder: Path, chosen: Sequence[Case]) -> Iterator[tuple[Case, Ranks]]:
    """Run the cases with `world` ranks, and yield each with what its ranks return."""
    chosen = [case for case in chosen if case.topology.world == world]
    ranks = run_on_ranks(run_cases, world, run, chosen, folder)
    for case in chosen:
        yield case, [rank[case.name] for rank in ranks]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    """What the fsdp backend gives on one rank, without packing or recomputation, for each kind of test."""
    kinds = {"replay": REPLAY, "balance": MOE, "both": REPLAY | MOE, "neither": {}}
    return functools.cache(lambda kind: run_case(0, Case("fsdp routed padded", kinds[kind]), folder))


def assert_alike(kind: str, case: Case, ranks: Ranks, expected: dict[str, Any]) -> None:
    names = ["train/loss", "train/grad_norm", "logprob/mismatch_mean"]
    names += ["logprob/mismatch_max"] if kind == "replay" else []
    names += [name for name in expected["steps"][0] if name.startswith("moe/")]
    assert len(names) == (4 if kind == "replay" else 10)
    for rank in ranks:
        for got, wanted in zip(rank["steps"], expected["steps"], strict=True):
            assert {name: got[name] for name in names} == pytest.approx({n: wanted[n] for n in names}, rel=1e-4), case
    for name, tensor in expected["weights"].items():
        found = ranks[0]["weights"][name]
        torch.testing.assert_close(found, tensor, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n} {m}")
    if kind == "replay":
        assert_replayed(case, ranks, expected)


def assert_replayed(case: Case, ranks: Ranks, expected: dict[str, Any]) -> None:
    for step, wanted in zip(ranks[0]["steps"], expected["steps"], strict=True):
        # The first microbatch, which is measured, has other rows with several replicas.
        measured = {name for name in wanted if name.startswith("routes/")}
        assert {name for name in step if name.startswith("routes/")} == measured and len(measured) == 8
        if case.topology.dp == 1:
            assert {n: step[n] for n in measured} == pytest.approx({n: wanted[n] for n in measured}, rel=1e-3)
    for dp in range(case.topology.dp):
        writer = ranks[case.topology.writer(dp)]
        for name in ("logprobs", "reference"):
            torch.testing.assert_close(writer[name], expected[name], rtol=0, atol=2e-5)


def test_megatron_balances_on_one_rank(folder: Path, expected: Expected) -> None:
    norms = [[step["train/grad_norm"] for step in expected(kind)["steps"]] for kind in ("neither", "balance")]
    assert norms[0] != pytest.approx(norms[1], rel=0.05), "the auxiliary loss is a good part of the gradient"
    for case in cases("megatron", MOE, routed=", recompute, selective"):
        assert_alike("balance", case, [run_case(0, case, folder)], expected("balance"))


@pytest.mark.parametrize("kind", SHORT)
def test_each_mesh_does_as_one_rank_does(
    kind: str, folder: Path, tmp_path: Path, expected: Callable[[str], dict[str, Any]]
) -> None:
    for case, ranks in outcomes(2, tmp_path, folder, SHORT[kind]):
        assert_alike(kind, case, ranks, expected(kind))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kind", PRODUCT)
def test_the_full_product(
    kind: str, world: int, folder: Path, tmp_path: Path, expected: Callable[[str], dict[str, Any]]
) -> None:
    for case, ranks in outcomes(world, tmp_path, folder, PRODUCT[kind]):
        assert_alike(kind, case, ranks, expected(kind))


@pytest.mark.slow
def test_meshes_count_replayed_experts(folder: Path, tmp_path: Path, expected: Expected) -> None:
    for case, ranks in outcomes(2, tmp_path, folder, REPLAYED):
        assert_alike("both", case, ranks, expected("both"))
