"""Weight sync in one process: the driver's own `WeightSync`, engine hosts in an event loop beside it, a real sender."""

from __future__ import annotations

import asyncio
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError, RayTaskError

from headrace.actors.engine_actor import EngineHost
from headrace.actors.engines.protocol import (
    CommitReport,
    Completion,
    KeysAndValues,
    PauseMode,
    Prepared,
    SamplingParams,
)
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.process.memory import ProcessMemory
from headrace.actors.process.own_process import ActorInfo
from headrace.actors.process.remote_methods import decode_arguments
from headrace.actors.protocols import OffloadReport
from headrace.actors.train.worker import TrainWorker
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.stream import SendReport
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, WeightUpdate
from headrace.codecs import messages
from headrace.codecs.weights.parameter_digests import ParameterDigests
from headrace.trainers.cluster import calls
from headrace.trainers.cluster.calls import DriverMeter
from headrace.trainers.cluster.engine_pool import Engine, EnginePool
from headrace.trainers.cluster.handles import EngineHandle, TrainHandle
from headrace.trainers.grpo.weight_sync import WeightSync

WEIGHTS = {"w": torch.arange(4000.0), "v": torch.ones(30)}
BUCKET_BYTES = 4096


class Process(ABC):
    """An actor as Ray's handle of it: every call is a future, and a killed one answers no more."""

    def __init__(self) -> None:
        self.call = self
        self.alive = True
        self._open: set[Future[bytes]] = set()

    def options(self, concurrency_group: str) -> Process:
        return self

    def remote(self, method: str, message: bytes, *actors: Any) -> Future[bytes]:
        if not self.alive:
            return _failed(RayActorError())
        future = self.start(method, message)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    @abstractmethod
    def start(self, method: str, message: bytes) -> Future[bytes]:
        """Begin a call of `method` with encoded arguments; the future has the encoded result."""

    def kill(self) -> None:
        self.alive = False
        for future in list(self._open):
            future.cancel()


class EngineProcess(Process, EngineHost):
    """Hosts an engine in the world's event loop."""

    def __init__(self, name: str, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        Process.__init__(self)
        self._name, self._hosted, self._loop = name, engine, loop

    def _build(self) -> Any:
        return self._hosted

    def start(self, method: str, message: bytes) -> Future[bytes]:
        return asyncio.run_coroutine_threadsafe(EngineHost.call(self, method, message), self._loop)


class TrainProcess(Process):
    """Train rank 0: a publisher over `ipc`, one thread for the main calls and one for each concurrency group."""

    def __init__(self, run_id: str, config: SyncConfig) -> None:
        super().__init__()
        self._publisher = WeightPublisher(IpcSender(run_id, config.timeout_s), config, BUCKET_BYTES)
        self._threads = {name: ThreadPoolExecutor(1) for name in ("main", "weights", "abort")}
        self._specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()}
        self.scale = 1.0
        self.on_weight: Callable[[str], None] = lambda name: None
        """Called before each weight is sent."""
        self.gathers = 0
        """Number of times that the weights were gathered."""
        self.offloaded = False
        self.held_bytes = 0
        """GPU memory that the process says it holds."""

    def start(self, method: str, message: bytes) -> Future[bytes]:
        function = getattr(TrainWorker, method, None)
        group = getattr(function, "concurrency_group", "main")
        arguments = () if function is None else decode_arguments(function, message)
        return self._threads[group].submit(lambda: messages.encode(getattr(self, method)(*arguments)))

    def info(self) -> ActorInfo:
        return ActorInfo.here("train worker 0")

    def open_update(self, version: int, receivers: Sequence[ReceiverGroup], base: int | None) -> WeightUpdate:
        return self._publisher.open(version, self._specs, receivers, base=base)

    def send_weights(self, update: WeightUpdate) -> SendReport:
        return self._publisher.publish(update, self._weights())

    def open_cached(self, version: int, receivers: Sequence[ReceiverGroup]) -> WeightUpdate:
        return self._publisher.open(version, self._specs, receivers, cached=True)

    def send_cached(self, update: WeightUpdate) -> SendReport:
        return self._publisher.publish_cached(update)

    def cache_weights(self, version: int) -> None:
        self._publisher.cache(version, self._specs, self._weights())

    def weight_digests(self, version: int) -> ParameterDigests:
        return self._publisher.digests(version)

    def offload(self) -> OffloadReport:
        self.offloaded = True
        return OffloadReport(0, 0.0, 0.0, 0.0, 0, 0)

    def onload(self) -> OffloadReport:
        self.offloaded = False
        return OffloadReport(0, 0.0, 0.0, 0.0, 0, 0)

    def memory(self) -> ProcessMemory:
        return ProcessMemory(self.held_bytes, 1)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert not self.offloaded
        self.gathers += 1
        for name, tensor in WEIGHTS.items():
            self.on_weight(name)
            yield name, tensor * self.scale

    def abort_update(self, reason: str) -> None:
        self._publisher.abort(reason)

    def sent(self) -> int:
        return self._publisher.sent

    def close(self) -> None:
        self.alive = False
        self._publisher.close()
        for thread in self._threads.values():
            thread.shutdown(wait=True)


