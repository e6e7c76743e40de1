"""Runs an engine in a Ray actor: `EngineActor` hosts the engine, and `RemoteEngine` is its client in another process.

Their messages are `GenerateCall` and `GenerateReply`. `EngineHost` is the base class that rollout actors share.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError

from ..codecs import messages
from ..codecs.blobs import Blob
from ..codecs.integers import cut_up
from .engines.factory import EngineConfig, build_engine
from .engines.protocol import (
    BaseKeeper,
    Completion,
    EngineDied,
    EngineStats,
    SamplingParams,
    Scorer,
    ServingEngine,
    WeightHost,
)
from .process.own_process import ActorInfo
from .process.remote_methods import decode_result, encode_arguments, invoke, submit
from .weight_sync.base_offer import WeightOffer

P = ParamSpec("P")
T = TypeVar("T")

CONCURRENCY = 1 << 16
"""Value of Ray's `max_concurrency` option for engine actors. It is so high that `pause` and `abort` never have to wait
for requests in flight."""

HEALTH_EVERY_S = 5.0
"""Seconds between health checks of the engine actor. Checks are made only while at least one call waits for a reply."""
HEALTH_TIMEOUT_S = 30.0
"""Seconds after which an engine actor that has not answered a health check counts as dead. Other calls have no such
time limit."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """Message with the arguments of `Generator.generate`."""

    request_id: str
    prompt_ids: np.ndarray
    """Token ids of the prompt, int32 `[L]`."""
    params: SamplingParams
    """Sampling parameters without their pictures, which are separate Ray objects."""


_SHIPPED = WeakKeyDictionary[Blob, Any]()
"""Ray's references to the pictures that this process has sent. Ray drops an object with its last reference."""


