"""Tests what a validation decides: which model is the best one, and when the run ends."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.actors.rollout.results import EvaluationReport
from headrace.tests.trainers.grpo.test_evaluation import plans_of, rollouts_of
from headrace.trainers.config.config import with_run_dir
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError, UserError
from headrace.trainers.grpo import evaluation
from headrace.trainers.grpo.checkpoints import State

MATH = {"functions": [{"kind": "exact_match", "weight": 0}, {"kind": "per_position", "name": "math"}]}


@dataclass(eq=False)
class Answered:
    """A call that has ended."""

    report: EvaluationReport


class Actor:
    """A rollout actor that answers every validation with the figures that the test has put down for the step."""

    def __init__(self, figures: dict[int, Mapping[str, float]], failed: int = 0) -> None:
        self.figures = figures
        self.failed = failed
        self.step = 0

    def evaluate(self, name: str, part: int, parts: int, params: Any, in_flight: int) -> Answered:
        count = 64  # of the 128 prompts of both actors
        figures = self.figures[self.step]
        sums = {key: value * count for key, value in figures.items()}
        error = "boom" if self.failed else ""
        counts = dict.fromkeys(sums, count)
        return Answered(EvaluationReport(count, self.failed, error, self.step, self.step, sums, counts))


class Validations:
    """The validations of a run with two actors, in which the model of each export is noted."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        figures: Sequence[Mapping[str, float]],
        failed: int = 0,
        **validation: Any,
    ) -> None:
        sections = {"run": {"dir": str(folder), "keep_best": True}, "reward": MATH, "validation": validation}
        config = with_run_dir(build_config(sections))
        self.actors = [Actor(dict(enumerate(figures)), failed), Actor(dict(enumerate(figures)))]
        self.folder = folder
        self.exported: list[int] = []
        rollouts = rollouts_of(self.actors, trainer_at_work=lambda version: nullcontext(False))
        workers: Any = SimpleNamespace(export_model=self._export)
        ended = lambda calls, stage, timeout_s: [(call, call.report) for call in calls]  # noqa: E731
        monkeypatch.setattr(evaluation, "ended", ended)
        goal = evaluation.Goal.of(config.validation, config.run, config.figures, config.judged_figure)
        self.validation = evaluation.Validation(rollouts, plans_of(config)[0], workers, goal)

    def _export(self, path: str) -> None:
        Path(path).mkdir(exist_ok=True)
        self.exported.append(self.actors[0].step)

    def after(self, step: int) -> dict[str, float]:
        for actor in self.actors:
            actor.step = step
        return self.validation.evaluate(State(step, step))

    @property
    def best(self) -> dict[str, Any]:
        return json.loads((self.folder / "best.json").read_text())


def rewards(*values: float) -> list[Mapping[str, float]]:
    """Return the figures of validations with these rewards, in a task whose answers are never the whole text."""
    return [{"val/reward": value, "val/exact_match": 0.0} for value in values]


def test_the_best_model_is_that_of_the_best_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Validations(tmp_path, monkeypatch, rewards(0.05, 0.3, 0.6, 0.4), stop_at=0.5)
    reached = []
    figures: dict[str, float] = {}
    for step in range(4):
        figures = run.after(step)
        reached.append(run.validation.reached)
    assert run.exported == [1, 2] and run.best == {"metric": "val/reward", "value": 0.6, "step": 2, "version": 2}
    assert reached == [False, False, True, True]
    assert figures["val/reward"] == pytest.approx(0.4) and figures["val/failed_rows"] == 0


def test_the_start_is_never_the_best_nor_is_what_only_equals_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Validations(tmp_path, monkeypatch, rewards(0.5, 0.5, 0.2), metric="exact_match")
    for step in range(3):
        run.after(step)
    assert run.exported == [] and not (tmp_path / "best").exists()
    assert run.best["step"] == 0 and not run.validation.reached


@pytest.mark.parametrize("metric", ["math", "val/reward/math", "reward/math"])
def test_a_reward_that_the_user_names_judges(metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[Mapping[str, float]] = [
        {"val/reward": 1.0 - math, "val/reward/math": math} for math in (0.1, 0.2, 0.15)
    ]
    run = Validations(tmp_path, monkeypatch, values, metric=metric, stop_at=0.2)
    for step in range(3):
        run.after(step)
    assert run.exported == [1] and run.best["metric"] == "val/reward/math" and run.validation.reached


def test_a_resumed_run_goes_on_from_the_best_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Validations(tmp_path, monkeypatch, rewards(0.4)).after(0)
    run = Validations(tmp_path, monkeypatch, rewards(0.0, 0.3, 0.5))
    for step in (1, 2):
        run.after(step)
    assert run.exported == [2], "0.3 does not beat the start's 0.4"
    assert not caplog.records
    (tmp_path / "best.json").write_text(json.dumps({"exact_match": 0.9, "step": 3, "version": 3}))
    with caplog.at_level(logging.WARNING):
        run = Validations(tmp_path, monkeypatch, rewards(0.0, 0.3))
    assert "goes by val/exact_match, but validation.metric is now val/reward" in caplog.text
    run.after(1)
    assert run.exported == [1]


def test_a_validation_whose_rewards_all_failed_judges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Validations(tmp_path, monkeypatch, [{"val/exact_match": 1.0}] * 2, failed=64, stop_at=0.0)
    run.after(0)
    figures = run.after(1)
    assert run.exported == [] and not (tmp_path / "best.json").exists() and not run.validation.reached
    assert figures["val/failed_rows"] == 64 and "64 of 128 rows failed, the first one: boom" in caplog.text


def test_a_figure_that_is_not_there_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Validations(tmp_path, monkeypatch, [{"val/reward": 1.0}], metric="exact_match")
    with pytest.raises(UserError, match="no validation prompt has an answer, expected one of val/reward$"):
        run.after(0)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"validation": {"metric": "accuracy"}}, "validation.metric: got 'accuracy', expected one of val/reward, val/"),
        ({"validation": {"metric": "val/pass@4"}}, "validation.metric: got 'val/pass@4', expected one of"),
        ({"validation": {"n": 4}}, "validation.n: got 4 with validation.temperature=0, expected 1"),
        ({"validation": {"metric": "exact_match"}, "data": {"train": "a/b", "validation": "a/c", "answer_field": ""}},
         "validation.metric: got 'exact_match' with data.answer_field=''"),
    ],
)  # fmt: skip
def test_a_metric_that_cannot_be_is_refused(sections: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_config(sections)
    assert sentence in str(refusal.value)


def test_validation_samples_as_its_section_says() -> None:
    config = build_config({"validation": {"n": 8, "temperature": 0.7}, "rollout": {"top_p": 0.9},
                           "algorithm": {"prev_logprobs": "recompute"}})  # fmt: skip
    params = plans_of(config)[0].sampling
    assert (params.n, params.temperature, params.top_p, params.max_new_tokens) == (8, 0.7, 0.9, 256)
    params = plans_of(build_config({"validation": {"max_new_tokens": 9}}))[0].sampling
    assert (params.n, params.temperature, params.top_p, params.max_new_tokens) == (1, 0.0, 1.0, 9)
    assert "val/pass@8" in config.figures
