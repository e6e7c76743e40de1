"""Tests that a run which learns nothing says so, once and then seldom."""

from __future__ import annotations

import pytest

from headrace.trainers.grpo.step_warnings import FLAT_STEPS, REPEAT_EVERY, StepWarnings, step_warnings

HEALTHY = {
    "reward/mean": 0.5, "reward/flat_groups_share": 0.25, "rollout/truncated_share": 0.9,
    "train/token_gradient_share": 0.1, "train/tokens": 5000.0, "logprob/ratio_error": 1.01, "staleness/mean": 0.0,
}  # fmt: skip
FLAT = HEALTHY | {"reward/flat_groups_share": 1.0, "reward/mean": 0.0}


@pytest.mark.parametrize(
    ("steps", "kind", "words"),
    [
        ([HEALTHY, HEALTHY | {"rollout/truncated_share": 1.0}], "truncated", "cut off at rollout.max_new_tokens"),
        ([FLAT] * FLAT_STEPS, "no signal", "all advantages are 0, because the rewards of each group are equal"),
        ([FLAT | {"reward/mean": None}] * FLAT_STEPS, "no signal", "reward/mean is unknown"),
        ([HEALTHY | {"train/token_gradient_share": 0.6}], "one token", "0.60: a single token makes up most"),
        ([HEALTHY, HEALTHY | {"logprob/ratio_error": 1.5}], "mismatch", "1.500, expected about 1"),
        ([HEALTHY, HEALTHY | {"logprob/ratio_error": 1.5, "staleness/mean": 2.0}], "mismatch", "rows are too old"),
    ],
)
def test_each_sign_has_its_sentence(steps: list[dict[str, float]], kind: str, words: str) -> None:
    found = step_warnings(steps)
    assert list(found) == [kind] and words in found[kind] and "\n" not in found[kind]


@pytest.mark.parametrize(
    "steps",
    [
        [HEALTHY],
        [{"val/reward": 0.5}],
        [FLAT] * (FLAT_STEPS - 1),
        [FLAT, HEALTHY, FLAT],
        [HEALTHY | {"train/token_gradient_share": 1.0, "train/tokens": 8.0}],
        [HEALTHY | {"logprob/ratio_error": 1.5}],
    ],
)
def test_a_healthy_step_few_tokens_and_the_first_step_warn_of_nothing(steps: list[dict[str, float]]) -> None:
    assert step_warnings(steps) == {}


def test_a_warning_is_given_once_and_again_after_many_steps() -> None:
    warnings = StepWarnings()
    told = [step for step in range(1, 2 * REPEAT_EVERY) if warnings.of(step, FLAT)]
    assert told == [FLAT_STEPS, FLAT_STEPS + REPEAT_EVERY]
    assert list(warnings.of(2 * REPEAT_EVERY, FLAT | {"rollout/truncated_share": 1.0})) == ["truncated"]
