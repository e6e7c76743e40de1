"""Single rewards as tags of rows, and the advantages that need them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rewards.rubric import Rubric
from headrace.actors.rollout.rows import kv_staleness, rollout_rows
from headrace.actors.rollout.worker import _score_one
from headrace.dataplane.meta import KVBatchMeta
from headrace.trainers.advantages.config import AdvantageConfig
from headrace.trainers.advantages.estimators import RewardRows, build_advantages
from headrace.trainers.grpo.row_tags import with_advantages


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
    rubric = Rubric([("length", length, 0.5), ("one", lambda *_: 1.0, 1.0)], tagged=["length"])
    samples = [sample(0, 5), sample(1, 3), sample(2, 0), sample(3, 4, "abort")]
    scores = [_score_one(rubric, one, None, lambda _: None) for one in samples]
    _, tags = rollout_rows(samples, scores, rubric.tagged)
    assert set(tags) == {"reward", "valid", "response_length", "reward/length"}
    assert tags["reward/length"].dtype == np.float32
    assert tags["reward/length"].tolist() == [5.0, 0.0, 0.0, 0.0]
    assert tags["valid"].tolist() == [1.0, 0.0, 1.0, 0.0] and tags["reward"].tolist() == [3.5, 0.0, 1.0, 0.0]
    assert set(rollout_rows(samples, scores)[1]) == {"reward", "valid", "response_length"}
    _, none = rollout_rows(samples[3:], [Score(0.0, {}, False, "aborted")], rubric.tagged)
    assert none["reward/length"].tolist() == [0.0], "every put has the same tags, or the directory refuses it"


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
