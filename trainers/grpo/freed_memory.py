"""Measures whether actors that sleep or have offloaded have really given their memory back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from ...actors.process.memory import ProcessMemory
from ...actors.protocols import OffloadReport
from ..cluster.calls import ActorFailed, gather, gather_each
from ..cluster.handles import EngineHandle, TrainHandle
from ..cluster.run_actors import RunActors

LOOK_S = 0.05
"""Seconds between two measurements of memory that has not fallen yet."""

H = TypeVar("H", bound=EngineHandle | TrainHandle)


def fallen(
    handles: Sequence[H], limit: Callable[[H, ProcessMemory], int | None], fall_s: float, timeout_s: float, key: str
) -> tuple[list[ProcessMemory], dict[H, str]]:
    """Measure actors until each is within its limit, for `fall_s` seconds at most. Returns what was measured last, and
    for each actor that is above its limit or could not be measured: handle -> what is wrong, as a clause.

    limit: function that returns the largest number of bytes that an actor may hold on GPUs, or None if that is not
    known. timeout_s: seconds within which an actor must answer. key: config key that sets the limit, for the clause.
    """
    deadline = time.monotonic() + fall_s
    found, failed, above = dict[H, ProcessMemory](), dict[H, str](), dict[H, str]()
    left = list(handles)
    while left:
        above = {}
        for handle, answer in zip(left, measured(left, timeout_s), strict=True):
            if isinstance(answer, ActorFailed):
                failed[handle] = f"could not be measured: {answer}"
                continue
            found[handle] = answer
            most = limit(handle, answer)
            if most is not None and answer.device_bytes > most:
                above[handle] = (
                    f"still holds {answer.device_bytes / 2**20:.0f} MiB of GPU memory after {fall_s:g} s, expected "
                    f"at most {most / 2**20:.0f} ({key})"
                )
        left = list(above)
        if time.monotonic() >= deadline:
            break
        if left:
            time.sleep(LOOK_S)
    return list(found.values()), failed | above


def residual_limit(held: ProcessMemory, residual_bytes: int, processes: int) -> int | None:
    """Return the largest number of bytes that an actor of so many processes may hold on a pool's GPUs while it sleeps;
    None if nobody can tell its processes from those of other runs there. residual_bytes: limit of one process."""
    return None if held.whole_device else residual_bytes * processes


class TrainerMemory:
    """The memory of a run's train workers, which goes to host memory and back."""

    def __init__(self, actors: RunActors, *, timeout_s: float, most_bytes: int, key: str) -> None:
        """timeout_s: seconds that a worker may take. most_bytes: GPU memory that a worker may keep after `offload`.
        key: config key that sets this limit."""
        self._actors = actors
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._key = key
        self._figures: dict[str, float] = {}

    @property
    def figures(self) -> dict[str, float]:
        """Figures of what the last `offload` and `onload` moved and held, of the slowest or fullest worker.

        They are `offload_gib`, `offload_copy_s`, `offload_memory_s` (giving GPU memory back) and `offload_groups_s`
        (destroying the process groups), the same of `onload`, `trainer_gib_offloaded` and `trainer_gib_onloaded`. Empty
        before the first."""
        return dict(self._figures)

    def onload(self) -> list[ProcessMemory]:
        """Have all train workers take their memory back; returns what each holds then. Raises ActorFailed if one
        fails."""
        workers = self._actors.workers
        reports = gather([worker.onload() for worker in workers], "onload", self._timeout_s)
        held = gather([worker.memory() for worker in workers], "onload", self._timeout_s)
        self._note("onload", reports, held)
        return held

    def offload(self, fall_s: float) -> list[ProcessMemory]:
        """Have all train workers offload, and wait until their GPU memory has fallen; returns what each holds then.
        Raises ActorFailed, naming the worker, if it does not fall within `fall_s` seconds."""
        workers = self._actors.workers
        reports = gather([worker.offload() for worker in workers], "offload", self._timeout_s)
        held, wrong = fallen(workers, lambda worker, held: self._most_bytes, fall_s, self._timeout_s, self._key)
        for worker, why in wrong.items():
            raise ActorFailed(f"offload: {worker.info} {why}")
        self._note("offload", reports, held)
        return held

    def _note(
        self, what: Literal["offload", "onload"], reports: Sequence[OffloadReport], held: list[ProcessMemory]
    ) -> None:
        self._figures |= {
            f"{what}_gib": max(report.bytes_moved for report in reports) / 2**30,
            f"{what}_copy_s": max(report.copy_s for report in reports),
            f"{what}_memory_s": max(report.memory_s for report in reports),
            f"{what}_groups_s": max(report.groups_s for report in reports),
            f"trainer_gib_{what}ed": max(one.held_bytes for one in held) / 2**30,
        }


def measured(handles: Sequence[EngineHandle | TrainHandle], timeout_s: float) -> list[ProcessMemory | ActorFailed]:
    """Return, in order, the memory that each actor holds now, or its failure."""
    return gather_each([handle.memory() for handle in handles], "memory", timeout_s)