class DirectEngine(ScriptedEngine):
    """An engine that receives during its commit, as vllm does without staging; a failed one leaves no whole version."""

    def __init__(self, *args: Any, receiver: ReceiverConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = receiver.engine
        self._inbox = WeightInbox(receiver, 0)
        self._update: WeightUpdate | None = None
        self._held = False
        self.partial = False
        self.damage = 0
        """Number of commits that are still to fail."""

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        if self._serves(update.version) and not self.partial:
            return "staged"
        await asyncio.to_thread(self._inbox.prepare, update)
        self._update = update
        return "joined"

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        update = self._update
        assert update is not None and update.version == version
        await super().pause(in_flight)
        self.loaded, self.partial = {}, True
        self.loaded = await asyncio.to_thread(self._receive, update)
        self._version, self.partial, self._differs = version, False, ""
        await self._go_on()
        return CommitReport(version, 0.0, 0.0, 0, 0)

    async def pause(self, mode: PauseMode = "wait") -> None:
        self._held = True
        await super().pause(mode)

    async def resume(self) -> None:
        self._held = False
        await self._go_on()

    async def _go_on(self) -> None:
        if not self._held and not self.partial:
            await super().resume()

    def _receive(self, update: WeightUpdate) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        for whole in self._inbox.arriving(update):
            named.update((name, tensor.clone()) for name, tensor in whole)
            if self.damage:
                self.damage -= 1
                raise RuntimeError("a bucket was damaged")
        return named

    async def drop_weights(self, version: int) -> None:
        self._inbox.drop(version)

    async def close(self) -> None:
        await super().close()
        self._inbox.close()


class World:
    """Engines and a trainer, and the driver's sync of them."""

    def __init__(self, config: SyncConfig, kinds: Sequence[type[ScriptedEngine]], latency_s: float) -> None:
        self.config = config
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._run_id = uuid.uuid4().hex[:8]
        self.hosted: list[Any] = [
            asyncio.run_coroutine_threadsafe(self._engine(kind, f"engine {n}", latency_s), self.loop).result()
            for n, kind in enumerate(kinds)
        ]
        self.processes = [EngineProcess(f"engine {n}", engine, self.loop) for n, engine in enumerate(self.hosted)]
        engines = [
            Engine(EngineHandle(lambda process=process: process, process._name, DriverMeter()), 1)
            for process in self.processes
        ]
        self.pool = EnginePool(engines, embedded=False)
        self.trainer = TrainProcess(self._run_id, config)
        self._worker = TrainHandle(lambda: self.trainer, "train worker 0", DriverMeter())
        self.sync = WeightSync(config, [self._worker], self.pool, lasting=True)

    async def _engine(self, kind: type[ScriptedEngine], name: str, latency_s: float) -> ScriptedEngine:
        receiver = ReceiverConfig(name, self.config)
        return kind(lambda *_: [5] * 20, latency_s=latency_s, receiver=receiver)

    def restart_trainer(self) -> None:
        """Put another process in the place of the train worker, which was killed."""
        self.trainer.close()
        self.trainer = TrainProcess(self._run_id, self.config)
        self._worker.restart()
        self.sync.forget()

    def request(self, engine: int, name: str) -> Future[list[Completion]]:
        """Begin a request, and return it once `engine` has taken it."""
        taken = threading.Event()

        async def generate() -> list[Completion]:
            work = asyncio.ensure_future(self.hosted[engine].generate(name, [1, 2], SamplingParams(max_new_tokens=20)))
            await asyncio.sleep(0)
            taken.set()
            return await work

        future = asyncio.run_coroutine_threadsafe(generate(), self.loop)
        assert taken.wait(10)
        return future

    def expect(self, version: int, scale: float) -> None:
        """Check that every engine serves the trainer's weights whole, as `version`."""
        for engine, hosted in zip(self.pool.engines, self.hosted, strict=True):
            assert (engine.version, hosted.version, engine.left_out, engine.broken) == (version, version, "", False)
            for name, tensor in WEIGHTS.items():
                torch.testing.assert_close(hosted.loaded[name], tensor * scale)

    def close(self) -> None:
        for engine in self.hosted:
            asyncio.run_coroutine_threadsafe(engine.close(), self.loop).result(10)
        self.trainer.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def world(
    monkeypatch: pytest.MonkeyPatch,
    kinds: Sequence[type[ScriptedEngine]],
    *,
    latency_s: float = 0.0,
    **sync: Any,
) -> Iterator[World]:
    """A world of engines of these kinds; `sync` are keys of the section."""
    monkeypatch.setattr(calls.ray, "wait", _wait)
    monkeypatch.setattr(calls.ray, "get", _get)
    monkeypatch.setattr(calls.ray, "kill", lambda process, no_restart: process.kill())
    made = World(SyncConfig(**{"staging": "none", "timeout_s": 5.0, **sync}), kinds, latency_s)
    try:
        yield made
    finally:
        made.close()


def _wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    done, _ = wait(references, timeout, FIRST_COMPLETED)
    return [reference for reference in references if reference in done][:num_returns], []


def _get(reference: Future[bytes], timeout: float) -> bytes:
    if reference.cancelled():
        raise RayActorError()
    error = reference.exception(timeout)
    if error is None:
        return reference.result()
    if isinstance(error, SystemExit):  # the process ended itself
        raise RayActorError()
    raise error if isinstance(error, RayActorError) else RayTaskError("call", str(error), error)


def _failed(error: Exception) -> Future[bytes]:
    future: Future[bytes] = Future()
    future.set_exception(error)
    return future
