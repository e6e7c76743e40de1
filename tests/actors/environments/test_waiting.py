"""Episodes that wait for their tools take little memory, and none overtakes another that has become ready before."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import build_endpoint
from headrace.actors.environments.host import EpisodeHost, Gate
from headrace.actors.protocols import Prompt
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer
from headrace.tools.measure import waiting

TOKENIZER = make_chat_tokenizer()


def test_no_episode_overtakes_another_at_the_gate() -> None:
    """A prompt whose episodes are short and many takes no place from one that has waited longer."""

    async def main() -> None:
        gate, engine, asked, began = Gate(2), TalkingEngine(TOKENIZER, "a"), [], []

        async def play(name: str, times: int) -> None:
            for turn in range(times):
                asked.append((name, turn))
                async with gate.place(engine):
                    began.append((name, turn))
                    for _ in range(rng.randint(0, 3)):
                        await asyncio.sleep(0)

        rng = random.Random(0)
        tasks = [asyncio.create_task(play(f"greedy {number}", 20)) for number in range(5)]
        tasks += [asyncio.create_task(play(f"rare {number}", 2)) for number in range(5)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [one for one in asked if one in began] == began and gate.running == 0
        assert len(began) > 80

    asyncio.run(main())


def test_a_wait_that_is_cancelled_as_a_place_becomes_free_keeps_no_place() -> None:
    async def main() -> None:
        gate, engine = Gate(1), TalkingEngine(TOKENIZER, "a")

        async def hold(free: asyncio.Event) -> None:
            async with gate.place(engine):
                await free.wait()

        free = asyncio.Event()
        free.set()
        for cancel_first in (True, False):
            first = asyncio.create_task(hold(begun := asyncio.Event()))
            waits = [asyncio.create_task(hold(free)) for _ in range(3)]
            await asyncio.sleep(0)
            for step in (waits[0].cancel, begun.set) if cancel_first else (begun.set, waits[0].cancel):
                step()
                if not cancel_first:
                    await asyncio.sleep(0)  # The first episode leaves, and the wait is given its place.
            await asyncio.gather(first, *waits, return_exceptions=True)
            assert gate.running == 0 and waits[0].cancelled() and not waits[2].cancelled()

    asyncio.run(main())


def test_requests_are_made_in_the_order_in_which_tools_answer() -> None:
    """The load is skewed: the tools of one prompt answer at once, those of the others now and then. While an episode
    waits for the engine, no other is served twice."""

    class Queue(TalkingEngine):
        """An engine that answers two requests at a time, in order."""

        def __init__(self) -> None:
            super().__init__(TOKENIZER, "ab")
            self.places, self.asked, self.served = asyncio.Semaphore(2), [], []

        async def generate(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> Any:
            self.asked.append(request_id)
            async with self.places:
                self.served.append(request_id)
                return await super().generate(request_id, prompt_ids, params)

    async def play(episode: Episode) -> float:
        rng = random.Random(episode.name)
        for _ in range(40 if episode.prompt.uid == "fast" else 4):
            await episode.generate(max_new_tokens=2)
            for _ in range(0 if episode.prompt.uid == "fast" else rng.randint(0, 60)):
                await asyncio.sleep(0)
        return 0.0

    async def main() -> Queue:
        engine, host = Queue(), EpisodeHost(play, EnvironmentConfig())
        params = SamplingParams(n=4, max_new_tokens=200)
        prompts = [Prompt(uid, "q", "", {}) for uid in ("fast", "b", "c", "d", "e")]
        await asyncio.gather(*(host.run(prompt, engine, TOKENIZER, params) for prompt in prompts))
        return engine

    engine = asyncio.run(main())
    assert engine.served == engine.asked and len(engine.served) == 4 * (40 + 4 * 4)
    first = engine.served[: 4 * 5 * 2]
    assert {request.partition(".")[0] for request in first} == {"fast", "b", "c", "d", "e"}


@pytest.mark.parametrize("kind, most", [("plain", 38_000), ("endpoint", 80_000)])
def test_an_episode_that_waits_takes_little_memory(kind: str, most: int) -> None:
    """Ten turns of 64 tokens are behind it. They take 10 KB; texts and tokens of each call would take 200 KB."""
    number, turns = 7, 10

    async def main() -> float:
        engine = waiting.Answers()
        tools = waiting.Tools(engine, kind == "endpoint", turns)
        endpoint = build_endpoint(waiting.endpoint_config(kind, number))
        host = EpisodeHost(tools, EnvironmentConfig(), endpoint=endpoint)
        params = SamplingParams(n=1, max_new_tokens=1 << 20)
        text = " ".join(f"w{300 + word}" for word in range(256))  # Python keeps one object of each smaller number.

        async def wait_for(first: int, behind: int) -> list[asyncio.Task[Any]]:
            prompts = [Prompt(str(uid), text, "", {}) for uid in range(first, behind)]
            tasks = [asyncio.create_task(host.run(prompt, engine, tokenizer, params)) for prompt in prompts]
            await tools.until(behind)
            gc.collect()
            return tasks

        tokenizer = waiting.make_tokenizer()
        tasks = await wait_for(0, 4)  # Imports and caches are made now.
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        tasks += await wait_for(4, number)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        tools.end()
        await asyncio.gather(*tasks)
        await host.close()
        return (after - before) / (number - 4)

    found = asyncio.run(main())
    assert found < most, found
