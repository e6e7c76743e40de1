"""Times how a train backend gives its GPU back and takes it again, against a copy over the link between host and GPU.

It runs in a process for each rank. What communicators of NCCL cost is measured apart, with one group of all ranks that
is made and destroyed again.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from headrace.bench.records import note
from headrace.bench.train_steps.by_hand import LOSS, micro_batch, random_rows
from headrace.codecs.memory import flat_bytes
from headrace.trainers.backends.config import BackendConfig, TrainerConfig
from headrace.trainers.backends.factory import build_backend

_TIMEOUT = timedelta(seconds=300)
_LINK_BYTES = 2 << 30
_ROWS = (700, 300, 900, 100)


class SwitchedBackend(Protocol):
    """The methods of a `TrainBackend` that switching needs."""

    def offload(self) -> None:
        """Move everything to host memory."""
        ...

    def onload(self) -> None:
        """Bring everything back."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full tensor of each weight."""
        ...


@dataclass(frozen=True, slots=True)
class SwitchTask:
    """Settings of the processes of the trainer."""

    model: str
    """Path of the model folder."""
    vocabulary: int
    """Number of tokens of which the rows of a step are drawn."""
    backend: str
    """Train backend, `fsdp` or `megatron`."""
    world: int
    """Number of ranks, each on a GPU of its own."""
    cycles: int
    folder: str
    """Folder for the rendezvous, the notes and the figures of each rank."""

    @property
    def notes(self) -> Path:
        """File to which rank 0 appends the phases."""
        return Path(self.folder, "notes.jsonl")


@dataclass(frozen=True, slots=True)
class SwitchFigures:
    """Figures of one rank. Those of the first cycle are left out of the lists, because host memory is pinned then."""

    num_bytes: int
    """Bytes on the device that `offload` freed."""
    first_offload_s: float
    """Seconds of the first `offload`."""
    offload_s: tuple[float, ...]
    onload_s: tuple[float, ...]
    to_host_s: float
    """Seconds that a copy of `num_bytes` to pinned host memory takes over the measured link."""
    to_device_s: float
    """Seconds that a copy of `num_bytes` from pinned host memory takes."""
    group_teardown_s: float
    """Seconds to destroy one process group of all ranks."""
    group_rebuild_s: float
    """Seconds to make one process group of all ranks and its first all-reduce."""
    growth_bytes: int
    """Bytes in use on the device after the last cycle beyond those after the first."""
    same: bool
    """True if all weights had the same bits after the last cycle as before the first."""
    grad_norm: float
    """Gradient norm of a step after the last cycle."""

    @property
    def offload_vs_link(self) -> float:
        return statistics.median(self.offload_s) / self.to_host_s

    @property
    def onload_vs_link(self) -> float:
        return statistics.median(self.onload_s) / self.to_device_s


def run_rank(rank: int, task: SwitchTask) -> None:
    """Measure one rank and write its figures into the task's folder. Collective."""

    def phase(name: str) -> None:
        if rank == 0:
            note(task.notes, phase=f"trainer: {name}")

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    address = f"file://{task.folder}/rendezvous"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=task.world, timeout=_TIMEOUT)
    phase("process groups")
    group = time_group(device, task.cycles)
    phase("building the backend")
    keys = {"lr": 1e-5, "dp": task.world, "backend": task.backend, "packing": "packed", "mixed_precision": True}
    backend = build_backend(BackendConfig(task.model, TrainerConfig.model_validate(keys), LOSS), rank, task.world)

    def step() -> float:
        rows = random_rows(rank, _ROWS, task.vocabulary)
        backend.begin_step()
        backend.accumulate(iter([micro_batch(rows, range(len(_ROWS)))]), 1)
        return backend.finish_step()["train/grad_norm"]

    phase("first step")
    step()  # the optimizer makes its state in the first step
    figures = measure_switches(cast(SwitchedBackend, backend), step, device, task.cycles, group, phase)
    path = _path(task.folder, rank)
    path.with_suffix(".part").write_text(json.dumps(asdict(figures)))
    path.with_suffix(".part").replace(path)  # whole or not there, as this process may be ended
    backend.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def read_figures(folder: str, rank: int) -> SwitchFigures | None:
    """Return the figures that `run_rank` wrote; None if it has not come so far."""
    path = _path(folder, rank)
    if not path.exists():
        return None
    found = json.loads(path.read_text())
    offload_s, onload_s = (tuple(found.pop(name)) for name in ("offload_s", "onload_s"))
    return SwitchFigures(**found, offload_s=offload_s, onload_s=onload_s)


