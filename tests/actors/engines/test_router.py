"""Tests of the router: it chooses engines, and answers every request once, whatever dies, joins or leaves."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from headrace.actors.engines.protocol import (
    Completion,
    EngineBroken,
    EngineDied,
    GenerationEngine,
    SamplingParams,
)
from headrace.actors.engines.router import LeftOut, NoEngineAvailable, Router
from headrace.actors.engines.routing import BLOCK, block_hashes
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.turns import generate_whole
from headrace.tests.waiting import until

BOUND_S = 30.0


def script(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    """Tokens that say whose they are."""
    rng = random.Random(f"{request_id}/{sample}")
    return [rng.randrange(100) for _ in range(20)]


class MortalEngine(ScriptedEngine):
    """A scripted engine that dies, or breaks, on demand: calls in flight and later ones fail, as with an actor."""

    def __init__(self, *, latency_s: float = 0.0, latency_sigma: float = 0.0, seed: int = 0) -> None:
        super().__init__(script, latency_s=latency_s, latency_sigma=latency_sigma, seed=seed)
        self.calls: list[tuple[str, int | None]] = []
        self.error: Exception | None = None
        self._fate = asyncio.Event()

    def die(self, error: Exception) -> None:
        self.error = error
        self._fate.set()

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.calls.append((request_id, params.seed))
        return await self._mortal(super().generate(request_id, prompt_ids, params))

    async def abort(self, request_id: str) -> None:
        await self._mortal(super().abort(request_id))

    async def _mortal(self, call: Awaitable[Any]) -> Any:
        task, fate = asyncio.ensure_future(call), asyncio.ensure_future(self._fate.wait())
        try:
            await asyncio.wait({task, fate}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None:
                raise self.error
            return task.result()
        finally:
            task.cancel()
            fate.cancel()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(BOUND_S):
            await main()

    asyncio.run(bounded())


async def routed(*engines: GenerationEngine, timeout_s: float = 10.0, **options: Any) -> Router:
    router = Router(timeout_s=timeout_s, **options)
    for index, engine in enumerate(engines):
        router.add(f"e{index}", engine)
    return router


def expect_answer(request_id: str, completions: list[Completion], params: SamplingParams, aborted: bool) -> None:
    assert len(completions) == params.n
    for sample, completion in enumerate(completions):
        whole = script(request_id, [1], sample)[: params.max_new_tokens]
        got = completion.token_ids.tolist()
        assert got == whole[: len(got)] and len(completion.versions) == len(got)
        assert len(got) == len(whole) or (aborted and completion.finish_reason == "abort")


def counting(request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
    """1, 2, 3, ... up to 40."""
    assert len(prompt_ids) == 1, "without the tokens that it continues from"
    return list(range(1, 41))


@pytest.mark.long
def test_suspended_engines_hand_their_requests_on_with_all_their_tokens() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(counting, latency_s=1.0, version=version) for version in (3, 4)]
        router = await routed(*engines, timeout_s=0.2)
        params = SamplingParams(n=2, max_new_tokens=50)
        asked = [asyncio.create_task(generate_whole(router, None, f"r{i}", [9], params)) for i in range(6)]
        await asyncio.sleep(0.2)
        first = await router.suspend("e0")
        assert router.names == ("e1",) and first.moved == 6 and first.kept_tokens > 0 and not first.lost_tokens
        second = await router.suspend("e1")
        assert router.names == () and second.moved >= 6
        await asyncio.sleep(0.3)  # longer than a request waits where no engine will come
        assert not any(task.done() for task in asked)
        router.readmit("e0")
        versions = set()
        for completions in await asyncio.gather(*asked):
            for completion in completions:
                assert completion.token_ids.tolist() == list(range(1, 41)) and completion.finish_reason == "stop"
                versions |= set(completion.versions.tolist())
        assert versions == {3, 4}
        assert sum(engine.stats.tokens for engine in engines) == 6 * 2 * 40, "no token was generated twice"
        router.readmit("e1")
        assert router.names == ("e0", "e1")
        await router.close()

    run(main)


def test_an_engine_that_leaves_for_good_hands_its_requests_on_and_is_not_waited_for() -> None:
    async def main() -> None:
        engines = [ScriptedEngine(counting, latency_s=0.2, version=version) for version in (3, 4)]
        router = await routed(*engines, timeout_s=0.05)
        params = SamplingParams(n=2, max_new_tokens=50)
        asked = [asyncio.create_task(generate_whole(router, None, f"r{i}", [9], params)) for i in range(4)]
        await asyncio.sleep(0.05)
        assert await router.retire("e0") is engines[0] and router.members == ("e1",)
        for completions in await asyncio.gather(*asked):
            assert all(completion.token_ids.tolist() == list(range(1, 41)) for completion in completions)
        assert sum(engine.stats.tokens for engine in engines) == 4 * 2 * 40, "no token was generated twice"
        assert await router.retire("e1") is engines[1] and await router.retire("e1") is None
        with pytest.raises(NoEngineAvailable):
            await router.generate("late", [1], params)
        await router.close()

    run(main)


def test_a_suspended_engine_that_dies_is_waited_for() -> None:
    async def main() -> None:
        engine = MortalEngine(latency_s=0.1)
        router = await routed(engine, timeout_s=0.1)
        params = SamplingParams(n=2, max_new_tokens=10)
        task = asyncio.create_task(router.generate("r", [1], params))
        await asyncio.sleep(0.02)
        suspending = asyncio.create_task(router.suspend("e0", cut=False))
        await asyncio.sleep(0.02)
        engine.die(EngineDied("it was hit"))
        suspension = await suspending
        assert suspension.lost_tokens == 2 * 10, "as many as it may have had"
        await asyncio.sleep(0.3)
        assert not task.done() and router.names == ()
        router.add("e0", MortalEngine())
        expect_answer("r", await task, params, False)
        await router.close()

    run(main)


class Storm:
    """Requests to a router whose engines join, leave, die and sleep at random moments."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.left_out: list[LeftOut] = []
        self.engines = {f"e{i}": MortalEngine(latency_s=0.005, latency_sigma=1.0, seed=i) for i in range(3)}
        self.ever = list(self.engines.values())
        self.router = Router(timeout_s=20.0, on_left_out=self.left_out.append)
        for name, engine in self.engines.items():
            self.router.add(name, engine)
        self.aborted: set[str] = set()
        self.answers: Counter[str] = Counter()
        self.requests: dict[str, asyncio.Task] = {}
        self.changes: list[asyncio.Task] = []
        self.suspending: set[str] = set()
        self.leaving: set[str] = set()

    async def ask(self, request_id: str) -> None:
        rng = self.rng
        params = SamplingParams(n=rng.randint(1, 4), max_new_tokens=rng.randint(1, 30), seed=self.seed)
        completions = await self.router.generate(request_id, [1], params)
        expect_answer(request_id, completions, params, request_id in self.aborted)
        self.answers[request_id] += 1

    async def suspend_for_a_while(self, name: str, seconds: float) -> None:
        await self.router.suspend(name, cut=False)
        assert name not in self.router.names
        await asyncio.sleep(seconds)
        self.suspending.discard(name)
        if name in self.router.members and name not in self.leaving:
            self.router.readmit(name)

    async def leave(self, name: str, grace_s: float) -> None:
        if name in self.router.members:  # it may have died since it was chosen
            await self.router.remove(name, grace_s)

    async def strike(self, event: int) -> None:
        """Make something happen: mostly a request, else a change of the engines."""
        rng, names = self.rng, list(self.router.names)
        kinds = ["ask", "die", "break", "join", "leave", "abort", "suspend"]
        kind = rng.choices(kinds, [80, 4, 3, 8, 3, 8, 6])[0]
        if kind == "ask":
            request_id = f"s{event % 7}/{event}" if event % 2 else f"r{event}"
            self.requests[request_id] = asyncio.create_task(self.ask(request_id))
        elif kind in ("die", "break") and names:
            name = rng.choice(names)
            error = EngineDied if kind == "die" else EngineBroken
            self.engines[name].die(error(f"{name} was hit at {event}"))
        elif kind == "join":
            name = f"e{len(self.ever)}"
            self.engines[name] = MortalEngine(latency_s=0.005, latency_sigma=1.0, seed=len(self.ever))
            self.ever.append(self.engines[name])
            self.router.add(name, self.engines[name])
        elif kind == "leave" and len(names) > 1:
            name, grace_s = rng.choice(names), rng.choice([0.0, 0.003])
            if name not in self.leaving:  # its removal may not have begun yet
                self.leaving.add(name)
                self.changes.append(asyncio.create_task(self.leave(name, grace_s)))
        elif kind == "abort" and self.requests:
            request_id = rng.choice(list(self.requests))
            self.aborted.add(request_id)
            await self.router.abort(request_id)
        elif kind == "suspend" and names:
            name = rng.choice(names)
            if name not in self.leaving | self.suspending:
                self.suspending.add(name)
                self.changes.append(asyncio.create_task(self.suspend_for_a_while(name, rng.random() * 0.01)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(25))
def test_every_request_is_answered_once_whatever_happens(seed: int) -> None:
    async def main() -> None:
        storm = Storm(seed)
        router = storm.router
        for event in range(120):
            await storm.strike(event)
            if storm.rng.random() < 0.3:
                await asyncio.sleep(storm.rng.random() * 0.004)
        router.add("last", MortalEngine(latency_s=0.001))
        await asyncio.gather(*storm.requests.values(), *storm.changes)
        assert storm.answers == Counter(dict.fromkeys(storm.requests, 1))
        assert not router._requests and all(member.load.samples == 0 for member in router._members.values())
        left_out = [left.name for left in storm.left_out]
        assert len(set(left_out)) == len(left_out), "an engine was left out twice"
        for engine in storm.ever:
            assert max(Counter(call for call, _ in engine.calls).values(), default=0) <= 1, "sent twice to one engine"
        await router.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)  # nothing is left behind

    run(main)


