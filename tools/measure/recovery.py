"""`python tools/measure/recovery.py` measures what a death costs unfinished groups, for each `environment.recover`.

Groups of eight episodes are played with an engine that takes a fixed time per token, and die once, at a random moment.
Tokens and seconds are those in addition to the same group without a death. They do not contain the start of a new
process.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.actors.engines.protocol import Completion, SamplingParams
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt
from headrace.actors.rollout.journal import GroupJournal, JournalConfig
from headrace.actors.rollout.turn_journal import TurnJournal
from headrace.trainers.base_model.made_tokenizers import make_tokenizer

TOKEN_S = 0.004
"""Seconds per token of the engine."""
TURNS = 20
EPISODES = 8
MEAN_TOKENS = 1000
"""Mean number of tokens of an episode."""
PIECE_TOKENS = 64
DEATHS = 12
"""Number of groups, each with one death, per row of the table."""


class PacedEngine:
    """An engine that takes TOKEN_S per token, and can die and be replaced."""

    version = 0

    def __init__(self, tokens_per_turn: int) -> None:
        self._mean = tokens_per_turn
        self.died = asyncio.Event()
        self.made = 0.0
        """Number of tokens computed, also in vain."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return answers of random lengths. A request during which the engine dies begins again."""
        begun = params.continues
        root, samples = (request_id, range(params.n)) if begun is None else (begun.request_id, [begun.sample])
        done = 0 if begun is None else begun.tokens
        whole = [max(1, round(random.Random(f"{root}/{one}").lognormvariate(0.0, 0.6) * self._mean)) for one in samples]
        counts = [max(1, min(one - done, params.max_new_tokens)) for one in whole]
        while True:
            begin, died = time.monotonic(), self.died
            try:
                async with asyncio.timeout(max(counts) * TOKEN_S):
                    await died.wait()
            except TimeoutError:
                break
            finally:
                passed = int((time.monotonic() - begin) / TOKEN_S)
                self.made += sum(min(count, passed) for count in counts)
        return [
            Completion(
                np.full(count, 2, np.int32), np.zeros(count, np.float32),
                "length" if count < one - done else "stop", np.zeros(count, np.int32),
            )
            for one, count in zip(whole, counts, strict=True)
        ]  # fmt: skip

    async def abort(self, request_id: str) -> None:
        """Do nothing: no request is ended early here."""

    def die(self) -> None:
        """Make all requests in flight begin again."""
        died, self.died = self.died, asyncio.Event()
        died.set()


async def _turns(episode: Episode) -> None:
    for _ in range(TURNS):
        await episode.generate()
        episode.add_tokens([3])


async def _play(folder: Path, name: str, engine: PacedEngine, kind: str, mode: str) -> int:
    """Play one group to its end, and return the number of its tokens that the policy chose."""
    config = JournalConfig(str(folder), "one")
    turns = TurnJournal(config, name, GroupJournal(config, name), PIECE_TOKENS if mode == "prefix" else 0)
    host = EpisodeHost(SingleTurn() if kind == "one answer" else _turns)
    keeps = mode == "prefix" or (mode == "turn" and kind != "one answer")
    try:
        await turns.refresh()
        policy = await turns.engine(0, engine, fresh=not keeps)
        params = SamplingParams(n=EPISODES, max_new_tokens=1 << 20)
        samples = await host.run(Prompt(name, "12", "", {}), policy, make_tokenizer(), params)
        return sum(int(np.count_nonzero(sample.response_mask)) for sample in samples)
    finally:
        await host.close()
        await turns.close()


async def _one(kind: str, death: str, mode: str, number: int) -> tuple[float, float]:
    """Return the tokens that were generated again, and the seconds lost."""
    engine = PacedEngine(MEAN_TOKENS if kind == "one answer" else MEAN_TOKENS // TURNS)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        tokens = await _play(Path(folder) / "whole", f"p{number}", engine, kind, mode)
        whole_s, engine.made = time.monotonic() - begin, 0.0
        share, begin = random.Random(number).uniform(0.1, 0.9), time.monotonic()
        playing = asyncio.create_task(_play(Path(folder) / "cut", f"p{number}", engine, kind, mode))
        await asyncio.sleep(share * whole_s)
        if death == "engine":
            engine.die()
        else:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            playing = asyncio.create_task(_play(Path(folder) / "cut", f"p{number}", engine, kind, mode))
        await playing
        return engine.made - tokens, time.monotonic() - begin - whole_s


async def main() -> None:
    """Measure all combinations at the same time, and print the table."""
    print(
        "| what dies | episodes | `environment.recover` | tokens generated again | seconds lost |\n"
        "| --- | --- | --- | ---: | ---: |"
    )
    for death in ("engine", "rollout actor, or the run"):
        for kind in (f"{TURNS} turns", "one answer"):
            for mode in ("restart", "turn", "prefix"):
                found = await asyncio.gather(*(_one(kind, death, mode, number) for number in range(DEATHS)))
                tokens, seconds = (statistics.median(values) for values in zip(*found, strict=True))
                print(f"| {death} | {kind} | `{mode}` | {tokens:,.0f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
