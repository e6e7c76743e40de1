"""Experts change their layout from trainers to engines and back by the plan, in real processes and one process group.
The engine's workers are on GPUs of their own, or on the trainers'.

No process has more than its buffers and the largest slice beside what it sends or takes, which is measured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs.group_receiver import GroupReceiver
from headrace.actors.weight_sync.pairs.group_sender import GroupSender
from headrace.actors.weight_sync.pairs.neighbour_receiver import NeighbourReceiver
from headrace.actors.weight_sync.pairs.neighbour_sender import NeighbourSender
from headrace.actors.weight_sync.pairs.pair_sender import KIND, SLOTS, location_of
from headrace.actors.weight_sync.plan.arguments import PlanArguments, read_arguments
from headrace.actors.weight_sync.plan.regions import Party, Region, held
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup, WeightUpdate
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.plan.weight_layouts import expert_boxes, gated_experts
from headrace.tests.process_pool import FORKSERVER

EXPERTS, ROWS, HIDDEN, LAYERS = 8, 128, 1024, 2
SPECS = {
    f"{layer}.{name}": (torch.bfloat16, shape)
    for layer in range(LAYERS)
    for name, shape in (("gate_up", (EXPERTS, 2 * ROWS, HIDDEN)), ("down", (EXPERTS, HIDDEN, ROWS)))
}
WHOLE = 2 * EXPERTS * 2 * ROWS * HIDDEN
"""Bytes of the largest weight."""
BUCKET = 1 << 20
"""Bytes of a bucket of `sync.bucket_mib`, which all buffers of a process share."""
WAIT_S = 60.0
Tensors = dict[str, torch.Tensor]


def regions(layout: str, num: int, rank: int) -> Iterator[Region]:
    """Regions that a rank of `num` has. `ep`: its experts, stacked. `single`: its experts, each matrix a tensor. `tp`:
    its rows of all experts, gate above up, as vLLM has them."""
    size = EXPERTS // num
    mine = range(rank * size, (rank + 1) * size)
    for layer in range(LAYERS):
        gate_up, down = f"{layer}.gate_up", f"{layer}.down"
        if layout == "single":
            for rows, part in (((0, ROWS), "gate"), ((ROWS, 2 * ROWS), "up")):
                names = {expert: f"{layer}.{expert}.{part}" for expert in mine}
                yield from expert_boxes(gate_up, SPECS[gate_up][1], rows, names)
            names = {expert: f"{layer}.{expert}.down" for expert in mine}
            yield from expert_boxes(down, SPECS[down][1], (0, HIDDEN), names)
        elif layout == "ep":
            yield from gated_experts(gate_up, SPECS[gate_up][1], (mine.start, mine.stop), 1, 0, gate_up)
            yield from held(down, SPECS[down][1], [(0, num, rank)])
        else:
            yield from gated_experts(gate_up, SPECS[gate_up][1], (0, EXPERTS), num, rank, gate_up)
            yield from held(down, SPECS[down][1], [(2, num, rank)])


def local(layout: str, num: int, rank: int, version: int) -> Tensors:
    """The tensors that a rank has in a version, cut by torch instead of by regions."""
    generator = torch.Generator().manual_seed(version)
    found: Tensors = {}
    for name, (dtype, shape) in SPECS.items():
        whole = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16).view(dtype)
        own = whole.chunk(num)[rank]
        if layout == "single":
            first, layer = rank * EXPERTS // num, name.partition(".")[0]
            for number, expert in enumerate(own, first):
                parts = zip(("gate", "up"), expert.chunk(2), strict=True) if "gate_up" in name else [("down", expert)]
                found |= {f"{layer}.{number}.{part}": one.clone() for part, one in parts}
        elif layout == "ep":
            found[name] = own.clone()
        elif "gate_up" in name:
            found[name] = torch.cat([half.chunk(num, 1)[rank] for half in whole.chunk(2, 1)], 1)
        else:
            found[name] = whole.chunk(num, 2)[rank].clone()
    return found


class Memory:
    """The largest number of bytes of a process, or of its tensors on a GPU, since the measurement began."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        if self._gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            ctypes.CDLL(None).malloc_trim(0)  # A tensor must not fit into memory that is free and still counted.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = self._resident("VmRSS")

    def _resident(self, field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10

    @property
    def beyond(self) -> int:
        return (torch.cuda.max_memory_allocated() if self._gpu else self._resident("VmHWM")) - self._before


def open_end(trainer: bool, rank: int, key: bytes, device: torch.device, shared: bool) -> Any:
    """The sender of a rank, or the receiver of a worker. shared: whether both are on the same GPU."""
    gpu = "" if device.type == "cuda" else f"gpu {rank}"
    if trainer:
        own = (rank, "127.0.0.1", key, WAIT_S, device)
        return NeighbourSender(*own, gpu) if shared else GroupSender(*own)
    return NeighbourReceiver("engine", rank, key, device, gpu) if shared else GroupReceiver("engine", rank, key, device)


def buffers_of(end: Any) -> int:
    """Bytes of the buffers that an end keeps between updates, apart from what a worker maps."""
    kept = [] if end._group is None else [*end._group.buffers(0)]
    slots = getattr(end, "_slots", None)
    return sum(one.nbytes for one in (*kept, *getattr(slots, "slots", ())))


def serve(pipe: Connection, trainer: bool, num: int, rank: int, key: bytes, device_name: str, shared: bool) -> None:
    """Take part in updates until the pipe is closed."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(-8, 1)  # M_ARENA_MAX: threads share their free memory.
    libc.mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: a tensor's memory is returned when it is freed.
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with ExitStack() as stack:
        end = open_end(trainer, rank, key, device, shared)
        stack.callback(end.close if trainer or shared else end.leave)
        if trainer:
            pipe.send(end.address)
        while True:
            try:
                update, layout = pipe.recv()
            except EOFError:
                return
            tensors = {name: one.to(device) for name, one in local(layout, num, rank, update.version).items()}
            expected = {}
            if not trainer:
                expected, tensors = tensors, {name: torch.full_like(one, -1.0) for name, one in tensors.items()}
            _, plan = read_arguments(update.plan)
            held_before = buffers_of(end)
            memory = Memory(device)
            (end.send if trainer else end.receive)(update, plan, rank, tensors)
            wrong = [
                name
                for name, one in expected.items()
                if not torch.equal(tensors[name].view(torch.int16), one.view(torch.int16))
            ]
            pipe.send((wrong, memory.beyond + held_before))


class Fleet:
    """Processes of trainer ranks and of the workers of an engine."""

    def __init__(self, num: int, devices: list[str], shared: bool) -> None:
        self._num, self._version, key = num, 0, new_key()
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for index, device in enumerate(devices):
            ours, theirs = FORKSERVER.Pipe()
            task = (theirs, index < num, num, index % num, key, device, shared)
            process = FORKSERVER.Process(target=serve, args=task, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._addresses = [self._answer(pipe) for pipe in self._pipes[:num]]

    def _answer(self, pipe: Connection) -> Any:
        assert pipe.poll(WAIT_S), "a process does not answer"
        return pipe.recv()

    def update(self, source: str, target: str) -> int:
        """Send a version from one layout to another, and return the largest memory of a process beyond its tensors."""
        self._version += 1
        num = self._num
        senders, receivers = (
            tuple(Party(f"{kind} {rank}", tuple(regions(layout, num, rank))) for rank in range(num))
            for kind, layout in (("trainer", source), ("engine", target))
        )
        plan = PlanArguments.of(SPECS, senders, receivers, BUCKET // SLOTS).message
        location = location_of(self._version, self._addresses)
        groups = (ReceiverGroup("engine", num),)
        update = WeightUpdate(self._version, None, KIND, location, 0, groups, WAIT_S, plan=plan)
        for index, pipe in enumerate(self._pipes):
            pipe.send((update, source if index < num else target))
        told = [self._answer(pipe) for pipe in self._pipes]
        assert [wrong for wrong, _ in told] == [[]] * len(told)
        return max(beyond for _, beyond in told)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


@pytest.mark.parametrize("shared", [False, True], ids=["own gpus", "shared gpus"])
@pytest.mark.parametrize("gpus", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.processes
def test_experts_change_their_layout_byte_for_byte_in_bounded_memory(gpus: bool, shared: bool) -> None:
    num = torch.cuda.device_count() // (1 if shared else 2) if gpus else 4
    if gpus and num < 2 - shared:
        pytest.skip("needs a GPU" if shared else "needs four GPUs")
    num = min(num, 4)
    slice_bytes = WHOLE // num
    limit = 2 * BUCKET + slice_bytes
    assert limit < WHOLE or num == 1, "a whole weight would be noticed"
    numbers = [index % num if shared else index for index in range(2 * num)]
    fleet = Fleet(num, [f"cuda:{number}" if gpus else "cpu" for number in numbers], shared)
    try:
        fleet.update("ep", "tp")  # The processes then have loaded all code.
        cases = ("ep", "tp"), ("tp", "ep"), ("ep", "ep"), ("single", "tp"), ("tp", "single"), ("single", "ep")
        for source, target in cases:
            beyond = fleet.update(source, target)
            print(f"{source} {num} to {target} {num}: {beyond / BUCKET:.2f} buckets beyond the tensors")
            assert beyond <= limit, (source, target, beyond, limit)
    finally:
        fleet.close()
