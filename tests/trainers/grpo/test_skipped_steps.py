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


def steps_of_a_run() -> Any:
    config = build_config({"validation": {"every": 0}, "trainer": {"lr": 0.5}})
    observers = SimpleNamespace(meter=DriverMeter())
    run: Any = SimpleNamespace(config=config, rollouts=None, workers=None, observers=observers)
    return Steps(run, State(), lambda state, metrics: None)


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
