"""Ray actors that host a generation engine: `EngineActor`, and the methods that it shares with rollout actors."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..codecs import messages
from .engines.factory import EngineConfig, build_engine
from .engines.generate_messages import GenerateCall, GenerateReply
from .engines.protocol import CommitReport, EngineStats, GenerationEngine, PauseMode
from .protocols import ActorInfo
from .remote_methods import decode_arguments
from .weights.transports.protocol import WeightUpdate

CONCURRENCY = 1 << 16
"""Ray's `max_concurrency` of an engine actor, so high that requests in flight do not delay `pause` or `abort`."""


class EngineHost(ABC):
    """Methods by which the driver controls the engine of any actor that has one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: GenerationEngine | None = None

    async def call(self, method: str, message: bytes, *actors: object) -> bytes:
        """Run a method with the arguments in `message`, followed by `actors` (Ray handles); returns its result.

        The one method that is called through Ray, see `actors/remote_methods.py`.
        """
        target = self._target(method)
        function = getattr(type(target), method)
        result = function(target, *decode_arguments(function, message, len(actors)), *actors)
        return messages.encode(await result if inspect.isawaitable(result) else result)

    def _target(self, method: str) -> object:
        """Return the object that has this method: this host, unless a subclass hosts another object."""
        return self

    async def info(self) -> ActorInfo:
        """Describe this process; an answer also shows that it is alive."""
        return ActorInfo.here(self._name)

    async def build(self) -> None:
        """Load the engine and all else that the actor hosts. Raises ValueError in one sentence.

        The constructor does not load it, because Ray would bury its errors in the actor's death.
        """
        self._hosted = await asyncio.to_thread(self._build)

    @abstractmethod
    def _build(self) -> GenerationEngine:
        """Load the engine and all else that the actor hosts; `build` runs it in a thread."""

    async def prepare_weights(self, update: WeightUpdate) -> None:
        """Run `WeightHost.prepare_weights`."""
        await self._engine.prepare_weights(update)

    async def commit_weights(self, version: int, in_flight: PauseMode) -> CommitReport:
        """Run `WeightHost.commit_weights`."""
        return await self._engine.commit_weights(version, in_flight)

    async def drop_weights(self, version: int) -> None:
        """Run `WeightHost.drop_weights`."""
        await self._engine.drop_weights(version)

    async def num_workers(self) -> int:
        """Number of the engine's processes that receive weights."""
        return self._engine.num_workers

    async def version(self) -> int:
        """The policy version that the engine serves."""
        return self._engine.version

    async def stats(self) -> EngineStats:
        """Counters of what the engine has done since it started."""
        return self._engine.stats

    async def progress(self) -> int:
        """Number that changes whenever this actor gets on with its work. Raises EngineDied when its engine is gone."""
        return self._engine.progress

    async def pause(self, mode: PauseMode) -> None:
        """Run `Sleeper.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Run `Sleeper.resume`."""
        await self._engine.resume()

    async def reset_prefix_cache(self) -> None:
        """Run `Sleeper.reset_prefix_cache`."""
        await self._engine.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        """Run `Sleeper.sleep`."""
        await self._engine.sleep(level)

    async def wake(self) -> None:
        """Run `Sleeper.wake`."""
        await self._engine.wake()

    @property
    def _engine(self) -> GenerationEngine:
        if self._hosted is None:
            raise RuntimeError(f"{self._name}: not built yet (build comes first)")
        return self._hosted


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The plain data that an engine actor is built from."""

    name: str
    """Name for errors, traces and the router; unique in the run."""
    threads: int
    """Number of compute threads of this process."""
    engine: EngineConfig


class EngineActor(EngineHost):
    """Hosts one engine; an async Ray actor:
    `ray.remote(EngineActor).options(max_concurrency=CONCURRENCY, ...).remote(setup)`."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup.name)
        self._setup = setup
        self._running: dict[str, asyncio.Task] = {}
        self._abandoned: set[str] = set()

    def _build(self) -> GenerationEngine:
        torch.set_num_threads(self._setup.threads)
        return build_engine(self._setup.engine)

    async def generate(self, call: GenerateCall) -> GenerateReply | None:
        """Run `Generator.generate`. Returns None, which nobody reads, when the caller has abandoned the request."""
        request_id = call.request_id
        while request_id in self._abandoned:  # its caller sends it again before the first attempt has ended
            await asyncio.wait({self._running[request_id]})
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        task = asyncio.create_task(self._engine.generate(request_id, call.prompt_ids.tolist(), call.params))
        self._running[request_id] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._running[request_id]
            self._abandoned.discard(request_id)
            task.cancel()
        if task.cancelled():
            return None
        return GenerateReply.of(task.result(), self._engine.version, self._engine.stats)

    async def running(self) -> list[str]:
        """List the ids of the requests in flight."""
        return list(self._running)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` call returns the tokens made so far."""
        await asyncio.sleep(0)  # lets a `generate` call that came just before reach the engine first
        await self._engine.abort(request_id)

    async def abandon(self, request_id: str) -> None:
        """End a request whose caller no longer waits for an answer. Unknown ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            self._abandoned.add(request_id)
            task.cancel()

    async def close(self) -> None:
        """Close the engine. Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
