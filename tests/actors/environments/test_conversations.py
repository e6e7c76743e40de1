"""Compaction, branches and sub-agents are rows of one episode, and each of the policy's tokens is trained on once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.chat import build_chat_format
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.environments.config import EnvironmentConfig
from headrace.actors.environments.conversations import Conversation
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rollout.rows import EPISODE, rollout_rows
from headrace.testing import TalkingEngine
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer

TOKENIZER = make_chat_tokenizer()


def play(environment: Any, engine: Any, *, n: int = 1, max_rows: int = 8, most: int = 4000) -> list[Sample]:
    config = EnvironmentConfig(max_rows=max_rows)
    host = EpisodeHost(environment, config, chat=lambda: build_chat_format(TOKENIZER, "template", {}, {}))
    prompt = Prompt("p", "q", "", {})
    return asyncio.run(host.run(prompt, engine, TOKENIZER, SamplingParams(n=n, max_new_tokens=most)))


def check_tokens(sample: Sample, engine: TalkingEngine) -> None:
    """Each turn continues exactly what the engine saw, and exactly the tokens of turns are trained on, each once."""
    rows = [row.input_ids.tolist() for row in sample.rows]
    trained = [np.zeros(len(row), np.uint8) for row in rows]
    seen = {(tuple(prompt), tuple(answer)): 0 for _, prompt, answer in engine.seen}
    for turn in sample.turns:
        stop = turn.start + turn.num_tokens
        seen[tuple(rows[turn.row][: turn.start]), tuple(rows[turn.row][turn.start : stop])] += 1
        trained[turn.row][turn.start : stop] += 1
    assert sum(seen.values()) == len(engine.seen) == len(sample.turns)
    for row, expected in zip(sample.rows, trained, strict=True):
        np.testing.assert_array_equal(row.response_mask, expected)
        assert ((row.logprobs != 0) == (expected > 0)).all() and ((row.versions >= 0) == (expected > 0)).all()


def test_a_branch_from_before_an_answer_takes_no_messages_until_there_is_one() -> None:
    async def agent(episode: Episode) -> float:
        await episode.say([{"role": "user", "content": "task"}])
        branch = episode.branch(episode.turns[0])
        for row in (branch, branch.branch()):
            with pytest.raises(ValueError, match="say got 1 messages in a branch from before an answer, expected none"):
                await row.say([{"role": "user", "content": "more"}])
        await branch.say([])
        await branch.branch().say([{"role": "user", "content": "more"}])
        return 1.0

    engine = TalkingEngine(TOKENIZER, "ab", version=3)
    [sample] = play(agent, engine)
    assert not sample.error and len(sample.rows) == 3
    check_tokens(sample, engine)


def test_a_summary_a_branch_and_sub_agents_are_rows_of_their_own() -> None:
    async def agent(episode: Episode) -> float:
        await episode.say([{"role": "user", "content": "long task"}])
        await episode.say([{"role": "user", "content": "go on"}])
        again = episode.branch(episode.turns[1])  # the second answer once more
        await again.say([])
        await again.say([{"role": "user", "content": "and then?"}])

        async def helper(task: str) -> str:
            row = episode.new_row()
            return (await row.say([{"role": "user", "content": task}])).content

        found = await asyncio.gather(helper("ab"), helper("abc"))
        compacted = episode.new_row(f"summary: {' '.join(found)}")
        await compacted.generate()
        episode.answer = "done"
        return 1.0

    engine = TalkingEngine(TOKENIZER, "ab ab", "abc", version=3)
    [sample] = play(agent, engine)
    assert not sample.error and (sample.text, len(sample.rows), len(sample.turns)) == ("done", 5, 7)
    check_tokens(sample, engine)
    main, again = sample.rows[0].input_ids.tolist(), sample.rows[1].input_ids.tolist()
    start = sample.turns[1].start
    assert again[:start] == main[:start] and [turn.row for turn in sample.turns[:4]] == [0, 0, 1, 1]
    assert not sample.rows[1].response_mask[:start].any(), "the first answer is trained on in the first row only"
    assert str(TOKENIZER.decode(sample.rows[4].input_ids)).startswith("summary: ab")


def test_rows_of_an_episode_have_its_reward_and_count_once() -> None:
    async def agent(episode: Episode) -> float:
        await episode.generate()
        for _ in range(episode.index):
            await episode.branch().generate()
        return float(episode.index)

    samples = play(agent, TalkingEngine(TOKENIZER, "ab", "abc"), n=3, max_rows=3)
    _, tags = rollout_rows(samples, [Score(s.rewards["reward"], {}, True) for s in samples], max_rows=3)
    assert tags[EPISODE].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] == tags["reward"].tolist()
    assert tags["valid"].tolist() == [1, 0, 0, 1, 1, 0, 1, 1, 1]


def test_random_trees_of_rows_have_exactly_the_tokens_of_the_engine() -> None:
    async def explore(episode: Episode, rng: random.Random) -> None:
        rows: list[Conversation] = [episode]
        for _ in range(12):
            row = rng.choice(rows)
            action = rng.choice(("generate", "generate", "text", "branch", "new"))
            if action == "generate":
                together = [row] if row is rows[-1] else [row, rows[-1]]
                await asyncio.gather(*[one.generate(max_new_tokens=rng.randint(1, 4)) for one in together])
            elif action == "text":
                row.add_text("abc"[: rng.randint(1, 3)])
            elif action == "branch":
                rows.append(row.branch(rng.randint(1, len(row.token_ids))))
            else:
                rows.append(episode.new_row("ab" * rng.randint(1, 3)))
        await rows[-1].generate()

    for seed in range(12):
        engine = TalkingEngine(TOKENIZER, "abcab", "b", "xyz", version=1)
        [sample] = play(lambda episode, seed=seed: explore(episode, random.Random(seed)), engine, max_rows=16)
        assert not sample.error, sample.error
        check_tokens(sample, engine)


def test_mistakes_are_named() -> None:
    async def agent(episode: Episode) -> None:
        with pytest.raises(ValueError, match="the new row is empty"):
            await episode.new_row().generate()
        turn = await episode.generate()
        with pytest.raises(ValueError, match="a turn of another row"):
            episode.new_row("ab").branch(turn)
        with pytest.raises(ValueError, match="branch at 99 tokens, expected 1 to"):
            episode.branch(99)
        await asyncio.gather(episode.generate(), episode.generate())

    [sample] = play(agent, TalkingEngine(TOKENIZER, "ab", latency_s=0.01))
    assert "tokens were added to a row while the policy generated in it" in sample.error
