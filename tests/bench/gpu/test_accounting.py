"""The seconds of a step, split so that they add up, and the figures that say whether it was right."""

from __future__ import annotations

import math

import pytest

from headrace.bench.gpu.train_run import PARTS, complaints, counted, median, step_figures, step_parts
from headrace.bench.gpu.whole_runs import part_shares
from headrace.bench.gpu.works import EXACT, GRPO_WORKS, HALF
from headrace.tests.bench.gpu.runs import record


def test_the_parts_of_a_step_add_up_to_it() -> None:
    parts = step_parts(record(1, 20.0, 10.0, **{"time/logprob_s": 0.7, "time/switch_s": 0.25}))
    assert tuple(parts) == PARTS and sum(parts.values()) == pytest.approx(10.0)
    assert parts["data wait"] == pytest.approx(0.2) and parts["log-probs"] == pytest.approx(0.5)
    assert parts["train"] == pytest.approx(3.0), "the wait was that of the log-probs' pass"
    assert parts["switch"] == 0.25 and parts["plan"] == pytest.approx(0.1)
    assert parts["rest"] == pytest.approx(10 - 5 - 0.7 - 3 - 0.5 - 0.25 - 0.1)


def test_the_time_between_steps_is_accounted_for() -> None:
    before = {"step": 0, "time/elapsed_s": 4.0, "val/reward": 0.5}
    steps = step_figures([before, record(1, 20.0, 10.0), record(2, 26.0, 5.5), record(3, 32.0, 6.0)])
    assert [step.step for step in steps] == [1, 2, 3], "a validation before the first step is no step"
    assert [step.between_s for step in steps] == [0.0, 0.5, 0.0]
    assert [step.step for step in counted(steps)] == [2, 3]
    shares = part_shares(counted(steps))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["rollout"] == pytest.approx(0.5 * 11.5 / 12) and shares["between"] == pytest.approx(0.5 / 12)


def test_a_figure_that_a_step_lacks_has_no_median() -> None:
    steps = step_figures([record(1, 1.0, 1.0, **{"train/mfu": 0.2}), record(2, 2.0, 1.0)])
    assert median(steps[:1], "mfu") == 0.2 and math.isnan(median(steps, "mfu"))
    assert median(steps, "rollout_tokens_per_s") == 1500


def test_right_figures_are_not_complained_about() -> None:
    steps = step_figures([record(1, 1.0, 1.0), record(2, 2.0, 1.0)])
    assert complaints(steps, EXACT, 16) == []


def test_the_rounding_of_a_deep_model_is_not_complained_about() -> None:
    """A run of `grpo-4b` with `trainer.tp=2` had these figures. No step's figures are those of wrong weights."""
    steps = step_figures([record(1, 1.0, 1.0, **{"logprob/mismatch_mean": 0.0276, "logprob/mismatch_max": 0.205})])
    assert complaints(steps, GRPO_WORKS["grpo-4b"].half, 16) == []
    assert len(complaints(steps, GRPO_WORKS["grpo-0.6b"].half, 16)) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"logprob/mismatch_mean": 1.2}, "step 2: mean difference of log-probs 1.2, expected at most 0.02"),
        ({"logprob/mismatch_max": 0.5}, "step 2: largest difference of log-probs 0.5, expected at most 0.3"),
        ({"logprob/mismatch_mean": None}, "step 2: mean difference of log-probs nan, expected at most 0.02"),
        ({"train/grad_norm": 11.0}, "step 2: gradient norm 11, expected more than 0 and at most 10"),
        ({"train/grad_norm": 0.0}, "step 2: gradient norm 0, expected more than 0 and at most 10"),
        ({"train/grad_norm": None}, "step 2: gradient norm nan, expected more than 0 and at most 10"),
        ({"train/skipped": 1.0}, "step 2: the optimizer made no step"),
        ({"train/sequences": 15.0}, "step 2: 15 rows were trained on and 0 failed, expected 16 and 0"),
        ({"rollout/failed_rows": 2.0}, "step 2: 16 rows were trained on and 2 failed, expected 16 and 0"),
    ],
)
def test_each_wrong_figure_has_its_sentence(changes: dict[str, float | None], expected: str) -> None:
    steps = step_figures([record(1, 1.0, 1.0), record(2, 2.0, 1.0, **changes)])
    assert complaints(steps, HALF, 16) == [expected]
