"""A storm of episodes with random waits, errors, time-outs, hangs and agents, for a test and for a drill."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.protocols import Prompt
from headrace.tests.actors.environments.endpoint_world import TOKENIZER, Recorder, World

GROUP = 4


class Forgetful(Recorder):
    """An engine that remembers nothing, so that its memory stays as it is."""

    async def generate(self, request_id: str, prompt_ids: Any, params: SamplingParams) -> Any:
        completions = await super().generate(request_id, prompt_ids, params)
        self.seen.clear()
        return completions


@dataclass
class Storm:
    """What came of the episodes."""

    began: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    memory: list[int] = field(default_factory=list)
    """Resident bytes of this process, noted while the episodes ran."""
    sessions_left: int = 0
    calls_left: int = 0
    episodes_left: int = 0


async def play(episode: Episode) -> float:
    """Play an episode whose fate depends on its name."""
    rng = random.Random(episode.name)
    fate = rng.choice(["fine", "fine", "agent", "agent", "error", "hang", "drop", "long"])
    for _ in range(rng.randint(1, 3)):
        await asyncio.sleep(rng.expovariate(1 / 0.02))
        if fate in ("agent", "drop"):
            address = episode.endpoint
            patience_s = 0.01 if fate == "drop" else 30.0
            async with openai.AsyncOpenAI(
                base_url=address.url, api_key=address.secret, max_retries=0, timeout=patience_s
            ) as client:
                messages: list[Any] = [{"role": "user", "content": episode.name}]
                await client.chat.completions.create(model="m", messages=messages)
        else:
            await episode.generate()
            episode.add_text(" and")
    if fate == "error":
        raise OSError("the sandbox is gone")
    if fate == "hang":
        await asyncio.sleep(3600)
    if fate == "long":
        await episode.run_blocking(time.sleep, 0.05)
    return 1.0


async def blow(seconds: float, at_once: int) -> Storm:
    """Keep `at_once` episodes in flight for some seconds, and return what came of them once all have ended."""
    storm, number = Storm(), 0
    config = EnvironmentConfig(turn_timeout_s=1.0, episode_timeout_s=5.0, max_rows=3, max_episodes=at_once)
    engine = Forgetful("ab", "cd", latency_s=0.02, latency_sigma=0.5, version=1)
    world = World(play, engine, config=config)
    until = time.monotonic() + seconds
    params = SamplingParams(n=GROUP, max_new_tokens=200)

    async def prompts() -> None:
        nonlocal number
        while time.monotonic() < until:
            number += 1
            prompt = Prompt(f"p{number}", "q", "", {})
            storm.began += GROUP
            samples = await world.host.run(prompt, engine, TOKENIZER, params)
            assert [sample.index for sample in samples] == list(range(GROUP))
            assert {sample.prompt.uid for sample in samples} == {prompt.uid}
            for sample in samples:
                storm.outcomes[sample.error.partition(":")[0] or "fine"] += 1
                assert sample.error or sample.rewards == {"reward": 1.0}

    async def weigh() -> None:
        while True:
            storm.memory.append(psutil.Process().memory_info().rss)
            await asyncio.sleep(max(0.2, seconds / 50))

    weighing = asyncio.create_task(weigh())
    await asyncio.gather(*(prompts() for _ in range(at_once // GROUP)))
    weighing.cancel()
    storm.sessions_left, storm.calls_left = len(world.server._sessions), world.server._num_calls
    storm.episodes_left = world.host._gate.running
    await world.host.close()
    return storm
