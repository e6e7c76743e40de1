"""Runs router replay over meshes of both backends, one process for each rank, for the tests of parity."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.actors.engines.config import RouterReplayConfig
from headrace.actors.protocols import MicroBatch
from headrace.actors.train.step_rows import stage_batch, stage_fields
from headrace.actors.train.topology import Place, Topology
from headrace.codecs.tokens.packed_rows import slice_batch
from headrace.codecs.tokens.routes import ROUTES, RouteSpec
from headrace.tests.trainers.backends.backend_ranks import Row, backend_config, random_rows, run_on_ranks, weights_of
from headrace.tests.trainers.backends.router_replay.routed_rows import TEMPERATURE, random_routes, routed, spec_of

NUM_ROWS = 12
STEPS = 2
COLUMNS = ("input_ids", "response_mask", "rollout_logprobs", "prev_logprobs", "ref_logprobs")
SP: dict[str, Any] = {"sequence_parallel": True}
ON = RouterReplayConfig(enabled=True, verify="forward", verify_steps=STEPS, native_agreement_every=1)


@dataclasses.dataclass(frozen=True)
class ReplayCase:
    """One mesh of one backend, and the differences in its config."""

    name: str
    backend: str
    topology: Topology
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    replay: RouterReplayConfig = ON

    def build(self, rank: int, model: str) -> Any:
        """Build this rank's backend."""
        settings = {"packing": "packed", "backend": self.backend, "topology": self.topology, **self.changes}
        config = backend_config(model, router_replay=self.replay, **settings)
        if self.backend == "megatron":
            from headrace.trainers.backends.megatron.backend import MegatronBackend

            return MegatronBackend(config, rank, self.topology.world)
        from headrace.trainers.backends.fsdp.backend import FsdpBackend

        return FsdpBackend(config, rank, self.topology.world)


def sent(
    rows: Sequence[Row], routes: Sequence[np.ndarray], spec: RouteSpec, topology: Topology, place: Place
) -> MicroBatch:
    """Return what the rank at `place` receives: its pieces of the rows, its stage's columns and layers."""
    micro = routed(rows, routes, spec)
    batch = micro.batch
    if topology.cp > 1:
        batch = slice_batch(batch, micro.lengths, topology.pad_multiple, topology.cp, place.cp)
    names = stage_fields(topology, place, [name for name in (*COLUMNS, ROUTES) if name in batch], spec)
    batch = stage_batch(batch.subset(names), topology, place, spec)
    return dataclasses.replace(micro, batch=batch)


def shares(topology: Topology, place: Place, spec: RouteSpec, seed: int) -> list[MicroBatch]:
    """Return three microbatches of a replica's rows, one of them empty on the first replica."""
    rows = random_rows(seed, NUM_ROWS)
    routes = random_routes(rows, spec, seed)
    routes[3][1:] = spec.mark  # all but the first token of a row have no route
    mine = list(range(place.dp, NUM_ROWS, topology.dp))
    parts = [mine[:2], [], mine[2:]] if place.dp == 0 else [mine[:1], mine[1:2], mine[2:]]
    return [sent([rows[i] for i in part], [routes[i] for i in part], spec, topology, place) for part in parts]


def run_cases(rank: int, world: int, cases: Sequence[ReplayCase], model: str) -> dict[str, Any]:
    """Return the steps, log-probs and weights of all cases, which have `world` ranks, run one after the other."""
    torch.set_num_threads(1)
    return {case.name: run_case(rank, case, model) for case in cases}


def outcomes(
    world: int, folder: Path, cases: Sequence[ReplayCase], model: str
) -> Iterator[tuple[ReplayCase, list[dict[str, Any]]]]:
    """Run the cases with `world` ranks, and yield each with what its ranks return."""
    cases = [case for case in cases if case.topology.world == world]
    ranks = run_on_ranks(run_cases, world, folder, cases, model)
    for case in cases:
        yield case, [rank[case.name] for rank in ranks]


def run_case(rank: int, case: ReplayCase, model: str) -> dict[str, Any]:
    """Return the steps, log-probs and weights of one case on one rank."""
    spec, topology, place = spec_of(model), case.topology, case.topology.place(rank)
    with contextlib.closing(case.build(rank, model)) as backend:
        steps = []
        for step in range(STEPS):
            micros = shares(topology, place, spec, step)
            backend.begin_step(TEMPERATURE)
            backend.accumulate(micros[:1], 1)
            backend.accumulate(iter(micros[1:]), 2)
            steps.append(backend.finish_step())
        rows = random_rows(50, NUM_ROWS)
        micro = sent(rows, random_routes(rows, spec, 50), spec, topology, place)
        found: dict[str, Any] = {"steps": steps, "logprobs": backend.logprobs([micro], 1, temperature=TEMPERATURE)}
        found["reference"] = backend.logprobs([micro], 1, reference=True, temperature=TEMPERATURE)
        return {**found, "weights": weights_of(backend)}
