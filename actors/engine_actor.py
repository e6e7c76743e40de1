"""`EngineActor`, the Ray actor that hosts an engine, and `EngineHost`, the base class that rollout actors share."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ..codecs import messages
from ..codecs.weights.parameter_digests import ParameterDigests
from .engines.factory import EngineConfig, build_engine
from .engines.generate_messages import GenerateCall, GenerateReply
from .engines.protocol import (
    CommitReport,
    EngineDied,
    EngineStats,
    GenerationEngine,
    KeysAndValues,
    PauseMode,
    Prepared,
)
from .process.actor_info import ActorInfo
from .process.memory import ProcessMemory
from .process.remote_methods import decode_arguments
from .weight_sync.transports.protocol import WeightUpdate

CONCURRENCY = 1 << 16
"""Value of Ray's `max_concurrency` option for engine actors. It is so high that `pause` and `abort` never have to wait
for requests in flight."""


class EngineHost(ABC):
    """Base class of Ray actors that have an engine (engine actors and rollout actors). Its methods let the driver
    control that engine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: GenerationEngine | None = None

    async def call(self, method: str, message: bytes, *actors: object) -> bytes:
        """Run the method named `method` and return its encoded result.

        This is the only method that other processes call through Ray (see `actors/process/remote_methods.py`).
        message: the method's encoded arguments. actors: Ray handles, which are passed as the last arguments.
        """
        target = self._target(method)
        function = getattr(type(target), method)
        result = function(target, *decode_arguments(function, message, len(actors)), *actors)
        return messages.encode(await result if inspect.isawaitable(result) else result)

    def _target(self, method: str) -> object:
        """Return the object on which `call` runs `method`: this actor itself, unless a subclass forwards calls to an
        object that it hosts."""
        return self

    async def info(self) -> ActorInfo:
        """Return the name, process id and host of this process. The call also serves as a health check. Raises
        EngineDied if the engine has died."""
        if self._hosted is not None and (died := self._hosted.died):
            raise EngineDied(f"{self._name}: {died}")
        return ActorInfo.here(self._name)

    async def build(self) -> None:
        """Load the engine and everything else that the actor hosts.

        The constructor does not load anything, because Ray would report its errors only as the death of the actor.
        Raises ValueError with a one-sentence message if something is misconfigured or cannot be loaded.
        """
        self._hosted = await asyncio.to_thread(self._build)

    @abstractmethod
    def _build(self) -> GenerationEngine:
        """Load everything that the actor hosts, and return the engine. `build` runs this method in a thread."""

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        """Make the engine receive and verify a new version of the weights; see `WeightHost.prepare_weights`."""
        return await self._engine.prepare_weights(update)

    async def commit_weights(self, version: int, in_flight: PauseMode, kv: KeysAndValues) -> CommitReport:
        """Make the engine serve the prepared version of the weights; see `WeightHost.commit_weights`."""
        return await self._engine.commit_weights(version, in_flight, kv)

    async def verify_weights(self, digests: ParameterDigests) -> int:
        """Make the engine compare its weights with the trainer's; see `WeightHost.verify_weights`."""
        return await self._engine.verify_weights(digests)

    async def drop_weights(self, version: int) -> None:
        """Make the engine discard a prepared version of the weights; see `WeightHost.drop_weights`."""
        await self._engine.drop_weights(version)

    async def num_workers(self) -> int:
        """Return the number of engine processes that receive weights."""
        return self._engine.num_workers

    async def version(self) -> int:
        """Return the policy version that the engine serves."""
        return self._engine.version

    async def stats(self) -> EngineStats:
        """Return the engine's counters since its start: batches, completions, tokens and busy seconds."""
        return self._engine.stats

    async def progress(self) -> int:
        """Return a number that changes whenever this actor makes progress, so that the driver can tell a slow actor
        from one that hangs. Raises EngineDied if the engine is known to have died."""
        return self._engine.progress

    async def pause(self, mode: PauseMode) -> None:
        """Make the engine stop generating until `resume`; see `Sleeper.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """Make the engine continue generating after `pause`; see `Sleeper.resume`."""
        await self._engine.resume()

    async def reset_prefix_cache(self) -> None:
        """Make the engine clear its prefix cache (keys and values of earlier prompts); see
        `Sleeper.reset_prefix_cache`."""
        await self._engine.reset_prefix_cache()

    async def sleep(self, level: int) -> None:
        """Make the engine free its memory and refuse requests until `wake`; see `Sleeper.sleep`."""
        await self._engine.sleep(level)

    async def wake(self) -> None:
        """Make the engine accept requests again after `sleep`; see `Sleeper.wake`."""
        await self._engine.wake()

    async def memory(self) -> ProcessMemory:
        """Return the memory that the engine's processes hold now; see `Sleeper.memory`."""
        return await self._engine.memory()

    @property
    def _engine(self) -> GenerationEngine:
        if self._hosted is None:
            raise RuntimeError(f"{self._name}: not built yet (build comes first)")
        return self._hosted


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings from which an engine actor is built, as plain data that can be sent to its process."""

    name: str
    """Name of the engine in errors, traces and the router; unique in the run."""
    threads: int
    """Number of CPU threads for torch operations in the actor's process (`torch.set_num_threads`)."""
    engine: EngineConfig


class EngineActor(EngineHost):
    """Asynchronous Ray actor that hosts one engine. It is created by
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
        """Generate completions with the hosted engine; see `Generator.generate`. Returns None if the caller abandoned
        the request, because nobody reads the reply in that case."""
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
        """Return the ids of the requests in flight."""
        return list(self._running)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` call then returns the tokens generated so far."""
        await asyncio.sleep(0)  # lets a `generate` call that came just before reach the engine first
        await self._engine.abort(request_id)

    async def abandon(self, request_id: str) -> None:
        """Cancel a request whose caller no longer waits for the reply. Unknown request ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            self._abandoned.add(request_id)
            task.cancel()

    async def close(self) -> None:
        """Close the engine. Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
