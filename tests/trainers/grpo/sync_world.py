"""Weight sync in one process: the driver's own `WeightSync`, engine hosts in an event loop beside it, a real sender."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from headrace.actors.adapters.spec import AdapterSpec
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
from headrace.actors.train_backend import OffloadReport
from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.publisher import WeightPublisher
from headrace.actors.weight_sync.stream import SendReport
from headrace.actors.weight_sync.transports.ipc import IpcSender
from headrace.actors.weight_sync.transports.protocol import ReceiverConfig, ReceiverGroup, WeightUpdate
from headrace.codecs.weights.parameter_digests import ParameterDigests
from headrace.testing.cluster import FakeCluster, HostedEngine, HostedTrainer
from headrace.trainers.cluster.calls import DriverMeter
from headrace.trainers.cluster.engine_pool import Engine, EnginePool
from headrace.trainers.cluster.handles import EngineHandle, TrainHandle
from headrace.trainers.grpo.weight_sync import WeightSync

WEIGHTS = {"w": torch.arange(4000.0), "v": torch.ones(30)}
BUCKET_BYTES = 4096


class Trainer:
    """Train rank 0 without a model: a publisher over `ipc`."""

    def __init__(self, run_id: str, config: SyncConfig, adapter: AdapterSpec | None = None) -> None:
        sender = IpcSender(run_id, config.timeout_s)
        self._publisher = WeightPublisher(sender, config, BUCKET_BYTES, adapter=adapter)
        self._specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in WEIGHTS.items()}
        self.scale = 1.0
        self.on_weight: Callable[[str], None] = lambda name: None
        """Called before each weight is sent."""
        self.gathers = 0
        """Number of times that the weights were gathered."""
        self.offloaded = False
        self.held_bytes = 0
        """GPU memory that the process says it holds."""

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

    def abort_update(self, reason: str, update: WeightUpdate | None) -> None:
        self._publisher.abort(reason)

    def sent(self) -> int:
        return self._publisher.sent

    def close(self) -> None:
        self._publisher.close()


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

    def __init__(
        self,
        config: SyncConfig,
        kinds: Sequence[type[ScriptedEngine]],
        latency_s: float,
        adapter: AdapterSpec | None = None,
    ) -> None:
        self.cluster = FakeCluster()
        self.config = config
        self._run_id = uuid.uuid4().hex[:8]
        made = [self.cluster.run(self._engine(kind, f"engine {n}", latency_s)) for n, kind in enumerate(kinds)]
        self.hosted: list[Any] = [engine.result() for engine in made]
        self.processes = [
            HostedEngine(f"engine {n}", engine, self.cluster.loop) for n, engine in enumerate(self.hosted)
        ]
        engines = [
            Engine(EngineHandle(lambda process=process: process, f"engine {n}", DriverMeter(), self.cluster), 1)
            for n, process in enumerate(self.processes)
        ]
        self.pool = EnginePool(engines, embedded=False)
        self.trainer = Trainer(self._run_id, config, adapter)
        self._worker = TrainHandle(lambda: HostedTrainer(self.trainer), "train worker 0", DriverMeter(), self.cluster)
        self.sync = WeightSync(config, [self._worker], self.pool, lasting=True, adapter=adapter is not None)

    async def _engine(self, kind: type[ScriptedEngine], name: str, latency_s: float) -> ScriptedEngine:
        receiver = ReceiverConfig(name, self.config)
        return kind(lambda *_: [5] * 20, latency_s=latency_s, receiver=receiver)

    def restart_trainer(self) -> None:
        """Put another process in the place of the train worker, which was killed."""
        self._end_trainer()
        self.trainer = Trainer(self._run_id, self.config)
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

        future = self.cluster.run(generate())
        assert taken.wait(10)
        return future

    def spy(self, monkeypatch: pytest.MonkeyPatch, engine_bytes: list[int], *names: str) -> list[str]:
        """Return the list to which calls of these methods of engines are added, as `sleep 0`. engine_bytes: GPU memory
        that each engine says it holds while it sleeps."""
        events: list[str] = []
        for number, hosted in enumerate(self.hosted):

            async def memory(number: int = number) -> ProcessMemory:
                return ProcessMemory(engine_bytes[number], 1)

            monkeypatch.setattr(hosted, "memory", memory)
            for name in names:
                monkeypatch.setattr(hosted, name, noted(events, f"{name} {number}", getattr(hosted, name)))
        return events

    def expect(self, version: int, scale: float) -> None:
        """Check that every engine serves the trainer's weights whole, as `version`."""
        for engine, hosted in zip(self.pool.engines, self.hosted, strict=True):
            assert (engine.version, hosted.version, engine.left_out, engine.broken) == (version, version, "", False)
            for name, tensor in WEIGHTS.items():
                torch.testing.assert_close(hosted.loaded[name], tensor * scale)

    def close(self) -> None:
        for engine in self.hosted:
            self.cluster.run(engine.close()).result(10)
        self._end_trainer()
        self.cluster.close()

    def _end_trainer(self) -> None:
        self.trainer.close()
        self._worker.ray_actor.close()


def noted(events: list[str], event: str, method: Any) -> Any:
    """Return `method` as one that adds `event` to the list at each call."""

    def noting(*args: Any) -> Any:
        events.append(event)
        return method(*args)

    return noting


@contextmanager
def world(
    kinds: Sequence[type[ScriptedEngine]],
    *,
    latency_s: float = 0.0,
    of_adapter: AdapterSpec | None = None,
    **sync: Any,
) -> Iterator[World]:
    """A world of engines of these kinds; `sync` are keys of the section. of_adapter: the adapter whose tensors the
    weights are."""
    config = SyncConfig(**{"staging": "none", "timeout_s": 5.0, **sync})
    with closing(World(config, kinds, latency_s, of_adapter)) as made:
        yield made
