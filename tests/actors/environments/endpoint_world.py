"""A rollout actor's endpoint in front of a scripted engine, for tests: episodes that are played by a function."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.endpoint.server import EndpointServer
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt, Sample
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

platform.processor()  # openai's client asks for it, and the first answer takes a process
TOKENIZER = make_chat_tokenizer()
END: Any = TOKENIZER.eos_token_id
DEFAULTS = EnvironmentConfig()
CALL = '<tool_call>\n{"arguments": {"b":  2, "a": 1}, "name": "add"}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


class Recorder(TalkingEngine):
    """An engine that says one text after another in each episode, and remembers all requests."""

    def __init__(self, *texts: str, **settings: Any) -> None:
        super().__init__(TOKENIZER, *texts, **settings)


class World:
    """The host of an environment with an endpoint."""

    def __init__(
        self,
        play: Callable[[Episode], Awaitable[Any]],
        engine: Any,
        *,
        endpoint: EndpointConfig | None = None,
        config: EnvironmentConfig = DEFAULTS,
        adapters: bool = False,
        mask_limit: int = 0,
    ) -> None:
        self.mask_limit = mask_limit
        self.server = EndpointServer(endpoint or EndpointConfig(enabled=True), adapters=adapters)
        self.engine = engine
        chat = build_chat_format(TOKENIZER, "qwen3", {}, {})
        self.host = EpisodeHost(play, config, chat=lambda: chat, max_prompt_tokens=2000, endpoint=self.server)

    async def run(self, n: int = 1, *, uid: str = "p", most: int = 2000) -> list[Sample]:
        params = SamplingParams(n=n, max_new_tokens=most, mask_limit=self.mask_limit)
        return await self.host.run(Prompt(uid, "q", "", {}), self.engine, TOKENIZER, params)


def played(play: Callable[[Episode], Awaitable[Any]], engine: Any, **settings: Any) -> list[Sample]:
    """Play one episode to its end, and close everything."""
    n, most = settings.pop("n", 1), settings.pop("most", 2000)

    async def main() -> list[Sample]:
        world = World(play, engine, **settings)
        try:
            return await world.run(n, most=most)
        finally:
            await world.host.close()
            assert not world.server._sessions and world.server._num_calls == 0

    return asyncio.run(main())


def check_rows(sample: Any, engine: Recorder) -> None:
    """Each turn's tokens, and those before it, are in its row exactly as the engine saw them."""
    for turn, (_, prompt_ids, answer_ids) in zip(sample.turns, engine.seen, strict=True):
        row = sample.rows[turn.row].input_ids.tolist()
        assert row[: turn.start] == prompt_ids and row[turn.start : turn.start + turn.num_tokens] == answer_ids
    chosen = np.concatenate([row.response_mask for row in sample.rows]) == 1
    assert chosen.sum() == sum(len(answer) for *_, answer in engine.seen)
    versions = np.concatenate([row.versions for row in sample.rows])
    logprobs = np.concatenate([row.logprobs for row in sample.rows])
    assert (versions[chosen] == 5).all() and (logprobs[chosen] == -1.0).all()
    assert (versions[~chosen] == -1).all() and (logprobs[~chosen] == 0.0).all()
