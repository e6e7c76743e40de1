"""Figures of a step that are worked out from others."""

from __future__ import annotations

import pytest

from headrace.trainers.figures import idle_shares


def test_idle_is_the_step_without_generating_or_computing() -> None:
    seconds = {"rollout": 4.0, "logprob": 1.0, "train": 3.0, "sync": 0.5}
    shares = idle_shares([4.0, 2.0], seconds, 0.5, 10.0)
    assert shares == pytest.approx({"idle/rollout": 0.7, "idle/train": 0.65})


def test_idle_shares_stay_shares_when_work_reaches_over_the_step() -> None:
    shares = idle_shares([30.0], {"train": 0.1}, 0.2, 10.0)
    assert shares == {"idle/rollout": 0.0, "idle/train": 1.0}
