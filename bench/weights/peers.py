"""Runs the processes of the weight benchmarks: trainers that publish weights, and engines that receive and load them.

Each process serves one request at a time from its pipe. A request is (method, arguments), and the answer is (whether it
failed, result or error, (start, end)). A trainer acts as train rank 0, which has all weights. An engine only receives
weights; vLLM itself runs in the driver (`vllm_updates.py`).
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import xxhash
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ...actors.weight_sync.inbox import WeightInbox
from ...actors.weight_sync.publisher import WeightPublisher
from ...actors.weight_sync.transports.factory import build_sender
from ...actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, SenderConfig, WeightUpdate
from ...codecs import messages
from ...codecs.memory import flat_bytes
from ...codecs.weights.gpu_scatter import device_digest
from ..models import change_bytes, digest_of, random_weights

ANSWER_TIMEOUT_S = 300.0
_GROUP_TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class PeerTask:
    """Settings of one process of a weight benchmark."""

    rank: int
    """Number of the process. In the benchmark of transports, 0 is the trainer and all others are engines."""
    device: str
    """Device of the process's weights, such as `cpu` or `cuda:0`."""
    dtype: str
    """Name of the weights' dtype."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


class Peer:
    """The driver's handle to one process of the benchmark."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """Start the process. make: picklable function that makes the served object in the process."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(make, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def name(self) -> str:
        """Name of the process in errors."""
        return f"the process {self._process.pid}"

    def start(self, method: str, *args: Any) -> None:
        """Start a call of a method in the process. `answer` returns its result."""
        self._pipe.send((method, args))

    def answer(self) -> tuple[Any, tuple[float, float]]:
        """Wait for the result of a started call, and return it with the call's start and end.

        Start and end are CLOCK_MONOTONIC seconds. Raises RuntimeError if the call raised an error, or if the process
        does not answer within ANSWER_TIMEOUT_S.
        """
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise RuntimeError(f"{self.name} did not answer within {ANSWER_TIMEOUT_S:g} s")
        try:
            failed, result, span = self._pipe.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.name} has ended") from error
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


def call_all(peers: Sequence[Peer], method: str, *args: Any) -> list[Any]:
    """Call a method in all processes at once, and return the results."""
    for peer in peers:
        peer.start(method, *args)
    return [peer.answer()[0] for peer in peers]


def serve(make: Callable[[], Any], pipe: Connection) -> None:
    """Make the served object in this process, and carry out the calls that come through `pipe` until `close`."""
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
        except Exception as error:  # The driver's call raises this error.
            found, failed = f"{method}: {type(error).__name__}: {error}", True
        pipe.send((failed, found, (start, time.monotonic())))