def test_the_least_loaded_engine_by_samples() -> None:
    async def main() -> None:
        engines = [MortalEngine(latency_s=60.0) for _ in range(3)]
        router = await routed(*engines)
        asked = []
        for request_id, n in [("big", 8), ("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 5), ("f", 1)]:
            asked.append(asyncio.create_task(router.generate(request_id, [1], SamplingParams(n=n))))
            await asyncio.sleep(0)
        await until(lambda: sum(len(engine.calls) for engine in engines) == 7)
        assert [[call for call, _ in engine.calls] for engine in engines] == [["big"], ["a", "c", "e"], ["b", "d", "f"]]
        await router.close()
        await asyncio.gather(*asked)
        assert router.stats.rows == sum(engine.stats.rows for engine in engines) == 18

    run(main)


def test_turns_of_a_session_go_to_one_engine_while_it_lives() -> None:
    async def main() -> None:
        engines = [MortalEngine() for _ in range(3)]
        router = await routed(*engines)
        for turn in range(4):
            await asyncio.gather(*(router.generate(f"s{s}/{turn}", [1], SamplingParams()) for s in range(9)))
        homes = [{call.split("/")[0] for call, _ in engine.calls} for engine in engines]
        assert sum(map(len, homes)) == 9 and {len(home) for home in homes} == {3}
        engines[0].die(EngineDied("e0"))
        for turn in range(4, 8):
            await asyncio.gather(*(router.generate(f"s{s}/{turn}", [1], SamplingParams()) for s in range(9)))
        after = [{call.split("/")[0] for call, _ in engine.calls} for engine in engines[1:]]
        assert sum(map(len, after)) == 9 and after[0] > homes[1] and after[1] > homes[2]

    run(main)


@pytest.mark.parametrize("error", [EngineDied("e0: process 7 is gone"), EngineBroken("e0: half a version")])
def test_requests_of_a_dead_or_broken_engine_are_sent_whole_to_others(error: Exception) -> None:
    async def main() -> None:
        left_out: list[LeftOut] = []
        engines = [MortalEngine(latency_s=0.5), MortalEngine(latency_s=0.01)]
        router = await routed(*engines, on_left_out=left_out.append)
        params = SamplingParams(n=2, max_new_tokens=20, seed=11)
        asked = {f"r{i}": asyncio.create_task(router.generate(f"r{i}", [1], params)) for i in range(6)}
        await until(lambda: len(engines[0].calls) == 3)
        engines[0].die(error)
        for request_id, task in asked.items():
            expect_answer(request_id, await task, params, aborted=False)
        assert set(engines[0].calls) < set(engines[1].calls), "the same ids and seeds are sent again"
        assert left_out == [LeftOut("e0", f"{type(error).__name__}: {error}")]
        assert router.names == ("e1",) and list(router.left_out) == ["e0"]
        router.add("e0", MortalEngine())
        assert router.names == ("e1", "e0") and not router.left_out

    run(main)


def test_without_an_engine_requests_wait_bounded_and_say_who_died() -> None:
    async def main() -> None:
        engine = MortalEngine(latency_s=60.0)
        router = await routed(engine, timeout_s=0.1)
        lost = asyncio.create_task(router.generate("lost", [1], SamplingParams()))
        await until(lambda: bool(engine.calls))
        engine.die(EngineDied("process 7 is gone"))
        with pytest.raises(
            NoEngineAvailable, match="request 'lost': no engine was available for 0.1 s .e0: EngineDied: process 7"
        ):
            await lost
        router._timeout_s = 20.0
        waiting = asyncio.create_task(router.generate("kept", [1], SamplingParams(max_new_tokens=20)))
        ended = asyncio.create_task(router.generate("ended", [1], SamplingParams(n=3)))
        await until(lambda: len(router._requests) == 2)
        await router.abort("ended")
        assert [c.finish_reason for c in await ended] == ["abort"] * 3
        router.add("e1", MortalEngine())
        assert len((await waiting)[0].token_ids) == 20
        with pytest.raises(NoEngineAvailable, match="no engine was ever added"):
            await (await routed(timeout_s=0.01)).generate("a", [1], SamplingParams())

    run(main)


def test_what_a_sound_engine_raises_is_no_reason_to_try_another() -> None:
    async def main() -> None:
        engines = [MortalEngine(), MortalEngine()]
        router = await routed(*engines)
        with pytest.raises(ValueError, match="no tokens"):
            await router.generate("a", [], SamplingParams())
        assert sum(len(engine.calls) for engine in engines) == 1 and len(router.names) == 2
        for engine in engines:
            await engine.pause()
        twice = asyncio.create_task(router.generate("b", [1], SamplingParams()))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'b' is already in flight"):
            await router.generate("b", [1], SamplingParams())
        twice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await twice
        assert not router._requests and not any(engine._requests for engine in engines)
        with pytest.raises(ValueError, match="'e0' exists already"):
            router.add("e0", MortalEngine())
        await router.close()
        with pytest.raises(RuntimeError, match="closed"):
            await router.generate("a", [1], SamplingParams())

    run(main)


def test_removing_an_engine_lets_its_requests_end_or_moves_them() -> None:
    async def main() -> None:
        slow, other = MortalEngine(latency_s=60.0), MortalEngine()
        router = await routed(slow)
        params = SamplingParams(n=2, max_new_tokens=20)
        moved = asyncio.create_task(router.generate("moved", [1], params))
        await until(lambda: bool(slow.calls))
        router.add("other", other)
        assert await router.remove("e0", 0.02) is slow
        expect_answer("moved", await moved, params, aborted=False)
        assert not slow._requests and [call for call, _ in other.calls] == ["moved"]
        graceful = MortalEngine(latency_s=0.05)
        router.add("graceful", graceful)
        ended = asyncio.create_task(router.generate("ended", [1], params))
        await until(lambda: bool(graceful.calls))
        await router.remove("graceful", 20.0)
        assert ended.done() or graceful.stats.rows == 2
        expect_answer("ended", await ended, params, aborted=False)
        assert router.names == ("other",) and router.stats.rows == 4

    run(main)


class CachingEngine(MortalEngine):
    """A scripted engine that says that it keeps the keys and values of its prompts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stats.cache_tokens = 100_000

    def become(self, version: int) -> None:
        self._version = version

    @property
    def asked(self) -> list[str]:
        return [call for call, _ in self.calls]


LONG_PROMPT = [token % 97 for token in range(2000)]


def test_requests_go_where_their_prefix_is_until_the_engine_drops_it() -> None:
    async def main() -> None:
        engines = [CachingEngine(), CachingEngine()]
        router, params = await routed(*engines), SamplingParams(max_new_tokens=20)
        answers = [await router.generate(f"a{number}", LONG_PROMPT, params) for number in range(4)]
        assert engines[0].asked == ["a0", "a1", "a2", "a3"] and not engines[1].calls
        rest = [*LONG_PROMPT, *answers[-1][0].token_ids.tolist()]
        await router.generate("a3.0/again1", rest, params)  # as after a cut
        assert engines[0].asked[-1] == "a3.0/again1"
        assert router._members["e0"].load.cache.cached(block_hashes(rest)) == len(rest) // BLOCK * BLOCK
        await router.generate("b", LONG_PROMPT, SamplingParams(max_new_tokens=1, adapter="base"))
        assert engines[1].asked == ["b"], "the model without its adapter has keys and values of its own"
        for engine in engines:
            engine.become(1)  # Nothing that was computed with older weights is used again.
        await router.generate("c0", LONG_PROMPT, params)
        await router.generate("c1", LONG_PROMPT, params)
        assert engines[1].asked == ["b", "c0", "c1"]
        await router.suspend("e1")
        router.readmit("e1")
        await router.generate("d", LONG_PROMPT, params)
        assert engines[1].asked == ["b", "c0", "c1", "d"] and not engines[0].asked[5:]

    run(main)


def test_answers_of_older_weights_are_not_taken_for_cached() -> None:
    async def main() -> None:
        engine = CachingEngine(latency_s=0.05)
        router = await routed(engine)
        asked = asyncio.create_task(router.generate("a", LONG_PROMPT, SamplingParams(max_new_tokens=20)))
        await until(lambda: bool(engine.calls))
        engine.become(1)
        await asked
        found = router._members["e0"].load.cache.cached(block_hashes(LONG_PROMPT))
        versions = {int(version) for one in asked.result() for version in one.versions[:1]}
        assert (found > 0) == (versions == {1})

    run(main)


def test_engines_that_work_for_other_routers_get_fewer_requests() -> None:
    async def main() -> None:
        engines = [MortalEngine(), MortalEngine()]
        router = await routed(*engines)
        engines[0].stats.in_flight = 50
        for number in range(9):
            await router.generate(f"r{number}", [1], SamplingParams())
        assert len(engines[0].calls) == 1 and len(engines[1].calls) == 8

    run(main)


def test_least_loaded_routing_ignores_prefixes() -> None:
    async def main() -> None:
        engines = [CachingEngine(), CachingEngine()]
        router = await routed(*engines, prefixes=False)
        for number in range(4):
            await router.generate(f"a{number}", LONG_PROMPT, SamplingParams())
        assert [len(engine.calls) for engine in engines] == [2, 2]

    run(main)