def _path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")


def measure_switches(
    backend: SwitchedBackend,
    step: Callable[[], float],
    device: torch.device,
    cycles: int,
    group: tuple[float, float],
    phase: Callable[[str], None],
) -> SwitchFigures:
    """Offload and onload `cycles` times, at least twice, and return the figures of this rank. Collective.

    step: makes a train step and returns its gradient norm. group: seconds to destroy and to make a process group.
    phase: function that is called with the name of each phase.
    """
    before, held = checksum(backend), used_bytes(device)
    offloads, onloads, freed, after_first = [], [], 0, 0
    for cycle in range(cycles):
        phase(f"cycle {cycle + 1} of {cycles}")
        offloads.append(_seconds(backend.offload, device))
        freed = held - used_bytes(device)
        onloads.append(_seconds(backend.onload, device))
        if cycle == 0:
            after_first = used_bytes(device)
    phase("weights, link and a last step")
    growth, same = used_bytes(device) - after_first, checksum(backend) == before
    to_host, to_device = link_bytes_per_s(device)
    return SwitchFigures(
        num_bytes=freed, first_offload_s=offloads[0], offload_s=tuple(offloads[1:]), onload_s=tuple(onloads[1:]),
        to_host_s=freed / to_host, to_device_s=freed / to_device,
        group_teardown_s=group[0], group_rebuild_s=group[1],
        growth_bytes=growth, same=same, grad_norm=step(),
    )  # fmt: skip


def time_group(device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median seconds to destroy a process group of all ranks, and to make one and its first all-reduce.
    Collective."""
    teardowns, rebuilds, one = [], [], torch.ones(1, device=device)
    for _ in range(repeats):
        started = time.perf_counter()
        group = dist.new_group()
        dist.all_reduce(one, group=group)
        wait_for(device)
        made = time.perf_counter()
        assert isinstance(group, dist.ProcessGroup), "this group has all ranks"
        dist.destroy_process_group(group)
        teardowns.append(time.perf_counter() - made)
        rebuilds.append(made - started)
    return statistics.median(teardowns), statistics.median(rebuilds)


def link_bytes_per_s(device: torch.device, num_bytes: int = _LINK_BYTES, repeats: int = 5) -> tuple[float, float]:
    """Return the bytes per second of copies from the device to pinned host memory, and back. They are medians, after
    one copy that is not counted."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    here = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    rates = []
    for to, source in ((here, there), (there, here)):
        seconds = [_seconds(lambda to=to, source=source: to.copy_(source), device) for _ in range(repeats + 1)]
        rates.append(num_bytes / statistics.median(seconds[1:]))
    return rates[0], rates[1]


def checksum(backend: SwitchedBackend) -> dict[str, int]:
    """Return the sum of the bytes of each weight by name; of empty tensors, which ranks other than 0 get, it is 0.
    Collective."""
    return {name: int(flat_bytes(value.contiguous()).sum(dtype=torch.int64)) for name, value in backend.weights()}


def used_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device by this process's tensors; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def wait_for(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - started


def wrong(figures: SwitchFigures) -> list[str]:
    """Return a sentence for each figure that shows that switching changed something."""
    found = []
    if figures.num_bytes <= 0:
        found.append("the trainer's offload freed no memory of its GPU")
    if not figures.same:
        found.append("the trainer's weights changed while it was offloaded and brought back")
    if figures.growth_bytes > 0.01 * figures.num_bytes:
        found.append(f"the trainer holds {figures.growth_bytes} bytes more on its GPU after the last cycle")
    if not (math.isfinite(figures.grad_norm) and figures.grad_norm > 0):
        found.append(f"the step after the last cycle has a gradient norm of {figures.grad_norm:g}")
    return found
