"""Tests of evaluations: figures of held-out prompts, in parts, such as means, pass@k, best@k and majority."""

from __future__ import annotations

import asyncio
import itertools
import operator
import statistics
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
from headrace.actors.protocols import Prompt, Sample, Score
from headrace.actors.rollout.evaluation_metrics import (
    FigureScheme,
    FigureSums,
    best_counts,
    expected_best,
    figure_names,
    find_figure,
    majority,
)
from headrace.actors.rollout.results import EvaluationReport
from headrace.tests.actors.rollout.test_rollout import FakeClient, right_then_wrong, worker


def evaluated(
    tokenizer: Any, name: str, part: int, parts: int, params: SamplingParams, client: Any = None
) -> EvaluationReport:
    """Make one part of an evaluation with a worker of its own."""
    rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, client or FakeClient())
    return asyncio.run(rollouts.evaluate(name, part, parts, params, 2))


def test_an_evaluation_scores_held_out_prompts_and_puts_nothing(tokenizer: Any) -> None:
    client = FakeClient()
    greedy = SamplingParams(n=1, max_new_tokens=12, temperature=0.0)
    report = evaluated(tokenizer, "validation", 0, 1, greedy, client=client)
    means = {key: total / report.counts[key] for key, total in report.sums.items()}
    assert (report.rows, means["val/exact_match"], means["val/reward"], report.failed) == (30, 1.0, 1.0, 0)
    assert means["val/reward/exact_match"] == means["val/reward/per_position"] == 1.0
    assert 4 <= means["val/response_length_mean"] <= 9 and not client.puts
    assert (report.first_version, report.last_version) == (0, 0)
    both = evaluated(tokenizer, "validation", 0, 1, SamplingParams(n=2, max_new_tokens=12))
    assert both.rows == 60 and 30 <= both.sums["val/exact_match"] < 36
    assert (both.sums["val/pass@2"], both.counts["val/pass@2"]) == (30.0, 30), "the first sample is right"


def test_the_parts_of_an_evaluation_make_up_the_whole(tokenizer: Any) -> None:
    twice = SamplingParams(n=2, max_new_tokens=12)
    parts = [evaluated(tokenizer, "evaluation.set", part, 3, twice) for part in range(3)]
    whole = evaluated(tokenizer, "evaluation.set", 0, 1, twice)
    assert [part.rows for part in parts] == [6, 6, 8] and whole.rows == 20
    for key, total in whole.sums.items():
        assert sum(part.sums[key] for part in parts) == pytest.approx(total), key
    # Sample 0 of a prompt is right; sample 1 only for a palindrome, which has the same answer twice.
    palindromes = whole.sums["eval/set/avg@2"] - 10
    assert whole.sums["eval/set/pass@2"] == 10 and whole.sums["eval/set/maj@2"] == 10 - (10 - palindromes) / 2
    many = evaluated(tokenizer, "evaluation.set", 0, 16, twice)
    assert many.rows == 0 and (many.first_version, many.last_version) == (-1, -1)


def test_an_evaluation_generates_no_more_prompts_at_a_time_than_it_may(tokenizer: Any) -> None:
    busy, most = 0, 0

    class Counting(SingleTurn):
        async def play_group(self, episodes: Sequence[Episode]) -> None:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            try:
                await asyncio.sleep(0.001)
                await super().play_group(episodes)
            finally:
                busy -= 1

    for in_flight, expected in ((3, 3), (0, 30)):
        rollouts = worker(ScriptedEngine(right_then_wrong(tokenizer)), tokenizer, FakeClient())
        rollouts._environment, most = EpisodeHost(Counting()), 0
        asyncio.run(rollouts.evaluate("validation", 0, 1, SamplingParams(max_new_tokens=12), in_flight))
        assert most == expected


def sample(text: str, answer: str = "7") -> Sample:
    mask = np.array([0, 1, 1], np.uint8)
    return Sample(
        prompt=Prompt("val-0", "3+4=", answer, {}),
        index=0,
        input_ids=np.zeros(3, np.int32),
        response_mask=mask,
        logprobs=np.zeros(3, np.float32),
        text=text,
        finish_reason="stop",
        versions=np.zeros(3, np.int32),
    )


def score(reward: float, valid: bool = True) -> Score:
    return Score(reward=reward, components={"mine": 2 * reward}, valid=valid, error="" if valid else "boom")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_expected_best_is_the_mean_over_all_choices(count: int) -> None:
    values = [0.25, -1.0, 3.0, 0.25, 2.0]
    mean = statistics.fmean(max(chosen) for chosen in itertools.combinations(values, count))
    assert expected_best(values, count) == pytest.approx(mean)


def test_pass_at_k_is_the_unbiased_one() -> None:
    wrong, right = 5, 3
    assert expected_best([0.0] * wrong + [1.0] * right, 2) == pytest.approx(1 - (5 * 4) / (8 * 7))


def test_there_is_a_figure_for_powers_of_two_and_for_n() -> None:
    assert [best_counts(n) for n in (1, 2, 3, 6, 8)] == [[], [2], [2, 3], [2, 4, 6], [2, 4, 8]]


