"""A step that is interrupted between its update and its figures has both in the run folder, or neither."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.testing.data_plane import open_plane
from headrace.tests.trainers.grpo.controller_world import CountingWorker, Handle, Loop, RowWorld
from headrace.trainers.config.load import build_config
from headrace.trainers.grpo import training_modes
from headrace.trainers.grpo.checkpoints import Checkpoints, State
from headrace.trainers.grpo.rollout_pool import RolloutPool
from headrace.trainers.observe.metrics import MetricsWriter
from headrace.trainers.observe.run_folder import RunFolder
from headrace.trainers.run.launch import _Training

POINTS: dict[str, tuple[Any, str]] = {
    "before the update": (training_modes.Steps, "begin"),
    "in the update": (CountingWorker, "finish"),
    "in the sync": (RolloutPool, "sync_weights"),
    "after the sync": (training_modes.Feed, "settle"),
    "when figures are made": (training_modes, "step_metrics"),
    "before the line": (_Training, "_tell_distrust"),
    "in the line": (MetricsWriter, "log"),
    "after the line": (Checkpoints, "is_due"),
}


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("point", POINTS)
def test_a_step_with_a_checkpoint_has_one_line(point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config(
        {
            "run": {"dir": str(tmp_path / "run"), "checkpoint_every": 0},
            "algorithm": {"prompts_per_step": 2, "group_size": 2, "steps": 3},
            "validation": {"every": 0},
            "logging": {"tensorboard": False},
        }
    )
    saved: list[int] = []
    monkeypatch.setattr(Checkpoints, "finish", lambda self, workers, rollouts, state: saved.append(state.step))
    state = State()
    with open_plane() as plane, RunFolder(config, resume=False) as folder:
        world = RowWorld(plane, config, random.Random(1))
        loop = Loop(world, [Handle(CountingWorker(world))])
        training = trainer(config, folder)
        checkpoints = Checkpoints(folder.checkpoints_dir, config.run)
        owner, name = POINTS[point]
        monkeypatch.setattr(owner, name, interrupted_at(lambda: state.step, getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            loop.go_on(state, world.begin(state), training._after_step(loop.run, checkpoints, first=2))
        training._save_interrupted(loop.run, state, checkpoints)
        world.inner.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert saved == [1 if point == "before the update" else 2]
    assert [line["step"] for line in lines] == list(range(1, saved[0] + 1)), "a line is missing or there twice"
    assert all(line["train/sequences"] == 4 and "reward/mean" in line for line in lines)


def trainer(config: Any, folder: RunFolder) -> _Training:
    """The part of a run that logs and saves steps, without its processes."""
    training = object.__new__(_Training)
    training._config, training._folder, training._restarts, training._logged = config, folder, 0, 0
    others: Any = training
    others._watch = SimpleNamespace(replace_if_dead=lambda: None, reason=lambda: None)
    others._endpoint = SimpleNamespace(run=SimpleNamespace(publish=lambda *_: None))
    others._progress = SimpleNamespace(update=lambda *_: None, message=lambda text: None)
    others._live_report = SimpleNamespace(tick=lambda: None)
    return training


def interrupted_at(step: Callable[[], int], call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that sends this process SIGINT once, in the second step."""
    left = [1]

    def calling(*arguments: Any, **options: Any) -> Any:
        result = call(*arguments, **options)
        if left and step() + (call.__name__ in ("begin", "finish")) == 2:
            left.clear()
            signal.raise_signal(signal.SIGINT)
        return result

    return calling
