"""The engine actor: a Ray actor that hosts one generation engine, built from plain data; and what all hosts share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch

from ..codecs import messages
from .engines.calls import GenerateCall, GenerateReply
from .engines.factory import EngineConfig, build_engine
from .engines.protocol import EngineStats, GenerationEngine, PauseMode
from .protocols import ActorInfo
from .weights.transports.protocol import WeightUpdate

CONCURRENCY = 1 << 16
"""`max_concurrency` of an engine actor: requests in flight must not keep `pause`, `abort` or `info` waiting."""


class EngineHost:
    """What the driver asks of any actor with an engine: weights in, version out. Arguments are plain data."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: GenerationEngine | None = None

    async def info(self) -> ActorInfo:
        """Who this is; also shows that it answers."""
        return ActorInfo.here(self._name)

    async def prepare_weights(self, update: bytes) -> None:
        """`GenerationEngine.prepare_weights` of an encoded WeightUpdate."""
        await self._engine.prepare_weights(messages.decode(update, WeightUpdate))

    async def commit_weights(self, version: int, in_flight: PauseMode = "wait") -> bytes:
        """`GenerationEngine.commit_weights`; returns an encoded CommitReport."""
        return messages.encode(await self._engine.commit_weights(version, in_flight))

    async def drop_weights(self, version: int) -> None:
        """`GenerationEngine.drop_weights`."""
        await self._engine.drop_weights(version)

    async def num_workers(self) -> int:
        """Processes that receive weights."""
        return self._engine.num_workers

    async def version(self) -> int:
        """The policy version that the engine serves."""
        return self._engine.version

    async def stats(self) -> EngineStats:
        """What the engine has done since it started."""
        return self._engine.stats

    async def pause(self, mode: PauseMode = "wait") -> None:
        """`GenerationEngine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """`GenerationEngine.resume`."""
        await self._engine.resume()

    async def reset_prefix_cache(self) -> None:
        """`GenerationEngine.reset_prefix_cache`."""
        await self._engine.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """`GenerationEngine.sleep`."""
        await self._engine.sleep(level)

    async def wake(self) -> None:
        """`GenerationEngine.wake`."""
        await self._engine.wake()

    @property
    def _engine(self) -> GenerationEngine:
        if self._hosted is None:
            raise RuntimeError(f"{self._name}: not built yet (build comes first)")
        return self._hosted


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine actor is built from. Plain data."""

    name: str
    """For errors, traces and the router; unique in the run."""
    threads: int
    """Compute threads of this process."""
    engine: EngineConfig


class EngineActor(EngineHost):
    """Hosts one engine; an async Ray actor:
    `ray.remote(EngineActor).options(max_concurrency=CONCURRENCY, ...).remote(setup)`."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup.name)
        self._setup = setup
        self._running: dict[str, asyncio.Task] = {}
        self._abandoned: set[str] = set()

    async def build(self) -> None:
        """Load the engine. Raises ValueError in one sentence.

        Apart from the constructor, whose errors Ray would bury in the actor's death.
        """
        self._hosted = await asyncio.to_thread(self._build)

    def _build(self) -> GenerationEngine:
        torch.set_num_threads(self._setup.threads)
        return build_engine(self._setup.engine)

    async def generate(self, call: bytes) -> bytes:
        """`GenerationEngine.generate` of an encoded GenerateCall; returns an encoded GenerateReply."""
        request = messages.decode(call, GenerateCall)
        request_id = request.request_id
        while request_id in self._abandoned:  # its caller has come back for it before it had ended
            await asyncio.wait({self._running[request_id]})
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        task = asyncio.create_task(self._engine.generate(request_id, request.prompt_ids.tolist(), request.params))
        self._running[request_id] = task
        try:
            await asyncio.wait({task})
        finally:
            del self._running[request_id]
            self._abandoned.discard(request_id)
            task.cancel()
        if task.cancelled():
            return b""  # abandoned: nobody reads it
        return messages.encode(GenerateReply.of(task.result(), self._engine.version, self._engine.stats))

    async def running(self) -> list[str]:
        """Ids of the requests in flight."""
        return list(self._running)

    async def abort(self, request_id: str) -> None:
        """`GenerationEngine.abort`: the generate call returns what there is."""
        await asyncio.sleep(0)  # a call that came just before reaches the engine first
        await self._engine.abort(request_id)

    async def abandon(self, request_id: str) -> None:
        """End a request whose caller has gone; nobody gets an answer. Unknown ids are ignored."""
        task = self._running.get(request_id)
        if task is not None:
            self._abandoned.add(request_id)
            task.cancel()

    async def close(self) -> None:
        """Idempotent."""
        if self._hosted is not None:
            await self._hosted.close()
