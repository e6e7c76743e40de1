"""Runs train steps with and without offload cycles between them, on one or several ranks, for the tests of offload."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.spawn import start_processes

from headrace.actors.protocols import OffloadReport, TrainBackend
from headrace.actors.train.process_groups import ProcessGroups
from headrace.dataplane.topology import Topology
from headrace.tests.trainers.backends.backend_ranks import (
    MEASURED,
    VOCAB,
    backend_config,
    random_rows,
    weights_of,
)
from headrace.tests.trainers.backends.megatron.mesh_ranks import sent
from headrace.trainers.backends.factory import build_backend

CYCLES = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class OffloadCase:
    """One backend on one mesh."""

    backend: str
    topology: Topology
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        mesh = self.topology
        sizes = " ".join(f"{key}{getattr(mesh, key)}" for key in ("dp", "tp", "pp", "ep") if getattr(mesh, key) > 1)
        return " ".join(filter(None, (self.backend, sizes, *(f"{key}={value}" for key, value in self.changes.items()))))

    def build(self, rank: int, model: str) -> TrainBackend:
        """Build this rank's backend."""
        packing = {"packing": "packed"} if self.backend == "megatron" else {}
        config = backend_config(model, backend=self.backend, topology=self.topology, **packing, **self.changes)
        return build_backend(config, rank, self.topology.world)


def step(case: OffloadCase, backend: TrainBackend, rank: int, seed: int) -> dict[str, float]:
    """Run one train step of two microbatches; return its metrics without those that depend on the machine."""
    place = case.topology.place(rank)
    rows = random_rows(seed, 8)[place.dp :: case.topology.dp]
    backend.begin_step(1.3)
    backend.accumulate([sent(part, case.topology, place, rows) for part in (rows[::2], rows[1::2])], 2)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


def logprobs(case: OffloadCase, backend: TrainBackend, rank: int, *, reference: bool) -> list[torch.Tensor]:
    """Return the log-probs of one microbatch, the same on every replica."""
    return backend.logprobs([sent(random_rows(9, 4), case.topology, case.topology.place(rank))], 1, reference=reference)


def cycle(backend: TrainBackend, groups: ProcessGroups | None) -> tuple[OffloadReport, OffloadReport]:
    """Offload the backend and destroy the groups, check that nothing refers to them, and undo both."""
    known = [weakref.ref(group) for group in distributed_c10d._world.pg_names]
    report = backend.offload()
    if groups is not None:
        groups.destroy(backend.group_holders())
        gc.collect()
        assert [ref() for ref in known if ref() is not None] == [], "an old group is still referred to"
        groups.form_again(backend.group_holders())
    return report, backend.onload()


def storage_bytes(backend: TrainBackend) -> int:
    """Return the number of bytes of the storages of all tensors that the garbage collector finds."""
    seen = {}
    for value in gc.get_objects():
        if isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
            with contextlib.suppress(Exception):
                storage = value.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def steps_with_cycles(rank: int, groups: ProcessGroups | None, case: OffloadCase, model: str) -> dict[str, Any]:
    """Return the same steps of two backends, of which the second is offloaded after each, and their weights."""
    found: dict[str, Any] = {}
    for name, cycles in (("plain", 0), ("cycled", 1)):
        with contextlib.closing(case.build(rank, model)) as backend:
            metrics, reports = [], []
            for number in range(CYCLES):
                if cycles:
                    reports.append(cycle(backend, groups))
                metrics.append(step(case, backend, rank, number))
            found[name] = {
                "steps": metrics,
                "logprobs": [logprobs(case, backend, rank, reference=reference) for reference in (False, True)],
                "weights": weights_of(backend),
            }
            found["reports"] = reports
    return found


def run_with_groups(scenario: Callable[..., Any], world: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `scenario(rank, groups, *arguments)` in `world` processes joined by `ProcessGroups`; return the results."""
    folder.mkdir(parents=True, exist_ok=True)
    start_processes(_rank, (world, str(folder), scenario, arguments), world, start_method="forkserver")
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, scenario: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    groups = ProcessGroups(store, rank, world, timeout_s=TIMEOUT_S)
    groups.form()
    torch.save(scenario(rank, groups, *arguments), f"{folder}/result.{rank}")
    groups.close()
