"""An engine in another process: a GenerationEngine over the handle of an EngineActor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayError, RayTaskError

from ...codecs import messages
from ..weights.transports.protocol import WeightUpdate
from .calls import GenerateCall, GenerateReply
from .protocol import CommitReport, Completion, EngineDied, EngineStats, PauseMode, SamplingParams

HEALTH_EVERY_S = 5.0
"""While an answer is waited for, the actor is asked so often whether it is there."""
HEALTH_TIMEOUT_S = 30.0
"""An actor that does not say who it is for so long counts as dead: an answer may take long, this one does not."""


class RemoteEngine:
    """Methods run in one event loop. Every call raises EngineDied once the actor is gone or silent, for ever."""

    def __init__(
        self,
        name: str,
        handle: Any,
        *,
        health_every_s: float = HEALTH_EVERY_S,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> None:
        """handle: of an EngineActor that is built (`connect` sees to it). Raises nothing, calls nothing."""
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
        """Of cancelled requests, by id: the calls that end them."""
        self.stats = EngineStats()
        """As of the last answer."""

    async def connect(self) -> RemoteEngine:
        """Ask for what does not change: returns self. Raises EngineDied; RuntimeError when it is not built yet."""
        self._version = await self._call("version")
        self._num_workers = await self._call("num_workers")
        return self

    @property
    def version(self) -> int:
        """As of the last answer: the driver changes weights without asking this end."""
        return self._version

    @property
    def num_workers(self) -> int:
        return self._num_workers

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """See the protocol; cancelling the call ends the request over there, too."""
        call = messages.encode(GenerateCall(request_id, np.asarray(prompt_ids, dtype=np.int32), params))
        if request_id in self._leaving:  # Ray keeps no order between the calls of an async actor
            await asyncio.wait({self._leaving[request_id], self._dead}, return_when=asyncio.FIRST_COMPLETED)
        try:
            reply = messages.decode(await self._call("generate", call), GenerateReply)
        except asyncio.CancelledError:
            self._abandon(request_id)
            raise
        self._version = max(self._version, reply.version)
        self.stats = reply.stats
        return reply.completions()

    def _abandon(self, request_id: str) -> None:
        """Have the request ended over there; nobody waits for it but who uses its id again."""

        def left(task: asyncio.Future[Any]) -> None:
            self._leaving.pop(request_id, None)
            if not task.cancelled():
                task.exception()  # an engine that died has none to end

        leaving = asyncio.ensure_future(self._answer(self._handle.abandon.remote(request_id)))
        self._leaving[request_id] = leaving
        leaving.add_done_callback(left)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: PauseMode = "wait") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def prepare_weights(self, update: WeightUpdate) -> None:
        await self._call("prepare_weights", messages.encode(update))

    async def commit_weights(self, version: int, in_flight: PauseMode = "wait") -> CommitReport:
        report = messages.decode(await self._call("commit_weights", version, in_flight), CommitReport)
        self._version = report.version
        return report

    async def drop_weights(self, version: int) -> None:
        await self._call("drop_weights", version)

    async def sleep(self, level: int = 1) -> None:
        await self._call("sleep", level)

    async def wake(self) -> None:
        await self._call("wake")

    async def close(self) -> None:
        """Close this end; the actor is its owner's to close. Calls that wait raise EngineDied. Idempotent."""
        self._die("this end was closed")
        if self._health is not None:
            self._health.cancel()

    # ---------------------------------------------------------------- calls

    async def _call(self, method: str, *args: Any) -> Any:
        if self._dead.done():
            raise EngineDied(self._dead.result())
        answer = asyncio.ensure_future(self._answer(getattr(self._handle, method).remote(*args)))
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

    async def _answer(self, ref: Any) -> Any:
        try:
            return await ref
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, Exception) else error) from None
        except RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self._die(f"{type(error).__name__}: {' '.join(lines[-2:])[:400]}")
            raise EngineDied(self._dead.result()) from error

    async def _watch(self) -> None:
        """While answers are waited for, see that the actor is there at all."""
        while self._num_waiting and not self._dead.done():
            await asyncio.sleep(self._health_every_s)
            if not self._num_waiting or self._dead.done():
                return
            try:
                async with asyncio.timeout(self._health_timeout_s):
                    await self._answer(self._handle.info.remote())
            except TimeoutError:
                self._die(f"no sign of life for {self._health_timeout_s:g} s")
            except EngineDied:
                return  # said already

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(f"engine {self.name!r} is dead: {reason}")
