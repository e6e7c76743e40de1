"""Tests that a run which learns nothing says so, once and then seldom."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.trainers.config.load import build_config
from headrace.trainers.grpo.checkpoints import State
from headrace.trainers.grpo.step_warnings import FLAT_STEPS, REPEAT_EVERY, StepWarnings, step_warnings
from headrace.trainers.observe.metrics import read_run
from headrace.trainers.observe.progress import Progress
from headrace.trainers.observe.run_folder import RunFolder
from headrace.trainers.run.launch import RunEvent, _Training
from headrace.trainers.supervision.heartbeat import Heartbeat, HeartbeatReader, shared_memory

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
        ([HEALTHY | {"masks/single_share": 1.0}], "single", "each token was the only one that rollout.top_p"),
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


def test_teachers_are_a_signal() -> None:
    assert step_warnings([FLAT | {"distillation/reverse_kl": 0.1}] * FLAT_STEPS) == {}


def test_a_warning_is_given_once_and_again_after_many_steps() -> None:
    warnings = StepWarnings()
    told = [step for step in range(1, 2 * REPEAT_EVERY) if warnings.of(step, FLAT)]
    assert told == [FLAT_STEPS, FLAT_STEPS + REPEAT_EVERY]
    assert list(warnings.of(2 * REPEAT_EVERY, FLAT | {"rollout/truncated_share": 1.0})) == ["truncated"]


def test_an_error_of_the_caller_ends_the_stage_without_a_time_limit() -> None:
    heartbeat = Heartbeat(descriptor := shared_memory(), bound_s=5.0)
    reader = HeartbeatReader(descriptor)
    os.close(descriptor)
    run: Any = SimpleNamespace(stages=SimpleNamespace(heartbeat=heartbeat))
    events = _Training._tell(SimpleNamespace(_stopped=None), run, iter([RunEvent("step", 1)]))  # pyright: ignore
    next(events)
    assert reader.read().bound_s == math.inf
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt())
    assert reader.read().bound_s == 5.0


def test_a_run_prints_warnings_and_notes_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints: Any = SimpleNamespace(is_due=lambda step: False)
    placement = SimpleNamespace(num_gpus=0)
    run: Any = SimpleNamespace(actors=SimpleNamespace(placement=placement, notes=["b"]), roles_note="")
    with RunFolder(build_config({"run": {"dir": str(tmp_path / "run")}}), resume=False) as folder:
        training: Any = SimpleNamespace(
            _log=lambda step, metrics: None, _folder=folder, _progress=Progress("flat", 5), _notes=["a", "b"],
            _watch=SimpleNamespace(replace_if_dead=lambda: None), _live_report=SimpleNamespace(tick=lambda: None),
            _endpoint=SimpleNamespace(run=SimpleNamespace(publish=lambda *_: None)),
        )  # fmt: skip
        _Training._tell_notes(training, run, State())
        after_step = _Training._after_step(training, run, checkpoints, first=0)
        for step in range(1, 2 + FLAT_STEPS):
            after_step(State(step=step), dict(FLAT))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("note", "warning"))]
    assert said[:2] == ["note: a", "note: b"] and len(said) == 3
    assert said[2].startswith(f"warning: step {FLAT_STEPS}: reward/flat_groups_share has been 1 for {FLAT_STEPS} steps")
    _, events = read_run(tmp_path / "run")
    assert [(event["event"], event["note"]) for event in events] == [
        ("data", "a"),
        ("data", "b"),
        ("warning", said[2].removeprefix(f"warning: step {FLAT_STEPS}: ")),
    ]
