"""`GRPO` calls back, stops and ends a run in good order, without the run itself: its events are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.python import grpo
from headrace.trainers.run.launch import RunEvent

ROWS = [{"prompt": "a", "answer": "b"}]


class FakeRun:
    """Stands for `training`: a run of five steps with a checkpoint after the second, and what is done to it."""

    def __init__(self, folder: Path, mistake: str = "") -> None:
        self.config: headrace.Config | None = None
        self.told: list[Any] = []
        self._folder = folder
        self._mistake = mistake

    def __call__(self, config: headrace.Config, **options: Any) -> Any:
        self.config = config
        return self._events()

    def _events(self) -> Any:
        if self._mistake:
            raise headrace.UserError(self._mistake)
        self._folder.mkdir(parents=True, exist_ok=True)
        writer = MetricsWriter(self._folder / "metrics.jsonl")
        try:
            events = [RunEvent("step", 0, {"val/reward": 0.0})]
            for step in range(1, 6):
                events.append(RunEvent("step", step, {"reward/mean": step / 10}))
            events.insert(3, RunEvent("checkpoint", 2, path=self._folder / "checkpoints" / "step_000002"))
            reason = None
            for event in events:
                if event.kind == "step" and reason is None:
                    writer.log(event.step, event.metrics)
                if reason is None or event.kind == "checkpoint":
                    reason = (yield event) or reason
            writer.finish(5 if reason is None else 2, **({"stopped": reason} if reason else {}))
            self.told.append(reason)
        except BaseException as error:
            self.told.append(type(error))
            raise
        return self._folder


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, mistake: str = "", **more: Any) -> tuple[FakeRun, headrace.GRPO]:
    fake = FakeRun(folder / "run", mistake)
    monkeypatch.setattr(grpo, "training", fake)
    overrides = {"run.dir": str(folder / "run"), **more.pop("overrides", {})}
    return fake, headrace.GRPO("builtin:tiny-qwen3", "exact_match", ROWS, overrides=overrides, **more)


class Recorder(headrace.Callback):
    def __init__(self, stop_at: int = 0) -> None:
        self.seen: list[Any] = []
        self._stop_at = stop_at

    def on_step(self, event: RunEvent) -> str | None:
        self.seen.append(event.step)
        return "enough" if event.step == self._stop_at else None

    def on_validation(self, event: RunEvent) -> None:
        self.seen.append(f"validation {event.step}")

    def on_checkpoint(self, event: RunEvent) -> None:
        self.seen.append(f"checkpoint {event.step}")

    def on_end(self, result: headrace.TrainResult) -> None:
        self.seen.append(result.stopped)


def test_callbacks_see_the_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder, steps = Recorder(), []
    fake, one = run(monkeypatch, tmp_path, callbacks=[recorder, lambda event: steps.append(event.step)])
    result = one.train()
    assert recorder.seen == ["validation 0", 1, 2, "checkpoint 2", 3, 4, 5, None]
    assert steps == [1, 2, 3, 4, 5] and fake.told == [None]
    assert (result.steps, result.stopped, result.model, result.samples) == (5, None, None, [])
    assert [row.get("reward/mean") for row in result.metrics] == [None, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert fake.config is not None and fake.config.validation.every == 0, "nothing was said of validation"


def test_a_callbacks_text_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder(stop_at=2)
    fake, one = run(monkeypatch, tmp_path, callbacks=[recorder])
    assert one.train().stopped == "enough" and fake.told == ["enough"]
    assert recorder.seen == ["validation 0", 1, 2, "checkpoint 2", "enough"]


def test_a_loop_that_is_left_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake, one = run(monkeypatch, tmp_path)
    with pytest.raises(headrace.UserError, match="^GRPO: the run is not open, expected `with GRPO"):
        iter(one)
    with one as entered:
        with pytest.raises(headrace.UserError, match="^GRPO.result: the run has not ended"):
            _ = entered.result
        assert [event.step for event, _ in zip(entered, range(2), strict=False)] == [1, 2]
    assert fake.told == ["the loop was left"] and one.result.stopped == "the loop was left"
    with pytest.raises(headrace.UserError, match="^GRPO: this run was started already, expected a new GRPO object"):
        one.train()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("in_callback", [False, True])
def test_an_error_of_the_user_reaches_the_run(
    error: type[BaseException], in_callback: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(event: RunEvent) -> None:
        raise error

    fake, one = run(monkeypatch, tmp_path, callbacks=[fail] if in_callback else [])
    with pytest.raises(error), one:
        for event in one:
            fail(event)
    assert fake.told == [error]


def test_a_run_without_a_step_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake, one = run(monkeypatch, tmp_path)
    with one:
        pass
    assert fake.told == [] and not list(tmp_path.iterdir()), "the rows were removed"


def test_a_run_that_failed_has_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder()
    _, one = run(monkeypatch, tmp_path, mistake="run.dir: no", callbacks=[recorder])
    with one, pytest.raises(headrace.UserError, match="^run.dir: no"):
        next(one)
    assert recorder.seen == [] and not list(one), "on_end is for runs that ended in good order"
    with pytest.raises(headrace.UserError, match="^GRPO.result: the run has not ended"):
        _ = one.result


def test_a_mistake_reads_as_on_the_command_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"overrides": {"trainer.lrr": 1.0}}, r"^trainer.lrr: unknown key; did you mean trainer.lr\?"),
        ({"overrides": {"algorithm.steps": "many"}}, "^algorithm.steps: got 'many', expected a whole number"),
        ({"overrides": {3: 1.0}}, "^3: unknown key"),
        ({"config": {"data": "my.jsonl"}}, "^data.train: got 'my.jsonl' in front of 'train'"),
        ({"config": {"validation": 5}}, "^validation.every: got 5 in front of"),
        ({"environment": Recorder()}, "^environment.kind: got an object of Recorder, expected a function or a class"),
        ({"config": tmp_path / "absent.yaml"}, "absent.yaml: the file cannot be read"),
        ({"mistake": "run.dir: no"}, "^run.dir: no"),
    ]
    for more, said in cases:
        _, one = run(monkeypatch, tmp_path, **more)
        with pytest.raises(headrace.UserError, match=said):
            one.train()
        assert not list(tmp_path.iterdir())


def test_a_callback_is_an_object_or_a_function(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for wrong in ([Recorder], [5], "text"):
        with pytest.raises(headrace.UserError, match="^callbacks: got .*, expected a Callback, such as `Mine"):
            run(monkeypatch, tmp_path, callbacks=wrong)
    recorder = Recorder()
    run(monkeypatch, tmp_path, callbacks=recorder)[1].train()
    assert recorder.seen[-1] is None


def test_a_resumed_run_needs_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(headrace.UserError, match="^--resume: run.dir is not set, expected the folder of the run"):
        headrace.GRPO("builtin:tiny-qwen3", "exact_match", ROWS, resume=True).train()
    assert not list(tmp_path.iterdir())
