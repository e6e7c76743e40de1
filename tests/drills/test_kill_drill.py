"""After kill -9 of one process, a run continues from its last checkpoint, or ends soon and leaves nothing behind. It
says which process died."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_end_to_end import FIGURES
from headrace.trainers.observe.metrics import read_metrics

pytestmark = pytest.mark.processes


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("victim", "store", "extra"),
    [
        pytest.param("rollout 0", "shm", (), marks=pytest.mark.drill),
        pytest.param("train worker 1", "shm", ("trainer.dp=2",), marks=pytest.mark.slow),  # test_healing kills one, too
        pytest.param("unit-0", "simple", ("dataplane.timeout_s=10",), marks=pytest.mark.drill),
        pytest.param("directory", "shm", ("dataplane.timeout_s=10",), marks=pytest.mark.drill),
    ],
)
def test_killed_process_is_named_and_nothing_is_left(tmp_path, victim, store, extra):
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, *runs.store(store), "algorithm.steps=100000", "run.max_restarts=0", *extra)
    runs.wait_for_step(run_dir, 2, process)
    family = runs.descendants(process)
    [target] = [process for name, process in runs.actors(run_dir).items() if name.endswith(victim)]
    assert runs.shared_memory(run_dir)
    assert target in family  # never a process that this test's run did not start
    os.kill(target.pid, signal.SIGKILL)
    killed = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert process.returncode == 1, output
    assert victim in output and str(target.pid) in output, output
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [other for other in alive if other.status() != psutil.STATUS_ZOMBIE]
    assert not runs.shared_memory(run_dir)
    assert victim in Path(run_dir / "error.txt").read_text()


WHOLE = ("run.checkpoint_every=2", "algorithm.steps=8", "trainer.dp=2", "dataplane.timeout_s=10")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Figures by step of an undisturbed run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    code, output = runs.run(run_dir, *WHOLE)
    assert code == 0, output
    return figures_of(run_dir)


def figures_of(run_dir, names=FIGURES):
    """Step -> figures of the steps that count, by metrics that do not depend on time."""
    records, _ = read_metrics(run_dir / "metrics.jsonl")
    return {line["step"]: [line[name] for name in names] for line in records if "reward/mean" in line}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("victims", "store"),
    [
        pytest.param(("train worker 1",), "shm", marks=pytest.mark.drill),
        pytest.param(("directory", "train worker 0"), "shm", marks=pytest.mark.drill),
        pytest.param(("unit-0",), "simple", marks=pytest.mark.drill),
    ],
)
def test_a_run_goes_on_from_its_last_checkpoint_as_if_nothing_had_been(tmp_path, uninterrupted, victims, store):
    run_dir = tmp_path / "run"
    process = runs.start(run_dir, *WHOLE, *runs.store(store))
    family = set()
    for restarts, victim in enumerate(victims):
        wait_for_checkpoint(run_dir, process, restarts)
        family |= set(runs.descendants(process))
        [target] = [process for name, process in runs.actors(run_dir).items() if name.endswith(victim)]
        os.kill(target.pid, signal.SIGKILL)
    output = runs.succeed(process, timeout_s=300)
    for restart, victim in enumerate(victims, start=1):
        assert f"restart {restart} (run.max_restarts=3): going on from the checkpoint of step" in output
        assert victim in output
    alone = "the train workers alone are restarted, the rollouts go on" in output
    assert alone == any(victim.startswith("train worker") for victim in victims)
    assert figures_of(run_dir) == uninterrupted
    lines = runs.metrics(run_dir)
    events = [line["event"] for line in lines if line.get("event") in ("resumed", "finished")]
    assert events == [*("resumed" for _ in victims), "finished"]
    assert lines[-2]["run/restarts"] == len(victims)
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [other for other in alive if other.status() != psutil.STATUS_ZOMBIE]
    assert not runs.shared_memory(run_dir) and not (run_dir / "error.txt").exists()


def wait_for_checkpoint(run_dir, process, restarts):
    """Until the run has a whole checkpoint, has come back from `restarts` restarts and has trained beyond it."""
    deadline = time.monotonic() + 180
    while True:
        lines = runs.metrics(run_dir)
        resumed = [at for at, line in enumerate(lines) if line.get("event") == "resumed"]
        steps = [line["step"] for line in lines[resumed[-1] + 1 if resumed else 0 :] if "reward/mean" in line]
        whole = [int(path.name.partition("_")[2]) for path in run_dir.glob("checkpoints/step_??????")]
        if len(resumed) == restarts and whole and steps and steps[-1] > min(whole):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no step after a checkpoint:\n{process.communicate()[0]}")
        time.sleep(0.05)


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_a_killed_engine_is_left_out_and_the_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    process = runs.start(
        run_dir, "rollout.num_actors=1", "rollout.num_engines=2", "algorithm.steps=40", "run.max_restarts=0"
    )
    runs.wait_for_step(run_dir, 2, process)
    [target] = [process for name, process in runs.actors(run_dir).items() if name == "engine 1"]
    assert target in runs.descendants(process)
    os.kill(target.pid, signal.SIGKILL)
    runs.succeed(process)
    steps = [line for line in runs.metrics(run_dir) if "sync/engines" in line]
    assert steps[0]["sync/engines"] == 2 and steps[0]["sync/engines_left_out"] == 0
    assert steps[-1]["sync/engines"] == 1 and steps[-1]["sync/engines_left_out"] == 1
    assert all(line["rollout/failed_rows"] == 0 for line in steps), "its requests went to the other"
    assert len(steps) == 40 and not runs.shared_memory(run_dir)
