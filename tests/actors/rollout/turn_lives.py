"""Lives of a rollout actor that play one group over a journal of turns, and die at a chosen answer of the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.config import EndpointConfig, EnvironmentConfig
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.environments.recovery import RecoveringEngine
from headrace.actors.protocols import Prompt, Sample
from headrace.actors.rollout.journal import GroupJournal, JournalConfig
from headrace.actors.rollout.turn_journal import TurnJournal
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()
END: Any = TOKENIZER.eos_token_id
TURNS = 5


class Killed(RuntimeError):
    """Stands for the death of the actor."""


class MortalEngine(ScriptedEngine):
    """Answers with random letters that depend on the request and the seed. It dies after `answers` answers. Its policy
    version says which life it is of."""

    def __init__(self, life: int, answers: int = 1 << 30, length: int = 12, seed: Any = None, **settings: Any) -> None:
        super().__init__(self._letters, version=life, tokenizer=TOKENIZER, **settings)
        self._left, self._length, self._letters_of = answers, length, life if seed is None else seed
        self.made: list[tuple[str, list[int], list[int]]] = []
        """Request id, prompt and tokens of each completion."""

    def _letters(self, request_id: str, prompt_ids: Sequence[int], sample: int) -> list[int]:
        rng = random.Random(f"{self._letters_of}/{request_id}/{sample}")
        letters = [rng.choice("abcdefgh") for _ in range(rng.randrange(1, self._length))]
        return [*(one for letter in letters for one in TOKENIZER(letter, add_special_tokens=False)["input_ids"]), END]

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        if self._left == 0:
            raise Killed
        self._left -= 1
        completions = await super().generate(request_id, prompt_ids, params)
        self.made += [(request_id, list(prompt_ids), one.token_ids.tolist()) for one in completions]
        return completions


async def game(episode: Episode) -> float:
    """Five turns, between which the environment says something that depends on the turn."""
    for _ in range(TURNS):
        turn = await episode.generate(max_new_tokens=40)
        episode.add_text(f" [{len(turn.text)}] ")
    return float(len(episode.turns[-1].text))


class Life:
    """One life of an actor: its samples, or None if it died."""

    def __init__(
        self,
        folder: Path,
        engine: Any,
        environment: Any = game,
        *,
        n: int = 2,
        piece_tokens: int = 0,
        config: EnvironmentConfig | None = None,
        params: SamplingParams | None = None,
        endpoint: bool = False,
    ) -> None:
        self.samples: list[Sample] | None = None
        self.policy: RecoveringEngine
        self.engine = engine
        params = params or SamplingParams(n=n, max_new_tokens=400)
        asyncio.run(self._live(folder, environment, params, piece_tokens, config or EnvironmentConfig(), endpoint))

    async def _live(
        self,
        folder: Path,
        environment: Any,
        params: SamplingParams,
        piece_tokens: int,
        config: EnvironmentConfig,
        endpoint: bool,
    ) -> None:
        turns = open_turns(folder, piece_tokens=piece_tokens)
        settings: dict[str, Any] = {}
        if endpoint:
            from headrace.actors.environments.endpoint.server import EndpointServer

            chat = build_chat_format(TOKENIZER, "qwen3", {}, {})
            settings = {"endpoint": EndpointServer(EndpointConfig(enabled=True)), "chat": lambda: chat}
        host = EpisodeHost(environment, config, **settings)
        await turns.refresh()
        self.policy = await turns.engine(0, self.engine)
        try:
            self.samples = await host.run(Prompt("p", "q", "", {}), self.policy, TOKENIZER, params)
        except Killed:
            pass
        finally:
            await host.close()
            await turns.close()

    @property
    def tokens(self) -> list[list[int]]:
        assert self.samples is not None
        return [sample.input_ids.tolist() for sample in self.samples]


def open_turns(folder: Path, writer: str = "rollout 0", piece_tokens: int = 0) -> TurnJournal:
    config = JournalConfig(str(folder), "one")
    return TurnJournal(config, writer, GroupJournal(config, writer), piece_tokens)


def check_rows(samples: Sequence[Sample], lives: Sequence[Life]) -> None:
    """Every turn in the rows is an engine's answer to exactly the tokens before it, and each answer is there once."""
    made = [one for life in lives for one in life.engine.made]
    for sample in samples:
        for turn in sample.turns:
            ids = sample.rows[turn.row].input_ids.tolist()
            before, answer = ids[: turn.start], ids[turn.start : turn.start + turn.num_tokens]
            found = [one for one in made if one[1] == before and one[2] == answer]
            assert found, (before, answer)
            made.remove(found[0])