class _Host:
    """Base class of trainers and engines. It holds weights of random bytes and measures limits."""

    def __init__(self, task: PeerTask, size: str = "") -> None:
        """size: key of `models.WEIGHT_SHAPES`; "" if the subclass has other weights."""
        self.task, self.size = task, size
        self.device = torch.device(task.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.weights: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None

    def ready(self) -> int:
        """Create the weights, so that all their memory is in use before measurements begin. Returns their number of
        bytes."""
        self.weights = random_weights(self.size, self.task.torch_dtype, self.device)
        return sum(one.nbytes for one in self.weights.values())

    def digest(self) -> str:
        return digest_of(self.weights)

    def reset_peak(self) -> int:
        """Start measuring peak memory, and return the number of bytes that are resident now."""
        Path("/proc/self/clear_refs").write_text("5")
        return psutil.Process().memory_info().rss

    def peak(self) -> int:
        """Return the largest number of resident bytes since `reset_peak`, including shared memory."""
        line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("VmHWM"))
        return int(line.split()[1]) << 10

    # ---------------- These methods measure the limits of the machine.

    def join(self, path: str, world: int) -> None:
        """Join the default process group of `world` processes, for `broadcast`."""
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        store = FileStore(path, world)
        dist.init_process_group(kind, store=store, rank=self.task.rank, world_size=world, timeout=_GROUP_TIMEOUT)

    def leave(self) -> None:
        self._flat = None
        dist.destroy_process_group()

    def broadcast(self, num_bytes: int) -> float:
        """Take part in one broadcast of `num_bytes` bytes from rank 0 into warm memory, and return its seconds.

        Warm memory is memory that is already in use."""
        if self._flat is None:
            self._flat = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
            dist.broadcast(self._flat[:1], 0)
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        dist.broadcast(self._flat, 0)
        self._wait()
        return time.perf_counter() - start

    def copies(self, num_bytes: int, device: str, repeats: int) -> list[float]:
        """Copy `num_bytes` bytes to warm memory on `device` several times, and return the seconds of each copy.

        The first copy is not counted. On a CPU, one thread copies."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(repeats + 1):
            self._wait()
            start = time.perf_counter()
            target.copy_(source)
            self._wait()
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def writes(self, num_bytes: int, folder: str, repeats: int) -> list[float]:
        """Write `num_bytes` bytes to a temporary file in `folder` several times, and return the seconds of each write.

        A write ends when the bytes are on the disk. The first write is not counted."""
        data, seconds = torch.ones(num_bytes, dtype=torch.uint8).numpy().data, []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(data)
                os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Trainer(_Host):
    """Holds weights of random bytes in a trainer process, and publishes them as a train worker does."""

    from_host = False
    """True if each version is first copied to pinned host memory and then sent from there. A waking engine of a pool is
    updated in this way."""
    _publisher: WeightPublisher | None = None

    def change(self, version: int) -> None:
        """Set the weights to those of `version`. They differ from those of the previous version."""
        change_bytes(self.weights, version)

    def publisher(self, kind: str, sender: SenderConfig, bucket_bytes: int) -> None:
        """Create the publisher, which from now on sends the weights through the given transport. With `from_host`, it
        keeps the present version in host memory."""
        self.close()
        self._publisher = WeightPublisher(
            build_sender(kind, sender), sender.sync, bucket_bytes, keep_versions=self.from_host
        )
        self._keep()

    def _keep(self) -> None:
        """Write the weights into the host memory of the publisher, if there is one and `from_host` is true."""

    def open(self, version: int, receivers: Mapping[str, int]) -> bytes:
        """Announce a version. receivers: name of each engine -> number of its workers."""
        assert self._publisher is not None
        specs = {name: (one.dtype, tuple(one.shape)) for name, one in self.weights.items()}
        groups = [ReceiverGroup(name, workers) for name, workers in receivers.items()]
        return messages.encode(self._publisher.open(version, specs, groups, cached=self.from_host))

    def publish(self, update: bytes) -> dict[str, float]:
        """Send the weights, and return the seconds of each phase."""
        assert self._publisher is not None
        opened = messages.decode(update, WeightUpdate)
        if self.from_host:
            report = self._publisher.publish_cached(opened)
        else:
            report = self._publisher.publish(opened, iter(self.weights.items()))
        return {"fill_s": report.fill_s, "send_s": report.send_s, "gather_s": report.gather_s}

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class Engine(_Host):
    """Receives weights in a process, and copies them into parameters."""

    def __init__(self, task: PeerTask, size: str, receiver: ReceiverConfig) -> None:
        super().__init__(task, size)
        self._receiver = receiver

    def ready(self) -> int:
        num_bytes = super().ready()
        self._inbox = WeightInbox(self._receiver, 0)
        return num_bytes

    def prepare(self, update: bytes) -> None:
        self._inbox.prepare(messages.decode(update, WeightUpdate))

    def commit(self, version: int) -> None:
        """Copy the staged weights into the parameters, as an engine that loads in place does."""
        staged = self._inbox.staged
        assert staged is not None and staged.version == version
        for name, tensor in staged.named.items():
            self.weights[name].copy_(tensor)
        self._wait()
        del staged
        self._inbox.committed(version)

    def close(self) -> None:
        self._inbox.close()


class ModelTrainer(Trainer):
    """Holds a real model in a trainer process, with new random weights at every version.

    Its forward pass computes the expected log-probs of an engine's tokens. Its weights are the expected bytes of an
    engine's parameters.
    """

    def __init__(self, task: PeerTask, folder: str, from_host: bool) -> None:
        """folder: folder of the model's configuration."""
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__(task)
        self.from_host, self._folder, self._version = from_host, folder, -1
        config = AutoConfig.from_pretrained(folder)
        with torch.device(self.device):
            self._model: Any = AutoModelForCausalLM.from_config(config, dtype=task.torch_dtype).eval()
        self.weights = {name: one.detach() for name, one in self._model.named_parameters()}

    def ready(self) -> int:
        """Set the weights to version 0, and return their number of bytes."""
        self.change(0)
        return sum(one.nbytes for one in self.weights.values())

    def save(self) -> None:
        """Write the weights into the model's folder."""
        self._model.save_pretrained(self._folder)

    def change(self, version: int) -> None:
        """Set the weights to random numbers that differ from those of every other version."""
        generator = torch.Generator(self.device)
        for number, tensor in enumerate(self.weights.values()):
            generator.manual_seed(version << 16 | number)
            tensor.normal_(generator=generator)
            if tensor.ndim == 1:
                tensor.mul_(0.1).add_(1.0)
            else:
                tensor.mul_(tensor.shape[-1] ** -0.5)
        self._version = version
        self._keep()
        self._wait()

    def _keep(self) -> None:
        if self.from_host and self._publisher is not None:
            specs = {name: (one.dtype, tuple(one.shape)) for name, one in self.weights.items()}
            self._publisher.cache(self._version, specs, iter(self.weights.items()))

    def digests(self, tp: int, exact: bool) -> list[dict[str, str]]:
        """Return, for each of an engine's `tp` workers, the digests that its parameters must have, by vLLM's names."""
        return [digests(expected_parameters(self.weights, rank, tp), exact) for rank in range(tp)]

    def logprobs(self, version: int, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the log-prob of every token but the first of each sequence under `version`, float32 `[L - 1]`."""
        self.change(version)
        found = []
        for ids in sequences:
            tokens = torch.tensor([list(ids)], device=self.device)
            with torch.no_grad():
                scores = self._model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
            found.append(scores.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy())
        return found


def expected_parameters(weights: Mapping[str, torch.Tensor], rank: int, tp: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the vLLM name and the value of every parameter that worker `rank` of `tp` must have. The values are
    computed from the Hugging Face weights."""

    def rows(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return tensor.chunk(tp, dim)[rank]

    for name, tensor in weights.items():
        if name.endswith("q_proj.weight"):
            parts = [weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            yield name.replace("q_proj", "qkv_proj"), torch.cat([rows(part) for part in parts])
        elif name.endswith("mlp.gate_proj.weight"):
            parts = [tensor, weights[name.replace("gate_proj", "up_proj")]]
            yield name.replace("gate_proj", "gate_up_proj"), torch.cat([rows(part) for part in parts])
        elif name.endswith("experts.gate_up_proj"):
            halves = [rows(half, 1) for half in tensor.chunk(2, 1)]
            yield name.replace("gate_up_proj", "w13_weight"), torch.cat(halves, 1)
        elif name.endswith("experts.down_proj"):
            yield name.replace("down_proj", "w2_weight"), rows(tensor, 2)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            yield name, rows(tensor, 1)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            yield name, rows(tensor)
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            yield name, tensor


def digests(parameters: Iterator[tuple[str, torch.Tensor]], exact: bool) -> dict[str, str]:
    """Return a digest of each parameter's bytes, by name.

    exact: True for xxh3 on the CPU, which takes one or two seconds; False for `device_digest`, which takes 5 ms on a
    GPU.
    """
    found, host = {}, torch.empty(0, dtype=torch.uint8)
    for name, one in parameters:
        flat = flat_bytes(one.contiguous())
        if exact:
            if len(host) < len(flat):
                host = torch.empty(len(flat), dtype=torch.uint8)
            found[name] = xxhash.xxh3_128_hexdigest(host[: len(flat)].copy_(flat).numpy().data)
        else:
            found[name] = str(int(device_digest(flat)))
    return found


def parameter_digests(worker: Any, exact: bool) -> dict[str, str]:
    """Return the digests of all parameters of a vLLM worker. The function is sent to the worker and called there."""
    model = worker.model_runner.get_model()
    return digests(((vllm_name(name), one) for name, one in model.named_parameters()), exact)


def vllm_name(name: str) -> str:
    """Return a parameter's name without the part that some versions of vLLM insert after `experts.`."""
    return re.sub(r"(?<=\bexperts\.).*\.", "", name)