def _shipped(picture: Blob) -> Any:
    """Put a picture into Ray's object store, once for all requests and engines, and return Ray's reference to it."""
    if picture not in _SHIPPED:
        _SHIPPED[picture] = ray.put(picture)
    return _SHIPPED[picture]


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """Message with the completions of one request, as concatenated columns, and the engine's counters."""

    lengths: np.ndarray
    """Number of tokens of each completion, int32 `[n]`."""
    token_ids: np.ndarray
    """Token ids of all completions, int32 `[sum(lengths)]`."""
    logprobs: np.ndarray
    """Log-prob of each token, float32 `[sum(lengths)]`."""
    versions: np.ndarray
    """Policy version of each token, int32 `[sum(lengths)]`."""
    reasons: tuple[str, ...]
    """Finish reason of each completion."""
    num_routes: np.ndarray
    """Number of routes of each completion, int32 `[n]`; -1 for a completion without routes."""
    routes: np.ndarray | None
    """Routes of all completions that have some, `[sum, layers, k]`; None if none has."""
    masks: tuple[bytes, ...]
    """Stream of the sampling masks of each completion (see `Completion.masks`); empty for a completion without them."""
    version: int
    """Version of the weights that the engine serves when it replies."""
    stats: EngineStats

    @staticmethod
    def of(completions: Sequence[Completion], version: int, stats: EngineStats) -> GenerateReply:
        """Build the reply: concatenate the completions into columns, and add the engine's version and counters."""
        routes = [completion.routes for completion in completions if completion.routes is not None]
        return GenerateReply(
            lengths=np.array([len(completion.token_ids) for completion in completions], dtype=np.int32),
            token_ids=np.concatenate([completion.token_ids for completion in completions]),
            logprobs=np.concatenate([completion.logprobs for completion in completions]),
            versions=np.concatenate([completion.versions for completion in completions]),
            reasons=tuple(completion.finish_reason for completion in completions),
            num_routes=np.array([-1 if one.routes is None else len(one.routes) for one in completions], dtype=np.int32),
            routes=np.concatenate(routes) if routes else None,
            masks=tuple(b"" if one.masks is None else one.masks.tobytes() for one in completions),
            version=version,
            stats=stats,
        )

    def completions(self) -> list[Completion]:
        """Split the columns into the individual completions of the request."""
        return [
            Completion(token_ids, logprobs, reason, versions, routes, np.frombuffer(masks, np.uint8) if masks else None)
            for token_ids, logprobs, versions, reason, routes, masks in zip(
                cut_up(self.token_ids, self.lengths),
                cut_up(self.logprobs, self.lengths),
                cut_up(self.versions, self.lengths),
                self.reasons,
                self._routes(),
                self.masks,
                strict=True,
            )
        ]

    def _routes(self) -> list[np.ndarray | None]:
        if self.routes is None:
            return [None] * len(self.lengths)
        parts = cut_up(self.routes, np.maximum(self.num_routes, 0))
        return [None if count < 0 else part for count, part in zip(self.num_routes, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Message with rows of tokens to score; see `Scorer.score`."""

    token_ids: np.ndarray
    """Token ids of all rows, int32 `[tokens]`."""
    lengths: np.ndarray
    """Number of tokens of each row, int32 `[N]`."""
    wanted: np.ndarray
    """Mask of the tokens whose scores are wanted, uint8 `[tokens]`; never a row's first token."""
    top_k: int
    temperature: float


@dataclass(frozen=True, slots=True)
class ScoreReply:
    """Message with the scores of W wanted tokens, in order."""

    logprobs: np.ndarray
    """Log-prob of each token, float32 `[W]`."""
    top_ids: np.ndarray | None
    """Ids of the most likely tokens at each position, int32 `[W, top_k]`; None with `top_k` 0."""
    top_logprobs: np.ndarray | None
    """Their log-probs, float32 `[W, top_k]`; None with `top_k` 0."""

    @staticmethod
    def none(top_k: int) -> ScoreReply:
        """Return the scores of no tokens."""
        none = np.zeros((0, top_k), np.float32)
        return ScoreReply(np.zeros(0, np.float32), none.astype(np.int32) if top_k else None, none if top_k else None)


class EngineHost(ABC):
    """Base class of Ray actors that have an engine (engine actors and rollout actors). The driver controls that engine
    by calls of this actor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._hosted: ServingEngine | None = None

    async def call(self, method: str, message: bytes, *actors: object) -> bytes:
        """Run the method named `method` and return its encoded result.

        This is the only method that other processes call through Ray (see `actors/process/remote_methods.py`).
        message: the method's encoded arguments. actors: Ray handles, which are passed as the last arguments.
        """
        result = invoke(self._target(method), method, message, actors)
        return messages.encode(await result if inspect.isawaitable(result) else result)

    def _target(self, method: str) -> object:
        """Return the object on which `call` runs `method`: this actor if it has the method, else its engine. So the
        driver can call every coroutine method of `GenerationEngine`."""
        return self if hasattr(self, method) else self._engine

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
    def _build(self) -> ServingEngine:
        """Load everything that the actor hosts, and return the engine. `build` runs this method in a thread."""

    async def offer_base(self) -> WeightOffer | None:
        """Begin to send the base of the engine's adapters, see `BaseKeeper`. Returns None if the engine cannot."""
        engine: Any = self._engine
        return await engine.offer_base() if isinstance(engine, BaseKeeper) else None

    async def end_offer(self) -> None:
        """Stop sending it. Idempotent."""
        engine: Any = self._engine
        if isinstance(engine, BaseKeeper):
            await engine.end_offer()

    async def num_workers(self) -> int:
        """Return the number of engine processes that receive weights. The engine must be a WeightHost."""
        return cast(WeightHost, self._engine).num_workers

    async def version(self) -> int:
        """Return the policy version that the engine serves."""
        return self._engine.version

    async def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self._engine.stats

    async def progress(self) -> int:
        """Return a number that changes whenever this actor makes progress. It distinguishes a slow actor from one that
        hangs. Raises EngineDied if the engine is known to have died."""
        return self._engine.progress

    @property
    def _engine(self) -> ServingEngine:
        if self._hosted is None:
            raise RuntimeError(f"{self._name}: the engine is not built yet (build comes first)")
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
        self._fetched: dict[str, asyncio.Future[list[Blob]]] = {}
        """Pictures that are on their way from Ray's object store, by the id of their request."""
        self._num_samples = 0
        """Number of samples of the requests in flight."""

    def _build(self) -> ServingEngine:
        torch.set_num_threads(self._setup.threads)
        return build_engine(self._setup.engine)

    async def generate(self, call: GenerateCall, pictures: Sequence[Any] = ()) -> GenerateReply | None:
        """Generate completions with the hosted engine; see `Generator.generate`. Returns None if the caller abandoned
        the request, because the reply is not read in that case. pictures: Ray's references to the prompt's pictures."""
        request_id = call.request_id
        while request_id in self._abandoned:  # The caller resent the request before the cancelled attempt had ended.
            await asyncio.wait({self._running[request_id]})
        if request_id in self._running:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        task = asyncio.create_task(self._generated(call, pictures))
        self._running[request_id] = task
        self._num_samples += call.params.n
        try:
            await asyncio.wait({task})
        finally:
            self._num_samples -= call.params.n
            del self._running[request_id]
            self._abandoned.discard(request_id)
            task.cancel()
        if task.cancelled():
            return None
        stats = replace(self._engine.stats, in_flight=self._num_samples)
        return GenerateReply.of(task.result(), self._engine.version, stats)

    async def _generated(self, call: GenerateCall, pictures: Sequence[Any]) -> list[Completion]:
        params = call.params
        if pictures:
            fetched = self._fetched[call.request_id] = asyncio.gather(*pictures)
            try:
                params = replace(params, pictures=tuple(await fetched))
            finally:
                del self._fetched[call.request_id]
        return await self._engine.generate(call.request_id, call.prompt_ids.tolist(), params)

    async def score(self, call: ScoreCall) -> ScoreReply:
        """Return the log-probs that the hosted engine's model gives to given tokens; see `Scorer.score`. Raises
        ValueError if it is an engine without a model."""
        rows, wanted = cut_up(call.token_ids, call.lengths), cut_up(call.wanted, call.lengths)
        engine: Any = self._engine
        if not isinstance(engine, Scorer):
            raise ValueError(f"{self._name}: its engine {type(engine).__name__} cannot score tokens")
        found = await engine.score(rows, wanted, call.top_k, call.temperature)
        logprobs, ids, values = (np.concatenate(part) for part in zip(*found, strict=True))
        return ScoreReply(logprobs, ids if call.top_k else None, values if call.top_k else None)

    async def running(self) -> list[str]:
        """Return the ids of the requests in flight."""
        return list(self._running)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` call then returns the tokens generated so far."""
        if (fetched := self._fetched.get(request_id)) is not None:
            await asyncio.wait({fetched})
        await asyncio.sleep(0)  # A `generate` call that came just before reaches the engine first.
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


class RemoteEngine:
    """ServingEngine whose methods call an EngineActor in another process, all from the same event loop.

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
        self._leaving: dict[str, asyncio.Future[Any]] = {}
        """Calls of `EngineActor.abandon` in progress, by the id of the cancelled request."""
        self.stats = EngineStats()
        """Counters of the engine, taken from its latest reply to `generate`."""

    async def connect(self) -> RemoteEngine:
        """Ask the actor for its engine's version and counters, and return this object.

        Raises EngineDied when the actor or its engine has died, and RuntimeError when the engine is not built yet.
        """
        self._version = await self._call(EngineActor.version)
        self.stats = await self._call(EngineActor.stats)
        return self

    @property
    def version(self) -> int:
        """Policy version from the engine's latest reply. The engine may already serve a newer version, because the
        driver updates its weights without telling this client."""
        return self._version

    @property
    def progress(self) -> int:
        """Total number of tokens that the engine has returned, as of its latest reply to `generate`."""
        return self.stats.tokens

    @property
    def died(self) -> str:
        return self._dead.result() if self._dead.done() else ""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Generate completions with the actor's engine. Cancelling this call also ends the request in the actor."""
        pictures = [_shipped(picture) for picture in params.pictures]
        call = GenerateCall(request_id, np.asarray(prompt_ids, dtype=np.int32), replace(params, pictures=()))
        if request_id in self._leaving:  # Ray does not keep the order of the calls of an async actor.
            await asyncio.wait({self._leaving[request_id], self._dead}, return_when=asyncio.FIRST_COMPLETED)
        try:
            reply = await self._call(EngineActor.generate, call, pictures)
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
                # Reading the exception marks it as retrieved. It needs no handling, because a dead engine has no
                # request to end.
                task.exception()

        leaving = asyncio.ensure_future(self._submit(EngineActor.abandon, request_id))
        self._leaving[request_id] = leaving
        leaving.add_done_callback(left)

    async def abort(self, request_id: str) -> None:
        await self._call(EngineActor.abort, request_id)

    async def close(self) -> None:
        """Close this client, but not the actor, which its owner closes. Calls that still wait for a reply then raise
        EngineDied. Idempotent."""
        self._die("this end was closed")
        if self._health is not None:
            self._health.cancel()

    # ---------------- These private methods send the calls and watch the actor.

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
        passed = 1 if method is EngineActor.generate else 0  # Ray must know of the references that it passes on.
        sent, references = args[: len(args) - passed], args[len(args) - passed :]
        return self._answer(method, submit(self._handle, method, encode_arguments(sent), references))

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
                self._die(f"it did not answer a health check within {self._health_timeout_s:g} s")
            except EngineDied:
                return  # `_answer` has already recorded the death.

    def _die(self, reason: str) -> None:
        if not self._dead.done():
            self._dead.set_result(f"engine {self.name!r} is dead: {reason}")
