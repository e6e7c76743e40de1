"""Runs an engine that several runs share, each with its own adapter (LoRA): `SharedEngineActor` is its Ray actor.

    driver, rollout actors of run a --> "a/generate" ... --+
                                                           +--> SharedEngineActor --> seats a, b of one engine
    driver, rollout actors of run b --> "b/generate" ... --+

A run has a seat in the engine, which answers the same calls as an engine actor of its own. `SeatOf` stands for the
actor's Ray handle in that run, and puts the run's name in front of each call.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from ..codecs import messages
from .early_actors import CONFIGURE, EarlyEngineActor
from .engine_actor import EngineActor, EngineSetup
from .engines.factory import EngineConfig
from .engines.protocol import EngineDied, GenerationEngine
from .engines.shared.seats import open_seat
from .process.own_process import ActorInfo
from .process.remote_methods import encode_arguments


@dataclass(frozen=True, slots=True)
class SharedSetup:
    """Settings of a shared engine, as plain data that can be sent to its process."""

    engine: EngineSetup
    max_runs: int
    """Largest number of runs that share the engine at the same time (`rollout.max_adapters`)."""
    gpus: tuple[tuple[int, ...], ...]
    """GPUs of all shared engines of the pool, by engine."""


class EarlySharedEngine(EarlyEngineActor):
    """Ray actor that is a SharedEngineActor from the start, so that Ray can start it again after its death."""

    def __init__(self, *arguments: Any) -> None:
        """arguments: those of EarlyEngineActor, and a SharedSetup."""
        super().__init__(*arguments[:-1])
        self.configure(arguments[-1])

    def configure(self, setup: SharedSetup) -> ActorInfo:
        self._actor = self._make(setup)
        return ActorInfo.here(setup.engine.name)


class SharedEngineActor(EngineActor):
    """Asynchronous Ray actor that hosts one engine for several runs."""

    def __init__(self, setup: SharedSetup) -> None:
        super().__init__(setup.engine)
        self._shared = setup
        self._seats: dict[str, SeatActor] = {}
        self._missed: set[str] = set()
        """Runs with a seat that the last call of `keep` did not name."""
        self._building = asyncio.Lock()
        self._leaving = defaultdict[str, asyncio.Lock](asyncio.Lock)
        """Lock of each run, so that its next seat opens after the one before, of the same name, has closed."""

    async def call(self, method: str, message: bytes, *actors: object) -> bytes:
        """Run a method of this actor, or of a run's seat for `RUN/METHOD`. Raises EngineDied for a run without a
        seat."""
        run, _, method = method.rpartition("/")
        if not run:
            return await super().call(method, message, *actors)
        if method == CONFIGURE:
            return messages.encode(await self._configure(run, *cast(tuple[EngineSetup], actors)))
        if (seat := self._seats.get(run)) is None:
            raise EngineDied(
                f"{self._name}: run {run!r} has no seat in it, because the engine has been started again or the run "
                "counts as ended"
            )
        return await seat.call(method, message, *actors)

    async def build(self) -> None:
        """Load the engine, unless that is done. Several runs may ask for it. Later changes of the model's files do not
        change the base to which adapters must belong."""
        async with self._building:
            if self._hosted is None:
                await super().build()
                engine: Any = self._engine
                await engine.read_base()

    async def identity(self) -> ActorInfo:
        """Return the name, process id and host of this process, also after the death of the engine in it."""
        return ActorInfo.here(self._name)

    async def gpus(self) -> list[list[int]]:
        """Return the numbers of the GPUs of all shared engines of the pool, by engine."""
        return [list(gpus) for gpus in self._shared.gpus]

    async def runs(self) -> list[str]:
        """Return the names of the runs that have a seat."""
        return sorted(self._seats)

    async def keep(self, runs: list[str]) -> None:
        """Close the seats of all runs that neither this call names nor the one before: these runs have ended. Ends this
        process if the engine has died, as `leave` does."""
        self._end_dead()
        missed = set(self._seats).difference(runs)
        for run in sorted(missed & self._missed):
            await self.leave(run)
        self._missed = missed

    async def leave(self, run: str) -> None:
        """Close the seat of a run. If the engine has died, this process ends, and Ray starts another. Idempotent."""
        self._end_dead()
        async with self._leaving[run]:
            if (seat := self._seats.pop(run, None)) is not None:
                await seat.close()

    def _end_dead(self) -> None:
        if self._hosted is not None and self._hosted.died:
            os.kill(os.getpid(), signal.SIGKILL)

    async def _configure(self, run: str, setup: EngineSetup) -> ActorInfo:
        await self.leave(run)
        self._seats[run] = SeatActor(self, run, setup)
        return ActorInfo.here(setup.name)

    async def seat(self, run: str, config: EngineConfig) -> GenerationEngine:
        """Return the engine of a run. Raises ValueError with one sentence, and closes the seat, if the run does not fit
        the engine or the engine has as many runs as it can serve."""
        problem = misfit(self._setup.engine, config)
        others = sorted(takewhile(lambda name: name != run, self._seats))  # They came before this run.
        if problem:
            problem += ", because pool.engines=shared uses the engines with which the pool was started"
        elif len(others) >= self._shared.max_runs:
            problem = (
                f"pool.engines: got shared, but the engines of the pool serve rollout.max_adapters="
                f"{self._shared.max_runs} runs at the same time, and have {', '.join(others)}"
            )
        if problem:
            await self.leave(run)
            raise ValueError(problem)
        await self.build()
        kind = self._setup.engine.rollout.engine
        return open_seat(kind, self._engine, run, config.receiver, config.version)


class SeatActor(EngineActor):
    """The part of a SharedEngineActor that one run uses like an engine actor of its own."""

    def __init__(self, host: SharedEngineActor, run: str, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._host = host
        self._run = run

    async def build(self) -> None:
        self._hosted = await self._host.seat(self._run, self._setup.engine)


def misfit(engine: EngineConfig, wanted: EngineConfig) -> str:
    """Return why a run cannot use an engine, as the beginning of a sentence; "" if it can. wanted: settings that the
    run would give an engine of its own."""
    room, asked = engine.adapters, wanted.adapters
    if room is None or asked is None:
        return "trainer.lora.rank: got 0, expected at least 1 with sync.adapter=only"
    pairs = {
        "model.path": (_place(wanted.model.path), _place(engine.model.path)),
        "model.dtype": (wanted.model.dtype, engine.model.dtype),
        "rollout.engine": (wanted.rollout.engine, engine.rollout.engine),
        "rollout.quantization": (wanted.rollout.quantization, engine.rollout.quantization),
        "rollout.kv_cache_dtype": (wanted.rollout.kv_cache_dtype, engine.rollout.kv_cache_dtype),
        "router_replay.enabled": (wanted.routes, engine.routes),
        "trainer.lora.experts": (asked.experts, room.experts),
    }
    for key, (got, expected) in pairs.items():
        if got != expected:
            return f"{key}: got {got}, expected {expected}"
    if asked.rank > room.rank:
        return f"trainer.lora.rank: got {asked.rank}, expected at most {room.rank}"
    if engine.max_model_len is not None and (wanted.max_model_len or 0) > engine.max_model_len:
        return (
            f"rollout.max_new_tokens: got rows of up to {wanted.max_model_len} tokens, expected at most "
            f"{engine.max_model_len}"
        )
    return ""


def _place(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


@dataclass(frozen=True, slots=True)
class SeatOf:
    """A run's seat in a shared engine, in place of a Ray handle: calls of the actor become calls of the seat."""

    actor: Any
    """Ray handle of an EarlySharedEngine."""
    run: str
    """Name of the run."""

    @property
    def call(self) -> SeatCall:
        """Return the method that `submit` calls."""
        return SeatCall(self)

    def leave(self) -> None:
        """Ask the engine to close the seat, without waiting for it."""
        self.actor.call.remote(SharedEngineActor.leave.__name__, encode_arguments([self.run]))


@dataclass(frozen=True, slots=True)
class SeatCall:
    """The method `call` of a seat."""

    seat: SeatOf

    def remote(self, method: str, message: bytes, *actors: object) -> Any:
        """Start a call, and return Ray's reference to its result."""
        return self.seat.actor.call.remote(f"{self.seat.run}/{method}", message, *actors)
