"""Runs train steps with and without offload cycles between them, on one or several ranks, for the tests of offload."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from headrace.actors.train.process_groups import ProcessGroups
from headrace.actors.train_backend import OffloadReport, TrainBackend
from headrace.tests.trainers.backends.backend_ranks import MEASURED, random_rows, weights_of
from headrace.tests.trainers.backends.mesh_ranks import Case, sent

CYCLES = 5


def step(case: Case, backend: TrainBackend, rank: int, seed: int) -> dict[str, float]:
    """Run one train step of two microbatches; return its metrics without those that depend on the machine."""
    place = case.topology.place(rank)
    rows = random_rows(seed, 8)[place.dp :: case.topology.dp]
    backend.begin_step(1.3)
    backend.accumulate([sent(part, case.topology, place, rows) for part in (rows[::2], rows[1::2])], 2)
    return {name: value for name, value in backend.finish_step().items() if name not in MEASURED}


def logprobs(case: Case, backend: TrainBackend, rank: int, *, reference: bool) -> list[torch.Tensor]:
    """Return the log-probs of one microbatch, the same on every replica."""
    return backend.logprobs([sent(random_rows(9, 4), case.topology, case.topology.place(rank))], 1, reference=reference)


def cycle(
    backend: TrainBackend, groups: ProcessGroups | None, *, experts: bool = False
) -> tuple[OffloadReport, OffloadReport]:
    """Offload the backend and destroy the groups, and undo both."""
    report = backend.offload()
    if groups is not None:
        dist.barrier()  # a rank that has just made its groups is still connecting to others that have theirs
        destroy_groups(backend, groups, experts=experts)
        groups.form_again(backend.group_holders())
    return report, backend.onload()


def destroy_groups(backend: TrainBackend, groups: ProcessGroups, *, experts: bool = False) -> float:
    """Destroy the groups, check that nothing refers to them any more, and return the seconds of the destruction.

    With `experts` nothing is checked: Megatron's token dispatcher keeps the graph of the last microbatch until the next
    one. No backward pass runs through it again, but its nodes refer to the groups that are shut down.
    """
    known = {name: weakref.ref(group) for group, name in distributed_c10d._world.pg_names.items()}
    seconds = groups.destroy(backend.group_holders())
    gc.collect()
    alive = {name: gc.get_referrers(ref()) for name, ref in known.items() if ref() is not None}
    assert experts or not alive, f"old groups are still referred to: {alive}"
    return seconds


def storage_bytes() -> int:
    """Return the number of bytes of the storages of all tensors in host memory that the garbage collector knows."""
    gc.collect()
    sizes = {}
    for value in gc.get_objects():
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            continue  # a sparse tensor has no storage
        if value.device.type == "cpu":
            storage = value.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def steps_with_cycles(rank: int, groups: ProcessGroups | None, case: Case, folder: Path) -> dict[str, Any]:
    """Return steps, log-probs and weights of two equal backends, of which the second is offloaded before each step."""
    found: dict[str, Any] = {"reports": []}
    for name in ("plain", "cycled"):
        with contextlib.closing(case.build(rank, folder)) as backend:
            metrics = []
            for number in range(CYCLES):
                if name == "cycled":
                    found["reports"].append(cycle(backend, groups, experts=case.model == "moe"))
                metrics.append(step(case, backend, rank, number))
            found[name] = {
                "steps": metrics,
                "logprobs": [logprobs(case, backend, rank, reference=reference) for reference in (False, True)],
                "weights": weights_of(backend),
            }
    return found


def run_cases(rank: int, groups: ProcessGroups, cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """Run `steps_with_cycles` for each case, one after the other in the same processes."""
    found = []
    for case in cases:
        found.append(steps_with_cycles(rank, groups, case, folder))
        groups.close()  # torch's caches keep device meshes, and these their groups, when a backend has gone
        groups.form()
    return found


def assert_bit_equal(found: dict[str, Any]) -> None:
    """Compare the two backends of `steps_with_cycles`."""
    plain, cycled = found["plain"], found["cycled"]
    assert cycled["steps"] == plain["steps"] and len(plain["steps"]) == CYCLES
    for one, other in zip(cycled["logprobs"], plain["logprobs"], strict=True):
        assert len(one) == len(other)
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    assert cycled["weights"].keys() == plain["weights"].keys()
    assert all(torch.equal(cycled["weights"][name], value) for name, value in plain["weights"].items())