def test_figures_are_means_over_samples_and_over_prompts_of_the_best() -> None:
    sums = FigureSums()
    sums.add_group([sample("7"), sample("8")], [score(1.0), score(0.0)])
    sums.add_group([sample("no"), sample(" 7 ")], [score(0.5), score(9.0, valid=False)])
    sums.add_group([sample("", answer=""), sample("", answer="")], [score(0.0), score(0.5)])
    assert sums.means() == pytest.approx(
        {
            "val/response_length_mean": 2.0,
            "val/reward": 2.0 / 5,
            "val/reward/mine": 4.0 / 5,
            "val/best@2": (1.0 + 0.5) / 2,  # the prompt with a failed row has not two samples
            "val/reward/mine/best@2": (2.0 + 1.0) / 2,
            "val/exact_match": 2 / 4,  # of the samples whose prompts have answers
            "val/pass@2": 1.0,
            "val/maj@2": 0.5,  # both prompts have two answers, each given once
        }
    )
    assert set(sums.means()) <= {*figure_names(["mine"], 2), "val/response_length_mean"}


def test_without_answers_there_is_no_exact_match() -> None:
    sums = FigureSums()
    sums.add_group([sample("", answer="")], [score(0.5)])
    assert set(sums.means()) == {"val/response_length_mean", "val/reward", "val/reward/mine"}


def test_a_figure_has_its_key_its_short_name_or_the_name_of_a_reward() -> None:
    known = figure_names(["mine", "exact_match"], 4)
    assert find_figure("val/reward", known) == find_figure("reward", known) == "val/reward"
    assert find_figure("mine", known) == find_figure("reward/mine", known) == "val/reward/mine"
    assert find_figure("exact_match", known) == "val/exact_match"
    assert find_figure("pass@4", known) == "val/pass@4"
    assert find_figure("mine/best@2", known) == "val/reward/mine/best@2"
    assert find_figure("pass@3", known) is None


@pytest.mark.parametrize(
    ("votes", "share"),
    [
        ([("7", True), ("8", False), ("7", True)], 1.0),
        ([("8", False), ("8", False), ("7", True)], 0.0),
        ([("8", False), ("7", True)], 0.5),
        ([("8", False), ("9", False), ("7", True), ("7", True), ("8", False)], 0.5),
        ([(None, False), (None, False), ("7", True)], 1.0),
        ([(None, False)], 0.0),
    ],
)
def test_the_most_frequent_answer_decides_a_majority_vote(votes: list[tuple[str | None, bool]], share: float) -> None:
    assert majority(votes) == share


def judged(value: float, answer: str | None, valid: bool = True) -> Score:
    components = {"judge": value, "length": 0.5} if valid else {}
    return Score(reward=value, components=components, valid=valid, answer=answer)


def test_a_named_set_goes_by_the_reward_that_judges_it() -> None:
    sums = FigureSums(FigureScheme("eval/aime", "judge"))
    four = [sample("")] * 4
    sums.add_group(four, [judged(1.0, "3"), judged(0.99, "4"), judged(0.0, "4"), judged(1.0, "3.0")])
    sums.add_group(four, [judged(1.0, "5"), judged(1.0, "5"), judged(0.0, "6"), judged(0.0, None, valid=False)])
    hand = {
        "eval/aime/avg@4": (1 + 0 + 0 + 1 + 1 + 1 + 0) / 7,
        # Of the pairs of the first prompt, one of six has no correct sample; of the second's three pairs none.
        "eval/aime/pass@2": (5 / 6 + 1.0) / 2,
        "eval/aime/pass@4": 1.0,  # the second prompt has three samples that count
        "eval/aime/maj@4": 0.0,  # "4", which is wrong, has two votes
    }
    means = sums.means()
    assert {key: means[key] for key in hand} == pytest.approx(hand)
    assert means["eval/aime/reward"] == pytest.approx(4.99 / 7) and means["eval/aime/reward/length"] == 0.5
    assert sums.counts["eval/aime/avg@4"] == 7 and sums.counts["eval/aime/maj@4"] == 1


def test_a_failed_sample_that_counts_with_the_reward_0_is_wrong_for_the_judge() -> None:
    sums = FigureSums(FigureScheme("eval/aime", "judge"))
    zero = Score(reward=0.0, components={}, valid=True, error="too long", failure="limit")
    sums.add_group([sample("")] * 2, [judged(1.0, "3"), zero])
    assert sums.means()["eval/aime/avg@2"] == sums.means()["eval/aime/reward"] == 0.5


def test_figures_do_not_depend_on_the_order_in_which_prompts_end() -> None:
    rewards = [0.1, 0.7, 1e-9, 0.3, -0.6, 0.2]
    # The function `sum` itself compensates rounding errors from Python 3.12 on.
    assert len({reduce(operator.add, order) for order in itertools.permutations(rewards)}) > 1, "plain sums do"
    found = set()
    for order in itertools.permutations(rewards):
        sums = FigureSums()
        for reward in order:
            sums.add_group([sample("7")], [score(reward)])
        found.add(sums.sums["val/reward"])
    assert len(found) == 1
