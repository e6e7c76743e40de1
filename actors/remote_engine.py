"""`RemoteEngine`, a client for an engine in another process, called through the Ray handle of its EngineActor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from ray.exceptions import RayError, RayTaskError

from ..codecs.weights.parameter_digests import ParameterDigests
from .engine_actor import EngineActor
from .engines.generate_messages import GenerateCall
from .engines.protocol import (
    CommitReport,
    Completion,
    EngineDied,
    EngineStats,
    KeysAndValues,
    PauseMode,
    Prepared,
    SamplingParams,
)
from .process.memory import ProcessMemory
from .process.remote_methods import decode_result, encode_arguments, submit
from .weight_sync.transports.protocol import WeightUpdate

P = ParamSpec("P")
T = TypeVar("T")

HEALTH_EVERY_S = 5.0
"""Seconds between health checks of the engine actor. Checks are made only while at least one call waits for a reply."""
HEALTH_TIMEOUT_S = 30.0
"""Seconds after which an engine actor that has not answered a health check counts as dead. Other calls have no such
time limit."""


class RemoteEngine:
    """GenerationEngine whose methods call an EngineActor in another process. All methods must be called from the same
    event loop.

    Once the actor has died or stopped answering health checks, or its engine has died, every call raises EngineDied.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        *,
        health_every_s: float = HEALTH_EVERY_S,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> None:
        """Store the arguments without calling the actor; `connect` makes the first call. handle: the Ray handle of an
        EngineActor."""
        self.name = name
        self._handle = handle
        self._health_every_s = health_every_s
        self._health_timeout_s = health_timeout_s
        self._dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._num_waiting = 0
        self._health: asyncio.Task[None] | None = None
        self._version = 0
        self._num_workers = 1
        self._leaving: dict[str, asyncio.Future[Any]] = {}
        """Calls of `EngineActor.abandon` in progress, by the id of the cancelled request."""
        self.stats = EngineStats()
        """Counters of the engine, taken from its latest reply to `generate`."""

    async def connect(self) -> RemoteEngine:
        """Ask the actor for its engine's version and number of workers, and return this object.

        Raises EngineDied when the actor or its engine has died, and RuntimeError when the engine is not built yet.
        """
        self._version = await self._call(EngineActor.version)
        self._num_workers = await self._call(EngineActor.num_workers)
        return self

    @property
    def version(self) -> int:
        """Policy version from the engine's latest reply. The engine may already serve a newer version, because the
        driver updates its weights without telling this client."""
        return self._version

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def progress(self) -> int:
        """Total number of tokens that the engine has returned, as of its latest reply to `generate`."""
        return self.stats.tokens

    @property
    def died(self) -> str:
        return self._dead.result() if self._dead.done() else ""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Generate completions with the actor's engine. Cancelling this call also ends the request in the actor."""
        call = GenerateCall(request_id, np.asarray(prompt_ids, dtype=np.int32), params)
        if request_id in self._leaving:  # Ray keeps no order between the calls of an async actor
            await asyncio.wait({self._leaving[request_id], self._dead}, return_when=asyncio.FIRST_COMPLETED)
        try:
            reply = await self._call(EngineActor.generate, call)
        except asyncio.CancelledError:
            self._abandon(request_id)
            raise
        assert reply is not None, "only a cancelled call abandons its request"
        self._version = max(self._version, reply.version)
        self.stats = reply.stats
        return reply.completions()

    def _abandon(self, request_id: str) -> None:
        """Tell the actor to cancel the request, without waiting for the reply. A later request with the same id waits
        until the cancelled one has ended."""

        def left(task: asyncio.Future[Any]) -> None:
            self._leaving.pop(request_id, None)
            if not task.cancelled():
                task.exception()  # a dead engine has no request to end

        leaving = asyncio.ensure_future(self._submit(EngineActor.abandon, request_id))
        self._leaving[request_id] = leaving
        leaving.add_done_callback(left)

    async def abort(self, request_id: str) -> None:
        await self._call(EngineActor.abort, request_id)

    async def pause(self, mode: PauseMode = "wait") -> None:
        await self._call(EngineActor.pause, mode)

    async def resume(self) -> None:
        await self._call(EngineActor.resume)

    async def reset_prefix_cache(self) -> None:
        await self._call(EngineActor.reset_prefix_cache)

    async def prepare_weights(self, update: WeightUpdate) -> Prepared:
        return await self._call(EngineActor.prepare_weights, update)

    async def commit_weights(
        self, version: int, in_flight: PauseMode = "wait", kv: KeysAndValues = "recompute"
    ) -> CommitReport:
        report = await self._call(EngineActor.commit_weights, version, in_flight, kv)
        self._version = report.version
        return report

    async def verify_weights(self, digests: ParameterDigests) -> int:
        return await self._call(EngineActor.verify_weights, digests)

    async def drop_weights(self, version: int) -> None:
        await self._call(EngineActor.drop_weights, version)

    async def sleep(self, level: int = 1) -> None:
        await self._call(EngineActor.sleep, level)

    async def wake(self) -> None:
        await self._call(EngineActor.wake)

    async def memory(self) -> ProcessMemory:
        return await self._call(EngineActor.memory)

    async def close(self) -> None:
        """Close this client, but not the actor, which its owner closes. Calls that still wait for a reply raise
        EngineDied. Idempotent."""
        self._die("this end was closed")
        if self._health is not None:
            self._health.cancel()

    # ---------------------------------------------------------------- calls

    async def _call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if self._dead.done():
            raise EngineDied(self._dead.result())
        answer = asyncio.ensure_future(self._submit(method, *args, **kwargs))
        self._num_waiting += 1
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({answer, self._dead}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_waiting -= 1
            if not answer.done():
                answer.cancel()
        if answer.done() and not answer.cancelled():
            return answer.result()
        raise EngineDied(self._dead.result())

    def _submit(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Send a call to the actor immediately, and return a coroutine that waits for the result."""
        assert not kwargs, "a message has no names"
        return self._answer(method, submit(self._handle, method, encode_arguments(args)))

    async def _answer(self, method: Callable[..., Any], reference: Any) -> Any:
        try:
            return decode_result(method, await reference)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, EngineDied):
                self._die(str(cause))
            raise (cause if isinstance(cause, Exception) else error) from None
        except RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._die(f"{type(error).__name__}: {' '.join(lines[-2:])[:400]}")
            raise EngineDied(self._dead.result()) from error

    async def _watch(self) -> None:
        """Check the actor's health regularly as long as calls wait for replies. If the actor stops answering, these
        calls raise EngineDied."""
        while self._num_waiting and not self._dead.done():
            await asyncio.sleep(self._health_every_s)
            if not self._num_waiting or self._dead.done():
                return
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await self._submit(EngineActor.info)
            except TimeoutError:
                self._die(f"no sign of life for {self._health_timeout_s:g} s")
            except EngineDied:
                return  # `_answer` has recorded the death

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(f"engine {self.name!r} is dead: {reason}")
