"""`headrace scale` during a run: engines join and leave, and every prompt is trained on once, with the same rows."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace import load_config, run_training
from headrace.actors.rollout.journal import GroupJournal
from headrace.tests import forks
from headrace.tests.hosts import TRUSTED, hosts, join_ray, ray_cluster, start
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.test_journal_resume import kill_all
from headrace.tests.waiting import in_thread, wait_until
from headrace.trainers.cluster.rollout_specs import fingerprint, journal
from headrace.trainers.elastic.scale_order import ScaleAnswer, order_engines
from headrace.trainers.errors import UserError
from headrace.trainers.grpo.feed import Feed
from headrace.trainers.supervision.stuck_report import read_actors

pytestmark = pytest.mark.processes
SCRIPTED = (
    "rollout.engine=scripted", "trainer.backend=scripted", "validation.every=0", "warmup.corpus=none",
    "rollout.num_engines=2",
)  # fmt: skip
GROUPS, STEPS = 8, 25
INTERRUPTED = 130


class _Ledger:
    """The observer of the feeds of a run's process: it notes which prompts were trained on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def opened(self, plane_id: int, partition: str, step: int) -> None:
        self._note({"opened": step})

    def committed(self, plane_id: int, partition: str, step: int, positions: Sequence[int]) -> None:
        self._note({"step": step, "positions": list(positions)})

    def _note(self, line: dict) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def expect_each_prompt_once(run_dir: Path) -> list[dict]:
    """The steps of a run, which has trained on each prompt once. Steps behind the checkpoint of a resume do not
    count."""
    trained: dict[int, list[int]] = {}
    for line in map(json.loads, (run_dir / "trained.jsonl").read_text().splitlines()):
        if "opened" in line:
            trained = {step: positions for step, positions in trained.items() if step <= line["opened"]}
        else:
            trained[line["step"]] = line["positions"]
    positions = [position for positions in trained.values() for position in positions]
    assert list(trained) == list(range(1, len(trained) + 1))
    assert sorted(positions) == list(range(GROUPS * len(trained))), "each prompt once"
    return runs.steps_of(run_dir)


def arguments(run_dir: Path, *overrides: str) -> list[str]:
    """The arguments of a run that notes what it trains on."""
    config = str(runs.ROOT / "examples" / "quickstart.yaml")
    return ["headrace.tests.runs.test_scaling", config, f"run.dir={run_dir}", *runs.SMALL, *overrides]


def scaled(run_dir: Path, order: Callable[[], None], *overrides: str) -> list[dict]:
    """The steps of a run to which `order` gives its orders once it has begun, and that trains on each prompt once. It
    is interrupted after at least STEPS steps."""
    words = arguments(run_dir, runs.shared_ray(), *overrides, "algorithm.steps=100000")
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(forks.run, words, run_dir.parent, runs.environment(), 240)
        try:
            wait_until(lambda: running.done() or runs.steps_of(run_dir), "the first step", 90)
            order()
            wait_until(lambda: running.done() or runs.steps_of(run_dir)[-1]["step"] >= STEPS, "the last step", 90)
        finally:
            if not running.done():
                os.kill(int((run_dir / "run.lock").read_text()), signal.SIGINT)
            code, output = running.result()
            assert code == INTERRUPTED, output
    return expect_each_prompt_once(run_dir)


def order(run_dir: Path, engines: int) -> ScaleAnswer:
    return order_engines(run_dir, engines, 60)


def recorded(run_dir: Path, *overrides: str) -> dict[str, list[int]]:
    """The tokens of every row that a run with these overrides has recorded, by key."""
    _, path, *words = arguments(run_dir, *overrides)
    config = load_config(path, words)
    settings = journal(config.run, fingerprint(config))
    assert settings is not None
    reader, rows = GroupJournal(settings, "reader"), dict[str, list[int]]()
    reader.refresh()
    for position in reader.positions:
        group = reader.find(position)
        assert group is not None
        tokens = group.rows.batch.jagged("input_ids")
        parts = np.split(tokens.values.numpy(), np.cumsum(tokens.lengths)[:-1])
        rows |= {key: part.tolist() for key, part in zip(group.rows.keys, parts, strict=True)}
    return rows


@pytest.mark.timeout(120)
def test_engines_join_and_leave_while_rollouts_go_on(tmp_path: Path) -> None:
    answers: list[ScaleAnswer] = []

    def orders() -> None:
        answers.extend(order(tmp_path / "run", engines) for engines in (3, 1))

    options = (*SCRIPTED, "algorithm.mode=async", "scripted.latency_s=0.05")
    steps = scaled(tmp_path / "run", orders, *options)
    grown, shrunk = answers
    assert (grown.state, grown.before, len(grown.engines)) == ("done", 2, 3)
    assert (shrunk.state, shrunk.before, len(shrunk.engines)) == ("done", 3, 1)
    counts = [step["engine/count"] for step in steps]
    assert counts[0] == 2 and max(counts) == 3 and counts[-1] == 1
    assert all(step["rollout/failed_rows"] == 0 and step["rollout/actors_replaced"] == 0 for step in steps)
    assert max(step["staleness/max"] for step in steps) <= 1
    assert {actor.name for actor in read_actors(tmp_path / "run") if "rollout" in actor.name} == {"rollout 0"}
    with pytest.raises(UserError, match="no run is under way"):
        order(tmp_path / "run", 2)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["sync", "async", "async_streaming"])
