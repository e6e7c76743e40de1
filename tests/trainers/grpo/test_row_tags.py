"""Episodes of several rows: their rows in the data plane, and advantages and metrics that count episodes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from headrace.actors.protocols import Prompt, RowTokens, Sample, Score
from headrace.actors.rollout.rows import EPISODE, rollout_rows, sample_keys
from headrace.dataplane.meta import KVBatchMeta
from headrace.trainers.advantages.estimators import GrpoAdvantage, RlooAdvantage
from headrace.trainers.grpo.row_tags import flat_groups, with_advantages
from headrace.trainers.grpo.step_metrics import row_metrics


def tokens(*ids: int) -> RowTokens:
    chosen = np.array([0] + [1] * (len(ids) - 1), np.uint8)
    return RowTokens(
        np.array(ids, np.int32), chosen, -1.0 * chosen.astype(np.float32), np.where(chosen, 3, -1).astype(np.int32)
    )


def sample(index: int, *rows: RowTokens) -> Sample:
    first = rows[0]
    return Sample(
        Prompt("p", "q", "", {}), index, first.input_ids, first.response_mask, first.logprobs, "", "stop",
        first.versions, more_rows=rows[1:],
    )  # fmt: skip


SAMPLES = [sample(0, tokens(1, 2, 3), tokens(1, 4)), sample(1, tokens(1, 5)), sample(2, *(tokens(1, 6),) * 3)]
SCORES = [Score(1.0, {"r": 1.0}, True), Score(0.0, {"r": 0.0}, True), Score(0.0, {}, False, "no")]


def test_each_sample_takes_as_many_rows_as_it_may_have() -> None:
    batch, tags = rollout_rows(SAMPLES, SCORES, ("r",), max_rows=3)
    assert [key for one in SAMPLES for key in sample_keys(one, 3)][:4] == ["p.0", "p.0+1", "p.0+2", "p.1"]
    ids = batch.jagged("input_ids")
    assert ids.lengths.tolist() == [3, 2, 1, 2, 1, 1, 2, 2, 2]
    assert ids.values.tolist() == [1, 2, 3, 1, 4, 1, 1, 5, 1, 1, 1, 6, 1, 6, 1, 6]
    assert batch.jagged("response_mask").values.tolist() == [0, 1, 1, 0, 1, 0, 0, 1, 0, 0] + [0] * 6
    assert tags["valid"].tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0]
    assert tags["reward"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0] == tags["reward/r"].tolist()
    assert tags[EPISODE].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert EPISODE not in rollout_rows(SAMPLES[1:2], SCORES[1:2])[1]


class Receipt:
    """The part of a receipt that advantages and metrics read."""

    def __init__(self, tags: dict[str, np.ndarray], groups: list[int]) -> None:
        self.tags, self.groups = tags, np.array(groups)

    def with_tags(self, **tags: np.ndarray) -> Receipt:
        return Receipt({**self.tags, **tags}, self.groups.tolist())


def receipt(order: np.ndarray | None = None) -> Any:
    """Two groups of three samples with up to three rows: rewards 1, 0 and failed; 1, 1, 0."""
    _, first = rollout_rows(SAMPLES, SCORES, ("r",), max_rows=3)
    others = [sample(0, tokens(1, 2)), sample(1, tokens(1, 2), tokens(1, 2)), sample(2, tokens(1, 3))]
    scores = [Score(value, {"r": value}, True) for value in (1.0, 1.0, 0.0)]
    _, second = rollout_rows(others, scores, ("r",), max_rows=3)
    tags = {name: np.concatenate([first[name], second[name]]) for name in first}
    groups = np.repeat([7, 9], 9)
    order = np.arange(18) if order is None else order
    return Receipt({name: values[order] for name, values in tags.items()}, groups[order].tolist())


@pytest.mark.parametrize("estimate", [GrpoAdvantage(), RlooAdvantage()])
def test_advantages_count_episodes_and_all_rows_of_one_share_it(estimate: Any) -> None:
    found = with_advantages(estimate, cast(KVBatchMeta, receipt())).tags["advantage"]
    assert found[0] == found[1] > 0 and found[3] == -found[0]
    assert not found[[2, 4, 5, 6, 7, 8, 10, 11, 14, 16, 17]].any(), "filled up, or failed"
    rewards = np.array([1.0, 1.0, 0.0])
    if isinstance(estimate, RlooAdvantage):
        assert found[[9, 12, 15]] == pytest.approx((rewards - rewards.mean()) * 1.5)
    assert found[12] == found[13] == found[9], "an episode of two rows counts once"
    order = np.random.default_rng(0).permutation(18)
    mixed = with_advantages(estimate, cast(KVBatchMeta, receipt(order))).tags["advantage"]
    assert mixed == pytest.approx(found[order])


def test_metrics_and_flat_groups_count_episodes() -> None:
    meta = cast(KVBatchMeta, receipt())
    metrics = row_metrics(meta, GrpoAdvantage())
    assert metrics["reward/mean"] == pytest.approx(3 / 5) and metrics["rollout/failed_rows"] == 1
    assert metrics["rollout/response_length_max"] == 3, "of all rows of an episode"
    assert metrics["reward/std"] == pytest.approx(np.std([1.0, 0.0, 1.0, 1.0, 0.0]))
    assert metrics["reward/flat_groups_share"] == 0 and metrics["advantage/min"] < 0 < metrics["advantage/max"]
    assert flat_groups(meta, [("r", 1.0)]) == []
    one_left = receipt()
    one_left.tags["valid"][3:9] = 0
    assert flat_groups(cast(KVBatchMeta, one_left), [("r", 1.0)]) == [7], "two rows of one episode have no signal"


def test_equal_rewards_are_groups_without_a_signal() -> None:
    tags = {"valid": np.ones(6), "reward": np.array([1.0, 1.0, 1.0, 0.0, 0.5, 0.5]), "response_length": np.ones(6)}
    tags["reward/format"] = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    meta = cast(KVBatchMeta, Receipt(tags, [1, 1, 2, 2, 3, 3]))
    metrics = row_metrics(meta, GrpoAdvantage())
    assert metrics["reward/flat_groups_share"] == pytest.approx(2 / 3)
    assert metrics["reward/format"] == pytest.approx(1 / 6), "of the step's rows, whichever calls ended in it"
    assert metrics["advantage/max"] == -metrics["advantage/min"] == pytest.approx(2**-0.5, rel=1e-4)
    tags["valid"][:] = 0
    failed = row_metrics(meta, GrpoAdvantage())
    assert failed["reward/flat_groups_share"] == 1 and np.isnan([failed["reward/std"], failed["advantage/max"]]).all()
