"""`Router` acts as one generation engine in front of several named ones, which may join, leave or die while it runs.

    request -> the engine that `Routing` chooses -> answer
                    |  the engine died or broke, and is removed from routing
                    +--> the whole request, with the same id and seed, goes to another engine

stage       waits for                            unblocked by
choose      an engine that takes requests        `add`; after timeout_s NoEngineAvailable says why each engine is gone
attempt     the engine's answer                  the answer, or EngineDied once the engine was silent for too long
remove      the engine's requests in flight      their answers; after grace_s they move to other engines
suspend     the engine's requests in flight      their answers, which an abort cuts short unless they may end

Requests wait without a time limit while an engine is suspended, because the caller that suspended the engine readmits
it later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from .protocol import (
    SESSION_SEPARATOR,
    Completion,
    EngineBroken,
    EngineDied,
    EngineStats,
    SamplingParams,
    ServingEngine,
)
from .routing import BLOCK, EngineLoad, PrefixCache, RoutedPrompt, Routing, block_hashes

_log = logging.getLogger(__name__)

ABORT_EVERY_S = 0.25
"""Seconds between two aborts of the same request by `Router.suspend`."""


class NoEngineAvailable(RuntimeError):
    """Raised when no engine was available for a request within the time limit. The message says why each engine was
    removed."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine that the router has removed from routing because it died or broke."""

    name: str
    reason: str
    """Error that made the router remove the engine, as text."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """Result of suspending an engine: how its requests ended."""

    ended: int
    """Number of samples in requests that ended by themselves."""
    moved: int
    """Number of samples in requests that were cut off. They continue on other engines from the tokens that they
    have."""
    kept_tokens: int
    """Number of tokens that the cut-off samples kept."""
    lost_tokens: int
    """Upper bound on the number of tokens that were lost because the engine died before it returned them: the largest
    number that its requests may have."""


class Router:
    """Sends each request to one of several engines and returns that engine's complete answer. Methods run in one event
    loop."""

    died = ""

    def __init__(
        self, *, timeout_s: float, prefixes: bool = True, on_left_out: Callable[[LeftOut], None] | None = None
    ) -> None:
        """timeout_s: seconds that a request waits for an available engine before it raises NoEngineAvailable.

        prefixes: whether the choice of an engine depends on the prompts that it has cached; see `Routing`.
        on_left_out: callback that is called in the event loop for each engine that is removed from routing because it
        failed. It must not raise.
        """
        self._timeout_s = timeout_s
        self._on_left_out = on_left_out
        self._members: dict[str, _Member] = {}
        self._left_out: dict[str, str] = {}
        self._requests: dict[str, _Routed] = {}
        self._suspended: set[str] = set()
        """Names of the suspended engines. Some of them may have died meanwhile."""
        self._routing = Routing(prefixes=prefixes)
        self._changed = asyncio.Event()  # The event is replaced each time it is set.
        self._closed = False
        self._past = EngineStats()  # These counters belong to removed engines.

    # ---------------- These methods add, remove and suspend engines.

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the engines that take requests."""
        return tuple(member.name for member in self._members.values() if member.accepting)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the engines that have not been removed, whether they take requests or not."""
        return tuple(self._members)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Engines that failed, were removed from routing and have not been added since: engine name -> reason."""
        return self._left_out

    @property
    def available_share(self) -> float:
        """Share of the engines, failed ones included, that take requests; 1.0 before any was added."""
        names = self.names
        return len(names) / (len(names) + len(self._left_out)) if names or self._left_out else 1.0

    def engine_stats(self) -> dict[str, EngineStats]:
        """Return the counters of each engine that has not been removed, by engine name."""
        return {name: member.engine.stats for name, member in self._members.items()}

    def add(self, name: str, engine: ServingEngine) -> None:
        """Start sending requests to `engine`, beginning with requests that already wait for an available engine. Raises
        ValueError if `name` is in use."""
        if name in self._members:
            raise ValueError(f"engine {name!r} exists already; names must be unique")
        self._members[name] = _Member(name, engine)
        self._left_out.pop(name, None)
        self._suspended.discard(name)
        self._wake()

    async def remove(self, name: str, grace_s: float = 0.0) -> ServingEngine:
        """Stop sending requests to an engine, wait until none is in flight, and return it without closing it.

        Requests that the engine has not answered within `grace_s` seconds are cancelled there and started again on
        other engines. Raises KeyError if there is no engine of this name.
        """
        member = self._members[name]
        member.accepting = False
        try:
            async with asyncio.timeout(grace_s):
                await member.idle.wait()
        except TimeoutError:
            for request in list(member.requests):
                request.move()
            await member.idle.wait()  # `move` has cancelled the requests' calls, so this wait is short.
        self._forget(member)
        return member.engine

    async def suspend(self, name: str, *, cut: bool = True) -> Suspension:
        """Stop sending requests to an engine until `readmit`, and wait until none of its requests is in flight.

        cut: True aborts these requests; their callers get the tokens so far and continue from there
        (`environments.turns.generate_whole`). False lets the requests end by themselves. Idempotent. An engine that has
        been left out also counts as suspended, because another one will be added under its name. Cancelling the call
        leaves the engine suspended.
        """
        self._suspended.add(name)
        member = self._members.get(name)
        if member is None:
            return Suspension(0, 0, 0, 0)
        member.accepting = False
        tally = member.tally = _Tally()
        while not member.idle.is_set():
            for request in list(member.requests) if cut else ():
                try:  # The abort is repeated, because it can overtake its request.
                    await member.engine.abort(request.request_id)
                except (EngineDied, EngineBroken) as error:
                    self._exclude(member, error)
            try:
                async with asyncio.timeout(ABORT_EVERY_S):
                    await member.idle.wait()
            except TimeoutError:
                continue
        member.tally = None
        return Suspension(tally.ended, tally.moved, tally.kept_tokens, tally.lost_tokens)

    async def retire(self, name: str) -> ServingEngine | None:
        """Take an engine out of routing for good. Its requests in flight continue on other engines from the tokens that
        they have. Returns it without closing it; None if there is no engine of this name any more."""
        await self.suspend(name)
        engine = await self.remove(name) if name in self._members else None
        self._suspended.discard(name)
        self._left_out.pop(name, None)
        return engine

    def readmit(self, name: str) -> None:
        """Resume sending requests to a suspended engine, beginning with requests that wait. Raises KeyError if there is
        no engine of this name."""
        self._members[name].load.cache.clear()  # An engine that slept has dropped its keys and values.
        self._members[name].accepting = True
        self._suspended.discard(name)
        self._wake()

    def _exclude(self, member: _Member, error: Exception) -> None:
        if self._members.get(member.name) is not member:
            return  # Another request has already left the engine out.
        reason = f"{type(error).__name__}: {error}"
        self._forget(member)
        self._left_out[member.name] = reason
        _log.warning("engine left out: %s: %s", member.name, reason)
        if self._on_left_out is not None:
            self._on_left_out(LeftOut(member.name, reason))

    def _forget(self, member: _Member) -> None:
        if self._members.get(member.name) is member:
            del self._members[member.name]
            _accumulate(self._past, replace(member.engine.stats, cache_tokens=0, in_flight=0))
            member.load.cache.clear()  # Sessions remember the load of their engine.
        member.accepting = False

    def _wake(self) -> None:
        """Wake the requests that wait for an engine, so that each of them checks again whether one is available."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # ---------------- These methods route requests to engines.

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Generate completions with one of the engines. When that engine dies or breaks, another one repeats the whole
        request.

        Raises NoEngineAvailable when no engine is available for `timeout_s` seconds, ValueError if the id is already in
        flight, RuntimeError if the router is closed, and any error of a healthy engine. It never raises EngineDied or
        EngineBroken.
        """
        if self._closed:
            raise RuntimeError(f"request {request_id!r}: the router is closed")
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already in flight; ids must be unique")
        request = self._requests[request_id] = _Routed(request_id, self._routed_prompt(request_id, prompt_ids, params))
        try:
            while not request.aborted:
                member = await self._choose(request)
                if member is None:
                    break
                try:
                    completions = await self._attempt(member, request, prompt_ids, params)
                    self._learn(member, request, prompt_ids, completions)
                    return completions
                except _Moved:
                    continue
                except (EngineDied, EngineBroken) as error:
                    # Each failed attempt removes its engine, so there are at most as many attempts as engines.
                    self._exclude(member, error)
            return [Completion.empty() for _ in range(params.n)]
        finally:
            del self._requests[request_id]

    async def _choose(self, request: _Routed) -> _Member | None:
        """Wait for an available engine and return it; return None if the request is aborted during the wait. The wait
        has no limit while an engine is suspended."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while not request.aborted:
            if self._closed:
                raise RuntimeError(f"request {request.request_id!r}: the router was closed before it answered")
            candidates = {member.load: member for member in self._members.values() if member.accepting}
            if candidates:
                for member in candidates.values():
                    member.refresh()
                return candidates[self._routing.choose([*candidates], request.prompt, _now())]
            try:
                # `asyncio.wait_for` is not used, because in Python 3.11 it swallows a cancellation that coincides with
                # the change.
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                if self._suspended or self.names:  # An engine may have come in the moment of the deadline.
                    deadline += self._timeout_s
                    continue
                reasons = "; ".join(f"{name}: {reason}" for name, reason in self._left_out.items())
                raise NoEngineAvailable(
                    f"request {request.request_id!r}: no engine was available for {self._timeout_s:g} s "
                    f"({reasons or 'no engine was ever added'})"
                ) from None
        return None

    def _routed_prompt(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> RoutedPrompt:
        session, turned, _ = request_id.partition(SESSION_SEPARATOR)
        salt = len(params.adapter)  # The model without its adapter has keys and values of its own.
        blocks = block_hashes(prompt_ids, salt) if self._routing.prefixes else []
        return RoutedPrompt(session if turned else None, params.n, blocks, salt)

    def _learn(
        self, member: _Member, request: _Routed, prompt_ids: Sequence[int], completions: Sequence[Completion]
    ) -> None:
        """Take note of an answer: of the engine's load, and of what it has cached now."""
        member.refresh()
        member.load.report(member.engine.stats.in_flight, _now())
        blocks = request.prompt.blocks
        for one in completions:
            self._routing.learn(len(one.token_ids))
            # Keys and values of older weights are not used again.
            if self._routing.prefixes and one.versions[:1].tolist() == [member.engine.version]:
                rest = np.concatenate([np.asarray(prompt_ids[len(blocks) * BLOCK :], np.int32), one.token_ids])
                before = blocks[-1] if blocks else request.prompt.salt
                member.load.cache.add([*blocks, *block_hashes(rest, before)])

    async def _attempt(
        self, member: _Member, request: _Routed, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        task = asyncio.create_task(member.engine.generate(request.request_id, prompt_ids, params))
        request.begin(member, task)
        self._routing.begin(member.load, request.prompt)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        finally:
            if member.tally is not None and not task.cancelled():
                if task.exception() is None:
                    member.tally.answered(task.result())
                else:
                    member.tally.lost_tokens += params.n * params.max_new_tokens
            self._routing.end(member.load, request.prompt)
            request.end()
        if task.cancelled():
            raise _Moved
        return task.result()

    async def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.aborted = True
        self._wake()
        await asyncio.sleep(0)  # An attempt that was made in this turn of the event loop reaches its engine first.
        member = request.member
        if member is None:
            return
        try:
            await member.engine.abort(request_id)
        except (EngineDied, EngineBroken) as error:
            self._exclude(member, error)

    # ---------------- These methods concern all engines together.

    @property
    def version(self) -> int:
        """Lowest version that any of the engines serves; 0 when there are no engines. Each token carries its own
        version."""
        return min((member.engine.version for member in self._members.values()), default=0)

    @property
    def stats(self) -> EngineStats:
        """Sum of the counters of all engines, including removed ones."""
        total = EngineStats()
        for stats in (self._past, *self.engine_stats().values()):
            _accumulate(total, stats)
        return total

    @property
    def progress(self) -> int:
        """Number of tokens that the engines have returned. Tokens of requests in flight are not counted, because only
        the engines themselves know of them."""
        return self.stats.tokens

    async def close(self) -> None:
        """Close all engines. Requests that wait for an available engine raise RuntimeError. Idempotent."""
        self._closed = True
        self._wake()
        await asyncio.gather(*(member.engine.close() for member in self._members.values()))


@dataclass(slots=True, eq=False)
class _Member:
    name: str
    engine: ServingEngine
    accepting: bool = True
    tally: _Tally | None = None
    """Counter of how the requests in flight end while the engine is being suspended; None at other times."""
    requests: set[_Routed] = field(default_factory=set)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    load: EngineLoad = field(init=False)
    version: int = field(init=False)
    """Version of the weights to which the cached blocks in `load` belong."""

    def __post_init__(self) -> None:
        self.idle.set()
        self.load = EngineLoad(PrefixCache(self.engine.stats.cache_tokens))
        self.version = self.engine.version

    def refresh(self) -> None:
        """Forget what the engine had cached with older weights, because its requests do not use that any more."""
        if self.version != self.engine.version:
            self.version = self.engine.version
            self.load.cache.clear()


@dataclass(slots=True)
class _Tally:
    """Counts how requests end on an engine that is being suspended; see `Suspension`."""

    ended: int = 0
    moved: int = 0
    kept_tokens: int = 0
    lost_tokens: int = 0

    def answered(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.finish_reason == "abort":
                self.moved += 1
                self.kept_tokens += len(completion.token_ids)
            else:
                self.ended += 1


class _Routed:
    __slots__ = ("request_id", "prompt", "aborted", "member", "_task")

    def __init__(self, request_id: str, prompt: RoutedPrompt) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.aborted = False
        self.member: _Member | None = None
        """Engine that works on the request; None while the request waits for an available engine."""
        self._task: asyncio.Task[list[Completion]] | None = None

    def begin(self, member: _Member, task: asyncio.Task[list[Completion]]) -> None:
        self.member, self._task = member, task
        member.requests.add(self)
        member.idle.clear()

    def end(self) -> None:
        assert self.member is not None
        self.member.requests.discard(self)
        if not self.member.requests:
            self.member.idle.set()
        self.member = self._task = None

    def move(self) -> None:
        """Cancel the attempt on the current engine, so that the request is sent to another one."""
        if self._task is not None:
            self._task.cancel()


class _Moved(Exception):
    """Raised when `Router.remove` cancelled a request on its engine, so that another engine must take it."""


def _now() -> float:
    return asyncio.get_running_loop().time()


def _accumulate(total: EngineStats, stats: EngineStats) -> None:
    for counter in fields(EngineStats):
        setattr(total, counter.name, getattr(total, counter.name) + getattr(stats, counter.name))
