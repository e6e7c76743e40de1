"""Figures of a step that are worked out from others."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headrace.actors.protocols import Prompt, Sample, Score, SpanTable
from headrace.actors.rollout.results import GroupFigures, RolloutReport, RolloutTally, group_figures
from headrace.actors.train.worker_setup import WorkerReport
from headrace.dataplane.traffic import Traffic
from headrace.trainers.grpo.rollouts import FeedTally
from headrace.trainers.grpo.step_metrics import distillation_metrics, idle_shares, rollout_metrics, staleness_metrics
from headrace.trainers.grpo.supervised.held_out_loss import supervised_metrics
from headrace.trainers.observe.data_plane_watch import Busy, covered_s, mean_covered_s


def test_idle_is_the_step_without_generating_or_computing() -> None:
    seconds = {"rollout": 4.0, "logprob": 1.0, "train": 3.0, "sync": 0.5}
    shares = idle_shares(3.0, seconds, 0.5, 10.0)
    assert shares == pytest.approx({"idle/rollout": 0.7, "idle/train": 0.65})


def test_idle_shares_stay_shares_when_work_reaches_over_the_step() -> None:
    shares = idle_shares(30.0, {"train": 0.1}, 0.2, 10.0)
    assert shares == {"idle/rollout": 0.0, "idle/train": 1.0}


def test_calls_that_overlap_count_once_and_only_within_the_step() -> None:
    calls = [Busy("a", 12.0, 15.0), Busy("a", 0.0, 11.0), Busy("a", 13.0, 14.0), Busy("a", 19.0, math.inf)]
    assert covered_s(calls, 10.0, 20.0) == pytest.approx(1 + 3 + 1)
    assert covered_s([Busy("a", 0.0, 5.0), Busy("a", 25.0, math.inf)], 10.0, 20.0) == 0
    assert covered_s([], 10.0, 20.0) == 0


def test_an_actor_without_a_call_brings_the_mean_down() -> None:
    calls = [Busy("a", 10.0, 20.0), Busy("a", 12.0, math.inf), Busy("b", 10.0, 12.0)]
    assert mean_covered_s(calls, 3, 10.0, 20.0) == pytest.approx((10 + 2 + 0) / 3)


def report(tokens: int, restored: int = 0) -> RolloutReport:
    figures = GroupFigures(rows=8, response_tokens=tokens)
    return RolloutTally([figures], restored_tokens=restored).report(Traffic())


def test_tokens_a_second_are_of_the_time_since_the_calls_before() -> None:
    # Two calls overlap; the second's first 4 s were the time of a call that an earlier step has counted.
    calls = [Busy("a", 10.0, 16.0), Busy("a", 12.0, 18.0), Busy("b", 17.0, math.inf)]
    fed = FeedTally([report(300), report(100, restored=80)], generated=calls, since_s=14.0)
    assert rollout_metrics(fed)["rollout/tokens_per_s"] == pytest.approx(320 / 4)


def test_calls_that_ended_before_those_counted_have_no_rate() -> None:
    fed = FeedTally([report(300)], generated=[Busy("a", 10.0, 13.0)], since_s=14.0)
    assert math.isnan(rollout_metrics(fed)["rollout/tokens_per_s"])


def test_staleness_is_shared_out_over_few_keys_that_are_always_there() -> None:
    figures = staleness_metrics(np.array([0, 1, 1, 2]), 2)
    assert figures == {
        "staleness/mean": 1.0, "staleness/max": 2.0, "staleness/share_0": 0.25, "staleness/share_1": 0.5,
        "staleness/share_2": 0.25,
    }  # fmt: skip
    fresh = staleness_metrics(np.zeros(4, dtype=np.int64), 2)
    assert fresh["staleness/share_0"] == 1 and fresh.keys() == figures.keys()
    assert staleness_metrics(np.zeros(4, dtype=np.int64), 0).keys() == {"staleness/mean", "staleness/max",
                                                                        "staleness/share_0"}  # fmt: skip


def test_old_rows_are_counted_together_and_shares_add_up() -> None:
    figures = staleness_metrics(np.array([-1, 0, 4, 5, 9, 30]), 8)
    assert figures["staleness/share_0"] == pytest.approx(2 / 6), "a row of a later policy is not stale"
    assert figures["staleness/share_5_or_more"] == pytest.approx(3 / 6)
    assert sum(value for key, value in figures.items() if "share" in key) == pytest.approx(1)
    assert len(figures) == 2 + 6 and figures["staleness/max"] == 30


def test_ends_of_answers_and_data_sources_are_those_of_all_calls() -> None:
    def sample(reason: str, tokens: int, source: str) -> Sample:
        ones = np.ones(tokens)
        prompt = Prompt("p", "q", "", {"data_source": source})
        return Sample(prompt, 0, ones, ones, ones, "", reason, ones)

    cut = group_figures([sample("length", 9, "gsm8k")] * 2, [Score(0.5, {"r": 0.5}, True), Score(0.0, {}, False)])
    ended = group_figures(
        [sample("stop", 2, "gsm8k"), sample("stop", 4, "org/math")], [Score(1.0, {}, True), Score(0.25, {}, True)]
    )
    reports = [RolloutTally([figures]).report(Traffic()) for figures in (cut, ended)]
    metrics = rollout_metrics(FeedTally(reports))
    assert metrics["rollout/truncated_share"] == 0.5 and metrics["rollout/ended_length_mean"] == 3
    by_source = {key: value for key, value in metrics.items() if key.startswith("reward_by_source/")}
    assert by_source == {"reward_by_source/gsm8k": 0.75, "reward_by_source/org/math": 0.25}
    none = rollout_metrics(FeedTally([RolloutTally([cut]).report(Traffic())]))
    assert none["rollout/truncated_share"] == 1 and math.isnan(none["rollout/ended_length_mean"])


def test_divergences_from_teachers_are_means_over_all_tokens() -> None:
    def of(**divergences: tuple[float, int]) -> WorkerReport:
        named = {name.removeprefix("all"): value for name, value in divergences.items()}
        return WorkerReport({}, 0.0, b"", 0, SpanTable.of([]), named)

    reports = [of(a=(3.0, 2), all=(1.0, 4)), of(), of(a=(1.0, 2), b=(0.0, 0), all=(5.0, 2))]
    found = distillation_metrics(reports)
    assert math.isnan(found.pop("distillation/reverse_kl/b"))
    assert found == {"distillation/reverse_kl": 1.0, "distillation/reverse_kl/a": 1.0}
    assert distillation_metrics([of()]) == {}


def test_the_loss_of_a_supervised_step_is_without_its_other_terms() -> None:
    metrics = {"train/loss": 2.5, "train/sampled_entropy": 1.5, "train/tokens": 4.0, "reward/mean": 1.0}
    found = {"sft/loss": 1.5, "sft/tokens": 4.0, "train/loss": 2.5, "train/tokens": 4.0}
    assert supervised_metrics(metrics) == found
