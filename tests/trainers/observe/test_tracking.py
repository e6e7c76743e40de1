"""Tests that trackers get what a run logs, and that none of them can slow the run down or end it."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.process.json_lines import LineTail
from headrace.trainers.config.load import build_config
from headrace.trainers.errors import ConfigError
from headrace.trainers.observe import tracking as subject
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.trackers import (
    SAMPLE_COLUMNS,
    SampleRow,
    TrackedRun,
    Tracker,
    build_tracker,
    mlflow_key,
    wanted_trackers,
)
from headrace.trainers.observe.tracking import Tracking


class Noting:
    """A tracker that notes its calls, and raises or waits in those that the test names."""

    def __init__(self, *, fails: Sequence[str] = (), waits: threading.Event | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails
        self.waits = waits

    def _note(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if self.waits is not None and name == "log":
            self.waits.wait(60)
        if name in self.fails:
            raise ConnectionResetError(f"{name}: the helper process died")

    def start(self, run: TrackedRun) -> str:
        self._note("start", (run.name, run.previous))
        return "id-1"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._note("log", (step, metrics))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._note("samples", (step, rows))

    def finish(self) -> None:
        self._note("finish", None)


def episode(key: str, **fields: Any) -> str:
    turns = [{"role": "policy", "text": "<tool>"}, {"role": "environment", "text": "3"}]
    line = {"kind": "episode", "set": "train", "key": key, "prompt": "p", "answer": "3", "turns": turns, "version": 2,
            "reward": 1.0, "rewards": {"exact_match": 1.0}, "finish_reason": "stop", "error": "", **fields}  # fmt: skip
    return json.dumps(line) + "\n"


def test_every_tracker_gets_what_the_run_logs(tmp_path: Path) -> None:
    first, second = Noting(), Noting()
    trackers: dict[str, Tracker] = {"one": first, "two": second}
    writer = MetricsWriter(tmp_path / "metrics.jsonl", Tracking(trackers, tmp_path, {}))
    writer.log(1, {"reward/mean": 0.5, "train/loss": math.nan})
    (tmp_path / "samples.jsonl").write_text(episode("0.0") + '{"kind": "trained", "key": "0.0"}\n' + episode("0.1")[:9])
    writer.log(2, {"reward/mean": 0.75})
    writer.close()
    writer.close()
    assert first.calls == second.calls
    assert [name for name, _ in first.calls] == ["start", "log", "log", "samples", "finish"]
    [(_, started), (_, (step, metrics)), _, (_, (at, rows)), _] = first.calls
    assert (
        started == (tmp_path.name, None)
        and step == 1
        and set(metrics) == {"reward/mean", "time/elapsed_s", "run/attempt"}
    )
    [row] = rows
    assert at == 2 and dict(zip(SAMPLE_COLUMNS, row, strict=True)) == {
        "set": "train", "key": "0.0", "version": 2, "reward": 1.0, "finish_reason": "stop", "prompt": "p",
        "response": "<tool>3", "answer": "3", "rewards": '{"exact_match": 1.0}', "error": "",
    }  # fmt: skip
    again = Noting()
    Tracking({"one": again}, tmp_path, {}).close()
    assert again.calls[0] == ("start", (tmp_path.name, "id-1")), "a resumed run goes on with the tracker's run"


@pytest.mark.parametrize("fails", [("start",), ("log",), ("finish",), ("log", "samples", "finish")])
def test_a_tracker_that_fails_ends_neither_the_run_nor_another_tracker(
    fails: Sequence[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Noting(fails=fails), Noting()
    trackers: dict[str, Tracker] = {"bad": bad, "good": good}
    with caplog.at_level(logging.WARNING):
        tracking = Tracking(trackers, tmp_path, {})
        for step in range(6):
            tracking.log(step, {"reward/mean": 0.5})
        tracking.close()
    assert [name for name, _ in good.calls] == ["start", *["log"] * 6, "finish"]
    assert f"tracker bad: ConnectionResetError: {fails[0]}: the helper process died" in caplog.text
    assert ("tracker bad: given up, the run goes on without it" in caplog.text) == (fails != ("finish",))
    assert len([name for name, _ in bad.calls if name == "log"]) == {"start": 0, "log": 3, "finish": 6}[fails[0]]


def test_a_tracker_that_hangs_delays_nothing_but_the_end_and_that_only_so_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_MOST_WAITING", 5)
    release = threading.Event()
    slow, good = Noting(waits=release), Noting()
    trackers: dict[str, Tracker] = {"slow": slow, "good": good}
    with caplog.at_level(logging.WARNING):
        tracking = Tracking(trackers, tmp_path, {}, timeout_s=0.2)
        for step in range(4):
            tracking.log(step, {})
        tracking.close()
    release.set()
    assert [name for name, _ in good.calls] == ["start", *["log"] * 4, "finish"]
    assert "tracker slow: it has not finished in time" in caplog.text


def test_samples_are_read_once_also_when_the_file_is_thinned_out(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(episode("0.0"))
    tail = LineTail(path)
    assert tail.read() == [], "an earlier start of the run has sent it"
    with path.open("a") as file:
        file.write(episode("1.0") + episode("1.1"))
    assert [line["key"] for line in tail.read()] == ["1.0", "1.1"] and tail.read() == []
    draft = tmp_path / "samples.new"
    draft.write_text(episode("1.0"))
    draft.replace(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write(episode("2.0"))
    assert [line["key"] for line in tail.read()] == ["2.0"]


def test_tensorboard_gets_the_same_scalars_and_the_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = build_config({}).logging
    assert [tracker.kind for tracker in wanted_trackers(config)] == ["tensorboard"]
    tracking = Tracking({"tensorboard": build_tracker(wanted_trackers(config)[0])}, tmp_path, {})
    writer = MetricsWriter(tmp_path / "metrics.jsonl", tracking)
    writer.log(1, {"reward/mean": 0.25, "train/loss": math.inf})
    (tmp_path / "samples.jsonl").write_text(episode("0.0", prompt="a|b"))
    writer.log(2, {"reward/mean": 0.75})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert "train/loss" not in events.Tags()["scalars"]
    [text] = events.Tensors("samples/text_summary")
    assert rb"a\|b" in text.tensor_proto.string_val[0] and text.step == 2


def test_trackers_are_given_by_kind_or_with_options() -> None:
    given = {"trackers": ["trackio", {"kind": "wandb", "options": {"project": "p", "mode": "offline"}}]}
    config = build_config({"logging": given}).logging
    assert [tracker.kind for tracker in wanted_trackers(config)] == ["trackio", "wandb", "tensorboard"]
    listed = build_config({"logging": {"trackers": ["tensorboard"]}}).logging
    assert [tracker.kind for tracker in wanted_trackers(listed)] == ["tensorboard"]
    off = build_config({"logging": {"tensorboard": False}}).logging
    assert not wanted_trackers(off)


@pytest.mark.parametrize(
    ("trackers", "sentence"),
    [
        (["wandbb"], "logging.trackers.0.kind: got 'wandbb', expected one of wandb, trackio, mlflow, tensorboard (did"),
        ([{"kind": "wandb", "options": {"projekt": "x"}}], "logging.trackers.0: got the option 'projekt' with 'x' for"),
        ([{"kind": "wandb", "options": {"mode": "off"}}], "got the option 'mode' with 'off' for wandb, expected proj"),
        (["mlflow", "mlflow"], "logging.trackers: got 'mlflow' twice, expected each tracker once"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(trackers: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_config({"logging": {"trackers": trackers}})
    assert sentence in str(refusal.value)


class Picky(Noting):
    """A tracker that takes no step with one of the names that it does not like."""

    def __init__(self, *bad: str) -> None:
        super().__init__()
        self.bad = set(bad)
        self.taken: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        if self.bad & metrics.keys():
            raise NotADirectoryError("that name is a folder")
        self.taken |= metrics


def test_one_bad_name_drops_no_other_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {f"group/{number}": float(number) for number in range(130)}
    bad = ("group/0", "group/77", "group/129")
    tracker = Picky(*bad)
    with caplog.at_level(logging.WARNING):
        tracking = Tracking({"picky": tracker}, tmp_path, {})
        tracking.log(1, metrics)
        tracking.log(2, metrics)
        tracking.close()
    assert tracker.taken == {name: value for name, value in metrics.items() if name not in bad}
    assert all(caplog.text.count(f"tracker picky: {name} is not sent: NotADirectoryError: that") == 1 for name in bad)
    assert "given up" not in caplog.text
    assert [step for name, (step, _) in tracker.calls[1:-1]].count(2) == 1, "later steps leave them out at once"


def test_a_dead_tracker_is_not_asked_for_each_metric(tmp_path: Path) -> None:
    tracker = Noting(fails=("log",))
    tracking = Tracking({"dead": tracker}, tmp_path, {})
    for step in range(3):
        tracking.log(step, {f"group/{number}": 0.0 for number in range(130)})
    tracking.close()
    assert len([name for name, _ in tracker.calls if name == "log"]) <= 3 * 10


def test_no_name_of_mlflow_is_a_folder_of_another() -> None:
    rewards = [f"{prefix}/reward{name}" for prefix in ("val", "eval/s") for name in ("", "/exact", "/exact/best@4")]
    names = [*rewards, "val/pass@4", "eval/s/avg@4", "reward_by_source/org/set+1", "reward_by_source/org/set-1"]
    keys = [mlflow_key(name) for name in names]
    assert len(set(keys)) == len(names) and all(re.fullmatch(r"[\w./: -]+", key) for key in keys)
    assert not any(other.startswith(f"{key}/") for key in keys for other in keys)
    assert keys[1] == "val/reward.exact" and "val/pass_at_4" in keys
