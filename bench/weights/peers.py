"""Processes of the weight benchmark: one trainer that publishes weights, and engines that receive and load them.

Each process serves one request at a time from its pipe. A request is (method, arguments), and the answer is
(whether it failed, result or error, (start, end)).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ...actors.weight_sync.inbox import WeightInbox
from ...actors.weight_sync.publisher import WeightPublisher
from ...actors.weight_sync.transports.factory import build_sender
from ...actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig, WeightUpdate
from ...codecs import messages
from .models import change, digest, random_weights, weight_shapes

ANSWER_TIMEOUT_S = 300.0
_GROUP_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class PeerTask:
    """Settings of one process of the weight benchmark."""

    rank: int
    """Number of the process; 0 is the trainer, all others are engines."""
    world: int
    """Total number of processes."""
    size: str
    """Size of the model, a key of `models.SHAPES`."""
    dtype: str
    """Name of the weights' dtype."""
    device: str
    """Kind of device, `cpu` or `cuda`. With `cuda`, the process uses the GPU `rank` modulo the number of GPUs."""
    kind: str
    """Kind of the weight transport."""
    sender: SenderConfig
    receiver: ReceiverConfig
    bucket_bytes: int

    @property
    def placed(self) -> torch.device:
        """Device that holds the weights of the process."""
        return (
            torch.device("cpu") if self.device == "cpu" else torch.device("cuda", self.rank % torch.cuda.device_count())
        )


class Peer:
    """The driver's handle to one process of the benchmark."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Start the process. make: picklable function that makes the served object in the process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, method: str, *args: Any) -> None:
        """Start a call of a method in the process. `answer` returns its result."""
        self._pipe.send((method, args))

    def answer(self) -> tuple[Any, tuple[float, float]]:
        """Wait for the result of a started call, and return it with the call's start and end. They are CLOCK_MONOTONIC
        seconds.

        Raises RuntimeError with the process's error, or when there is no answer within ANSWER_TIMEOUT_S.
        """
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"no answer within {ANSWER_TIMEOUT_S:g} s")
        failed, result, span = self._pipe.recv()
        if failed:
            raise RuntimeError(result)
        return result, span

    def call(self, method: str, *args: Any) -> tuple[Any, tuple[float, float]]:
        """Call a method and wait for its result. Returns what `answer` returns."""
        self.start(method, *args)
        return self.answer()

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process.is_alive():
            self._pipe.send(("close", ()))
            self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5)


def make_host(task: PeerTask) -> Any:
    """Return the object that a process serves: the trainer for rank 0, an engine for any other rank."""
    return _Trainer(task) if task.rank == 0 else _Engine(task)


def _serve(make: Callable[[], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    host = make()
    while True:
        method, args = pipe.recv()
        if method == "close":
            host.close()
            return
        start = time.monotonic()
        try:
            found, failed = getattr(host, method)(*args), False
        except Exception as error:  # raised by the driver's call
            found, failed = f"{method}: {type(error).__name__}: {error}", True
        pipe.send((failed, found, (start, time.monotonic())))


class _Host:
    """Base class of the trainer and the engines, with the methods that they share."""

    def __init__(self, task: PeerTask) -> None:
        self.task = task
        self.weights: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None

    def ready(self) -> None:
        """Create the weights, so that all of their memory is in use before measurements begin."""
        self.weights = random_weights(self.task.size, getattr(torch, self.task.dtype), self.task.placed)

    def digest(self) -> str:
        return digest(self.weights)

    def reset_peak(self) -> int:
        """Start measuring peak memory, and return the resident bytes now."""
        Path("/proc/self/clear_refs").write_text("5")
        return psutil.Process().memory_info().rss

    def peak(self) -> int:
        """Return the largest number of bytes resident since `reset_peak`, shared memory included."""
        line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) << 10

    # ------------------------------------------------------------ limits

    def join(self, path: str) -> None:
        """Join the default process group, which includes all processes, for `broadcast`."""
        store = FileStore(path, self.task.world)
        kind = "gloo" if self.task.device == "cpu" else "nccl"
        dist.init_process_group(
            kind, store=store, rank=self.task.rank, world_size=self.task.world, timeout=_GROUP_TIMEOUT
        )

    def broadcast(self, num_bytes: int) -> None:
        """Take part in one broadcast of `num_bytes` bytes from rank 0, into memory that is already in use ("warm")."""
        if self._flat is None or len(self._flat) != num_bytes:
            self._flat = torch.ones(num_bytes, dtype=torch.uint8, device=self.task.placed)
        dist.broadcast(self._flat, 0)
        _wait_for(self.task.placed)

    def leave(self) -> None:
        self._flat = None
        dist.destroy_process_group()


class _Trainer(_Host):
    def ready(self) -> None:
        super().ready()
        sender = build_sender(self.task.kind, self.task.sender)
        self._publisher = WeightPublisher(sender, self.task.sender.sync, self.task.bucket_bytes)

    def change(self, version: int) -> None:
        change(self.weights, version)

    def open(self, version: int, engines: int) -> bytes:
        specs = {name: (getattr(torch, self.task.dtype), dims) for name, dims in weight_shapes(self.task.size).items()}
        receivers = [ReceiverGroup(f"engine {rank}", 1) for rank in range(1, engines + 1)]
        return messages.encode(self._publisher.open(version, specs, receivers))

    def publish(self, update: bytes) -> None:
        self._publisher.publish(messages.decode(update, WeightUpdate), self._stream())

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def copy(self, num_bytes: int) -> None:
        """Copy `num_bytes` once into memory that is in use already ("warm"), with one CPU thread or on the GPU."""
        if self._flat is None or len(self._flat) != 2 * num_bytes:
            self._flat = torch.ones(2 * num_bytes, dtype=torch.uint8, device=self.task.placed)
        self._flat[num_bytes:].copy_(self._flat[:num_bytes])
        _wait_for(self.task.placed)

    def write(self, num_bytes: int, folder: str) -> None:
        """Write `num_bytes` to a temporary file in `folder`, and wait until they are on the disk."""
        if self._flat is None:
            self._flat = torch.ones(num_bytes, dtype=torch.uint8)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(self._flat[:num_bytes].numpy().data)
            os.fsync(file.fileno())

    def close(self) -> None:
        self._publisher.close()


class _Engine(_Host):
    def ready(self) -> None:
        super().ready()
        self._inbox = WeightInbox(self.task.receiver, 0)

    def prepare(self, update: bytes) -> None:
        self._inbox.prepare(messages.decode(update, WeightUpdate))

    def commit(self, version: int) -> None:
        """Copy the staged weights into the parameters, as an engine that loads in place does."""
        staged = self._inbox.staged
        assert staged is not None and staged.version == version
        for name, tensor in staged.named.items():
            self.weights[name].copy_(tensor)
        _wait_for(self.task.placed)
        del staged
        self._inbox.committed(version)

    def close(self) -> None:
        self._inbox.close()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
