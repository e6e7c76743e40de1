"""The rollout worker's evaluations: the figures of held-out prompts, in parts, and how many run at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.scripted import ScriptedEngine
from headrace.actors.environments.episode import Episode
from headrace.actors.environments.factory import SingleTurn
from headrace.actors.environments.host import EpisodeHost
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
