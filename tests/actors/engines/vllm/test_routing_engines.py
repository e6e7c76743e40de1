"""Tests that the router finds the prefixes that real vLLM engines have cached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.actors.engines.protocol import EngineStats, SamplingParams
from headrace.actors.engines.router import Router
from headrace.tests.actors.engines.vllm.builder import VOCAB_SIZE, build, save_model

if TYPE_CHECKING:
    from headrace.actors.engines.vllm.engine import VllmEngine

pytestmark = pytest.mark.vllm

CONTEXT = 4096
GROUPS, EPISODES, TURNS = 4, 6, 3
PROMPT = 3072


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, list[VllmEngine]]]:
    folder = save_model(tmp_path_factory.mktemp("routing") / "model", "untied", context=CONTEXT)
    runner, engines = asyncio.Runner(), [build(folder, receiver=None) for _ in range(2)]
    yield runner, engines
    for engine in engines:
        runner.run(engine.close())
    runner.close()


def counters(engines: list[VllmEngine]) -> EngineStats:
    stats = [engine.stats for engine in engines]
    return EngineStats(
        prompt_tokens=sum(one.prompt_tokens for one in stats), cached_tokens=sum(one.cached_tokens for one in stats)
    )


async def play(engines: list[VllmEngine], prefixes: bool, seed: int) -> EngineStats:
    """Groups of episodes with a long prompt each, whose answers differ in length. Returns what the engines counted."""
    router, rng, before = Router(timeout_s=30.0, prefixes=prefixes), random.Random(seed), counters(engines)
    for index, engine in enumerate(engines):
        router.add(f"e{index}", engine)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(count)]

    async def episode(name: str, ids: list[int], words: int) -> None:
        for turn in range(TURNS):
            params = SamplingParams(max_new_tokens=words, seed=seed)
            [answer] = await router.generate(f"{name}/{turn}", ids, params)
            ids += [*answer.token_ids.tolist(), *drawn(24)]

    prompts = [drawn(PROMPT) for _ in range(GROUPS)]
    await asyncio.gather(
        *(
            episode(f"{seed}-{group}-{number}", list(prompt), 4 * 2 ** rng.randrange(4))
            for group, prompt in enumerate(prompts)
            for number in range(EPISODES)
        )
    )
    after = counters(engines)
    return EngineStats(
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        cached_tokens=after.cached_tokens - before.cached_tokens,
    )


def test_prefix_routing_computes_fewer_prompt_tokens(two: tuple[asyncio.Runner, list[VllmEngine]]) -> None:
    runner, engines = two
    assert all(engine.stats.cache_tokens > GROUPS * PROMPT for engine in engines)
    by_load = runner.run(play(engines, False, 1))
    by_prefix = runner.run(play(engines, True, 2))
    computed = [one.prompt_tokens - one.cached_tokens for one in (by_load, by_prefix)]
    assert by_load.cached_tokens > 0 and min(computed) > GROUPS * PROMPT - 128
    assert computed[1] <= 0.7 * computed[0], computed


def test_the_router_knows_what_vllm_has_cached(two: tuple[asyncio.Runner, list[VllmEngine]]) -> None:
    runner, engines = two

    async def main() -> None:
        router, rng = Router(timeout_s=30.0), random.Random(9)
        router.add("e0", engines[0])
        ids = [rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT)]
        [answer] = await router.generate("first", ids, SamplingParams(max_new_tokens=128, seed=0))
        ids += answer.token_ids.tolist()
        router.add("e1", engines[1])
        before = engines[0].stats.cached_tokens
        await router.generate("second", ids, SamplingParams(max_new_tokens=1))
        assert engines[0].stats.cached_tokens - before >= PROMPT, "the request went where its prefix is"
        await engines[0].reset_prefix_cache()

    runner.run(main())
