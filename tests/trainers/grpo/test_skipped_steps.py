"""Tests that a run which trains on nothing, step after step, ends with one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.trainers.cluster.calls import DriverMeter
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.training_modes import MOST_SKIPPED, Steps


def steps_of_a_run(state: State | None = None, **sections: Any) -> Any:
    config = build_config({"validation": {"every": 0}, "trainer": {"lr": 0.5}, **sections})
    observers = SimpleNamespace(meter=DriverMeter(), evaluated=[])
    run: Any = SimpleNamespace(config=config, rollouts=None, workers=None, observers=observers)
    return Steps(run, state or State(), lambda state, metrics: None)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [(64.0, "gradients of its 64 rows are not finite .is trainer.lr=0.5 too high"), (0.0, "no row to train on")],
)
def test_ten_skipped_steps_in_a_row_end_the_run(rows: float, sentence: str) -> None:
    steps = steps_of_a_run()
    skipped = {"train/skipped": 1.0, "train/sequences": rows}
    for _ in range(MOST_SKIPPED - 1):
        steps._stop_if_nothing_is_trained(skipped)
    steps._stop_if_nothing_is_trained({"train/skipped": 0.0})
    for _ in range(MOST_SKIPPED - 1):
        steps._stop_if_nothing_is_trained(skipped)
    with pytest.raises(UserError, match=f"^train/skipped: {MOST_SKIPPED} steps in a row .*{sentence}"):
        steps._stop_if_nothing_is_trained(skipped)


FLAT = {"train/skipped": 0.0, "reward/flat_groups_share": 1.0, "reward/mean": 0.25}


def test_ten_first_steps_without_a_signal_end_the_run() -> None:
    steps = steps_of_a_run()
    for _ in range(MOST_SKIPPED - 1):
        steps._stop_if_nothing_is_trained(FLAT)
    with pytest.raises(UserError, match=r"^reward/flat_groups_share: no group of 10 steps .*reward/mean is 0\.25"):
        steps._stop_if_nothing_is_trained(FLAT)


@pytest.mark.parametrize(
    "run",
    [
        {"state": State(step=7, version=7)},
        {"loss": {"kl_coef": 0.1}},
        {"loss": {"entropy_coef": 0.1}},
        {"trainer": {"backend": "scripted"}, "rollout": {"engine": "scripted"}},
    ],
    ids=["resumed", "with KL", "with an entropy bonus", "without a model"],
)
def test_steps_without_a_signal_go_on_where_something_else_was_or_is_learned(run: dict[str, Any]) -> None:
    steps = steps_of_a_run(**run)
    for _ in range(2 * MOST_SKIPPED):
        steps._stop_if_nothing_is_trained(FLAT)


def test_equal_rewards_after_a_signal_can_mean_that_the_task_is_solved() -> None:
    steps = steps_of_a_run()
    for share in (1.0, 0.5, *[1.0] * 2 * MOST_SKIPPED):
        steps._stop_if_nothing_is_trained(FLAT | {"reward/flat_groups_share": share})