@pytest.mark.parametrize("actors", [(), ("rollout.num_actors=1",)], ids=["embedded", "separate"])
def test_the_rows_are_those_of_a_run_that_was_not_scaled(tmp_path: Path, mode: str, actors: tuple[str, ...]) -> None:
    answers: list[ScaleAnswer] = []

    def orders() -> None:
        answers.extend(order(tmp_path / "scaled", engines) for engines in (4, 1, 3))

    options = (*SCRIPTED, *actors, f"algorithm.mode={mode}", "run.record=true")
    steps = scaled(tmp_path / "scaled", orders, *options, "scripted.latency_s=0.1")
    scaled(tmp_path / "fixed", lambda: None, *options)
    assert [(answer.state, len(answer.engines)) for answer in answers] == [("done", n) for n in (4, 1, 3)]
    synced = [step["sync/engines"] for step in steps if "sync/engines" in step]  # The interrupted step may lack it.
    assert steps[-1]["engine/count"] == 3 and synced[-1] == 3
    rows, expected = (recorded(tmp_path / name, *options) for name in ("scaled", "fixed"))
    common = rows.keys() & expected.keys()
    assert len(common) >= STEPS * GROUPS * 8
    assert not [key for key in common if rows[key] != expected[key]]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_that_is_killed_while_it_scales_is_resumed_with_the_engines_of_its_config(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = (*SCRIPTED, "algorithm.mode=async", "run.checkpoint_every=3", "resources.num_cpus=6")
    words = arguments(run_dir, *options, "algorithm.steps=100000", "scripted.latency_s=0.1")
    process = runs.start_command(words, tmp_path)
    runs.wait_for_step(run_dir, 7, process)
    heard: list[str] = []
    thread, result = in_thread(lambda: order_engines(run_dir, 4, 60, heard.append))
    wait_until(lambda: heard, "the run has begun to start an engine")
    kill_all(process, run_dir)
    thread.join(60)
    assert isinstance(result[0], UserError) and "no run is under way" in str(result[0])
    steps = max(line["step"] for line in runs.steps_of(run_dir)) + 5
    process = runs.start_command(arguments(run_dir, *options, f"algorithm.steps={steps}", "--resume"), tmp_path)
    runs.succeed(process)
    assert expect_each_prompt_once(run_dir)[-1]["engine/count"] == 2
    assert not runs.shared_memory(run_dir)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_host_that_joins_later_gets_an_engine(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hosts(2) as (near, far):
        address = ray_cluster([near], [2])
        options = ("rollout.num_engines=1", "resources.elastic=true", f"resources.ray_address={address}", TRUSTED)
        sizes = ("dataplane.store.capacity_mib=64", "algorithm.steps=100000", "scripted.latency_s=0.1")
        words = arguments(run_dir, *SCRIPTED, *options, *sizes, "algorithm.mode=async")
        process = start(near, [sys.executable, "-m", *words], tmp_path)
        runs.wait_for_step(run_dir, 2, process)
        heard: list[str] = []
        thread, result = in_thread(lambda: order_engines(run_dir, 2, 120, heard.append))
        wait_until(lambda: any("1 engine(s) wait for room" in line for line in heard), "it waits for a host")
        join_ray(far, address, 1)
        thread.join(120)
        answer = result[0]
        assert isinstance(answer, ScaleAnswer) and answer.state == "done", answer
        assert any(line.startswith("rollout 1 on host2") for line in answer.engines)
        joined = runs.steps_of(run_dir)[-1]["step"]
        runs.wait_for_step(run_dir, joined + 10, process)
    process.communicate(timeout=60)  # It has ended with its host.
    assert runs.steps_of(run_dir)[-1]["engine/count"] == 2
    expect_each_prompt_once(run_dir)


if __name__ == "__main__":  # of the process of a run that notes what it trains on
    config, *overrides = [word for word in sys.argv[1:] if word != "--resume"]
    loaded = load_config(config, overrides)
    assert loaded.run.dir is not None
    Path(loaded.run.dir).mkdir(parents=True, exist_ok=True)
    Feed.observers.append(_Ledger(Path(loaded.run.dir) / "trained.jsonl"))
    try:
        run_training(loaded, resume="--resume" in sys.argv)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
