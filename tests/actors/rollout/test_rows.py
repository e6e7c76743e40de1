"""Tests of what users add to rows: columns of numbers, and single rewards as tags that advantages need."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.actors.columns import ColumnConfig
from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt, PromptRow, Sample, Score, row_schema
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.rows import TeacherSources, check_columns, checked_scores, kv_staleness, rollout_rows
from headrace.actors.rollout.scorer import score_sample
from headrace.dataplane.meta import KVBatchMeta
from headrace.tests.actors.environments.chat_tokenizer import make_chat_tokenizer
from headrace.trainers.advantages.config import AdvantageConfig
from headrace.trainers.advantages.estimators import RewardRows, build_advantages
from headrace.trainers.grpo.row_tags import with_advantages

TOKENIZER: Any = make_chat_tokenizer()
LEVEL = ColumnConfig(name="level", dtype="int64")
TRUST = ColumnConfig(name="trust", default=0.5)
CREDIT = ColumnConfig(name="credit", kind="per_token", default=-1.0)
GOOD = Score(1.0, {}, True)


def played(
    environment: Any, fields: Mapping[str, Any], n: int = 1, columns: tuple[ColumnConfig, ...] = ()
) -> list[Sample]:
    """Episodes of two turns of `ab` and the end token each, after a prompt of one token."""
    ends = [*TOKENIZER("a")["input_ids"], *TOKENIZER("b")["input_ids"], TOKENIZER.eos_token_id]
    engine = ScriptedEngine(lambda *_: ends, tokenizer=TOKENIZER)
    host = EpisodeHost(environment, columns=columns)
    run = host.run(Prompt("p", "q", "", fields), engine, TOKENIZER, SamplingParams(n=n, max_new_tokens=20))
    return asyncio.run(run)


async def two_turns(episode: Episode) -> None:
    first = await episode.generate()
    episode.add_text("x")
    second = await episode.generate()
    episode.set_column("credit", [1.0, 2.0, 3.0], first)
    episode.set_column("credit", 0.25, second)
    if episode.index:
        episode.set_column("trust", 0.75)


def test_numbers_of_prompts_environments_and_turns_stand_in_the_rows() -> None:
    columns = (LEVEL, TRUST, CREDIT)
    samples = played(two_turns, {"level": 7}, n=2, columns=columns)
    batch, _ = rollout_rows(samples, checked_scores(columns, samples, [GOOD] * 2), columns=columns, max_rows=2)
    level, trust, credit = batch.tensor("level"), batch.tensor("trust"), batch.jagged("credit")
    assert (level.dtype, trust.dtype, credit.values.dtype) == (torch.int64, torch.float32, torch.float32)
    assert level.tolist() == [7] * 4 and trust.tolist() == [0.5, 0.5, 0.75, 0.75]
    row = [-1, 1, 2, 3, -1, 0.25, 0.25, 0.25]
    assert credit.values.tolist() == [*row, -1, *row, -1]  # each sample's second row is made up
    assert credit.lengths.tolist() == batch.jagged("input_ids").lengths.tolist() == [8, 1, 8, 1]


def test_a_sample_without_its_number_has_failed_and_no_other() -> None:
    async def once(episode: Episode) -> None:
        await episode.generate()
        if episode.index == 1:
            episode.set_column("level", 3)

    samples = played(once, {}, n=2, columns=(LEVEL,))
    scores = checked_scores((LEVEL,), samples, [GOOD] * 2)
    assert [score.valid for score in scores] == [False, True] and "neither the prompt nor" in scores[0].error
    batch, tags = rollout_rows(samples, scores, columns=(LEVEL,))
    assert batch.tensor("level").tolist() == [0, 3] and tags["valid"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("column", "value", "turn"),
    [(LEVEL, 1.5, False), (TRUST, "1", False), (TRUST, float("nan"), False), (TRUST, [1, 2], False), (TRUST, 1, True),
     (CREDIT, 1, False), (CREDIT, [1, 2], True), (LEVEL, 2**70, False), (TRUST, 1e39, False)],
)  # fmt: skip
def test_what_does_not_fit_a_column_fails_the_episode_that_set_it(column: ColumnConfig, value: Any, turn: bool) -> None:
    async def wrong(episode: Episode) -> None:
        said = await episode.generate()
        episode.set_column(column.name, value, said if turn else None)

    [sample] = played(wrong, {}, columns=(column,))
    assert f"column {column.name!r}" in sample.error and "expected" in sample.error
    [sample] = played(wrong, {}, columns=())
    assert f"there is no column {column.name!r}; the run has no columns" in sample.error


def test_prompts_are_checked_before_a_run() -> None:
    def source(*rows: Mapping[str, Any]) -> Any:
        return SimpleNamespace(name="mine", size=len(rows), row=lambda index: PromptRow("q", "", rows[index]))

    check_columns(source({"level": 1}, {"level": 2, "trust": 0.1}), (LEVEL, TRUST, CREDIT))
    with pytest.raises(ValueError, match="prompt 1 of 'mine' has no column 'level'.*the row has trust"):
        check_columns(source({"level": 1}, {"trust": 2}), (LEVEL,))
    with pytest.raises(ValueError, match="column 'level' got 'high', expected int64.* .prompt 0 of 'mine'."):
        check_columns(source({"level": "high"}), (LEVEL,))


def test_a_column_may_not_have_the_name_of_another_field() -> None:
    with pytest.raises(ValueError, match="'response_mask', expected a name that no other field"):
        row_schema(None, (ColumnConfig(name="response_mask"),))
    with pytest.raises(ValueError, match="a name of letters"):
        ColumnConfig(name="my column")
    assert list(row_schema(None, (LEVEL, CREDIT)))[-2:] == ["level", "credit"]
    assert np.array_equal(LEVEL.numbers(True), 1)


def sample(index: int, num_response: int, finish_reason: str = "stop") -> Sample:
    ids = np.arange(2 + num_response, dtype=np.int32)
    mask = (ids >= 2).astype(np.uint8)
    prompt = Prompt("0", "text", "answer", {})
    return Sample(
        prompt, index, ids, mask, -1.0 * mask.astype(np.float32), "answer", finish_reason, mask.astype(np.int32) - 1
    )


def length(prompt: Prompt, response: str, finish_reason: str, response_tokens: int) -> float:
    if response_tokens == 3:
        raise RuntimeError("three")
    return float(response_tokens)


def test_rows_are_tagged_with_the_rewards_that_are_asked_for() -> None:
    rubric = Rubric([("length", length, 0.5), ("one", lambda *_: 1.0, 1.0)])
    samples = [sample(0, 5), sample(1, 3), sample(2, 0), sample(3, 4, "abort")]
    scores = [score_sample(rubric, one, None, lambda _: None) for one in samples]
    _, tags = rollout_rows(samples, scores, ["length"])
    assert set(tags) == {"reward", "valid", "response_length", "reward/length"}
    assert tags["reward/length"].dtype == np.float32
    assert tags["reward/length"].tolist() == [5.0, 0.0, 0.0, 0.0]
    assert tags["valid"].tolist() == [1.0, 0.0, 1.0, 0.0] and tags["reward"].tolist() == [3.5, 0.0, 1.0, 0.0]
    assert set(rollout_rows(samples, scores)[1]) == {"reward", "valid", "response_length"}
    _, none = rollout_rows(samples[3:], [Score(0.0, {}, False, "aborted")], ["length"])
    assert none["reward/length"].tolist() == [0.0], "every put has the same tags, or the directory refuses it"


def test_rows_are_tagged_with_the_data_source_that_has_a_teacher() -> None:
    samples = [replace(sample(0, 5), prompt=Prompt("7", "p", "a", {"data_source": name})) for name in ("code", "math")]
    scores = [Score(1.0, {}, True)] * 2
    _, tags = rollout_rows(samples, scores, max_rows=2, teachers=TeacherSources(("art", "math"), covers_all=True))
    assert tags["teacher_source"].tolist() == [-1.0, -1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"got prompt '7' with data_source='code', expected one of art, math"):
        rollout_rows(samples, scores, teachers=TeacherSources(("art", "math"), covers_all=False))


def test_truncated_rows_are_masked_and_keep_their_reward_if_asked_for() -> None:
    samples = [sample(0, 5), sample(1, 3, "length")]
    scores = [Score(1.0, {}, True), Score(0.5, {}, True)]
    batch, tags = rollout_rows(samples, scores, mask_truncated=True)
    assert tags["trained_tokens"].tolist() == [5.0, 0.0] and tags["response_length"].tolist() == [5.0, 3.0]
    assert tags["reward"].tolist() == [1.0, 0.5] and tags["valid"].tolist() == [1.0, 1.0]
    assert batch.jagged("response_mask").values.tolist() == [0, 0, 1, 1, 1, 1, 1] + [0] * 5
    plain, _ = rollout_rows(samples, scores)
    assert int(plain.jagged("response_mask").values.sum()) == 8


def test_rows_say_how_old_the_keys_and_values_were_that_they_were_generated_from() -> None:
    """Two turns of an episode, between which a tool spoke, are two requests."""
    versions = [[-1, -1, 3, 3, 4, 6], [-1, 3, 4, -1, 6, 6], [-1, -1], [5, 5], [-1, 2, 2, -1, 7, 9]]
    lengths = np.array([len(row) for row in versions])
    found = kv_staleness(np.concatenate(versions).astype(np.int32), lengths)
    assert found.tolist() == [3, 1, 0, 0, 2]
    samples, scores = [sample(0, 5), sample(1, 3)], [Score(1.0, {}, True)] * 2
    assert rollout_rows(samples, scores, keeps_old_kv=True)[1]["kv_staleness"].tolist() == [0.0, 0.0]


class Receipt:
    """As much of a KVBatchMeta as `with_advantages` looks at."""

    def __init__(self, tags: dict[str, np.ndarray], groups: np.ndarray) -> None:
        self.tags, self.groups = tags, groups

    def with_tags(self, **tags: np.ndarray) -> Receipt:
        return Receipt({**self.tags, **tags}, self.groups)


@pytest.mark.parametrize("kind", ["grpo", "gdpo"])
def test_advantages_read_the_tags(kind: Any) -> None:
    rng = np.random.default_rng(0)
    tags = {name: rng.random(8).astype(np.float32) for name in ("reward", "reward/a", "reward/b")}
    tags["valid"] = np.array([1, 1, 0, 1, 1, 1, 1, 1], np.float32)
    groups = np.repeat([3, 9], 4)
    estimate = build_advantages(AdvantageConfig(kind=kind), {"a": 1.0, "b": 0.5})
    got = with_advantages(estimate, cast(KVBatchMeta, Receipt(tags, groups))).tags["advantage"]
    components = {"a": tags["reward/a"], "b": tags["reward/b"]}
    np.testing.assert_array_equal(got, estimate(RewardRows(tags["reward"], tags["valid"], groups, components)))
    assert got[2] == 0 and (got[[0, 1, 3]] != 0).all()
