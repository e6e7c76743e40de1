"""kill -9 of a rollout actor or an engine of a run: another takes its place, nothing is trained on twice or lost."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes

STEPS = 30
INT8 = ("rollout.quantization=int8", "sync.verify=full", "sync.delta=true")


def kill(run_dir: Path, name: str) -> None:
    [target] = [found for actor, found in runs.actors(run_dir).items() if actor == name]
    assert target in psutil.Process().children(recursive=True)  # never a process that this test did not start
    os.kill(target.pid, signal.SIGKILL)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_a_killed_rollout_actor_is_replaced(tmp_path: Path, mode: str) -> None:
    """Its engine lives in it: the new one has the version of the others before it answers."""
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir,
        runs.shared_ray(),
        f"algorithm.mode={mode}",
        f"algorithm.steps={STEPS}",
        "rollout.num_engines=2",
        "validation.every=0",
    )
    runs.wait_for_step(run_dir, 2, process)
    kill(run_dir, "rollout 1")
    output = runs.succeed(process)
    steps = runs.steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["rollout/actors_replaced"] == 1 and steps[-1]["sync/engines"] == 2
    assert all(step["train/sequences"] == 8 * 8 and step["rollout/failed_rows"] == 0 for step in steps)
    assert max(step["staleness/max"] for step in steps) <= (1 if mode == "async" else 0)
    assert steps[-1]["dataplane/leased_rows"] == 0
    assert "rollout 1" in output and "replaced" in output
    assert not runs.shared_memory(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param((), id="hf"),
        pytest.param(INT8, id="hf in int8"),
        pytest.param(("rollout.engine=vllm", "rollout.kv_cache=32", *INT8), id="vllm in int8", marks=pytest.mark.vllm),
    ],
)
def test_a_killed_engine_is_replaced(tmp_path: Path, engine: tuple[str, ...]) -> None:
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir,
        runs.shared_ray(),
        "rollout.num_actors=1",
        "rollout.num_engines=2",
        f"algorithm.steps={STEPS}",
        "validation.every=0",
        *engine,
    )
    runs.wait_for_step(run_dir, 2, process)
    kill(run_dir, "engine 1")
    runs.succeed(process)
    steps = runs.steps_of(run_dir)
    compared = {step["sync/verified_params"] / step["sync/engines"] for step in steps}
    assert not engine or (len(compared) == 1 and min(compared) > 35), "the new engine, too, is compared as a whole"
    assert len(steps) == STEPS and steps[-1]["rollout/actors_replaced"] == 1
    assert min(step["sync/engines"] for step in steps) <= 2 and steps[-1]["sync/engines"] == 2
    assert all(step["rollout/failed_rows"] == 0 for step in steps), "its requests went to the other"
    assert not runs.shared_memory(run_dir)


@pytest.mark.timeout(400)
def test_train_workers_are_restarted_under_the_rollouts(tmp_path: Path) -> None:
    """Engines keep their weights, and workers catch up with them: no version is served twice, no group made twice."""
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, runs.shared_ray(),
        "algorithm.mode=async", f"algorithm.steps={STEPS}", "rollout.num_engines=2", "trainer.dp=2",
        "run.checkpoint_every=3", "validation.every=5", "validation.background=true",
    )  # fmt: skip
    runs.wait_for_step(run_dir, 5, process)
    wait_until(lambda: [*(run_dir / "checkpoints").glob("step_*.json")], "a checkpoint is written in the background")
    before = {name: found.pid for name, found in runs.actors(run_dir).items()}
    kill(run_dir, "train worker 1")
    output = runs.succeed(process)
    assert "train worker 1" in output and "the train workers alone are restarted, the rollouts go on" in output
    after = {actor["name"]: actor["pid"] for actor in json.loads((run_dir / "actors.json").read_text())["actors"]}
    changed = {name for name, pid in before.items() if after[name] != pid}
    assert changed == {"train worker 0", "train worker 1"}
    lines = runs.metrics(run_dir)
    [at] = [index for index, line in enumerate(lines) if line.get("event") == "resumed"]
    first, again = lines[at]["step"], [line for line in lines[at:] if "reward/mean" in line]
    assert first > 0 and [line["step"] for line in again] == list(range(first + 1, STEPS + 1))
    done = {line["step"]: line for line in lines[:at] if "reward/mean" in line}
    twice = [line for line in again if line["step"] in done]
    assert twice and sum(line.get("rollout/restored_rows", 0) for line in again) >= 8 * 8 * len(twice)
    for line in twice:
        assert line["sync/bytes"] == 0 and line["reward/mean"] == done[line["step"]]["reward/mean"]
    for line in again:
        assert line["train/sequences"] == 8 * 8 and 0 <= line["staleness/max"] <= 1
    assert again[-1]["run/restarts"] == 1 and again[-1]["rollout/actors_replaced"] == 0
    assert again[-1]["dataplane/leased_rows"] == 0
    versions = [line["val/version"] for line in lines if "val/version" in line]
    assert versions == sorted(set(versions))
    assert not runs.shared_memory(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rollout_actor_that_hangs_is_replaced(tmp_path: Path) -> None:
    """The actor is replaced whether or not it has rollouts to make: if it has none, only the weight sync asks it."""
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, runs.shared_ray(),
        "algorithm.mode=async", "algorithm.steps=300", "rollout.num_engines=2", "validation.every=0",
        "resources.stage_timeout_s=20", "sync.timeout_s=5",
    )  # fmt: skip
    runs.wait_for_step(run_dir, 2, process)
    hanging = runs.actors(run_dir)["rollout 1"]
    hanging.suspend()
    output = runs.succeed(process)
    steps = runs.steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, 301))
    assert steps[-1]["rollout/actors_replaced"] == 1 and steps[-1]["run/restarts"] == 0
    # The weight sync notices an actor without rollouts, the driver one that has some.
    assert re.search(
        r"no answer within 20 s from rollout 1|rollout 1 \(.*\) was stuck for 20 s without a token", output
    )
    assert not hanging.is_running()
