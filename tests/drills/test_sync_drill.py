"""Engines that stop, die and come back around a weight sync: no engine serves a wrong version."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from headrace.tests.runs import weight_sync_runs as runs
from headrace.trainers.cluster.engine_pool import Engine, NoEngineLeft
from headrace.trainers.grpo.checkpoints import State

pytestmark = pytest.mark.drill

BOUND_S = 4.0
MARGIN_S = 30.0
"""Of a whole sync beyond its transport's bounds: the driver's own margin, health checks, a second attempt."""


def send(engine: Engine, number: signal.Signals) -> None:
    os.kill(engine.handle.info.pid, number)


@pytest.mark.timeout(280)
# Each fault by itself: tests/actors/weight_sync/transports/test_faults.py, tests/actors/engines/vllm/test_failures.py.
@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_stopped_and_killed_engines(tmp_path: Path, transport: str) -> None:
    folder = runs.model_folder(tmp_path / "model", "tied")
    overrides = (
        "rollout.num_engines=3", f"sync.transport={transport}", f"sync.timeout_s={BOUND_S}", "dataplane.timeout_s=20",
        "run.max_restarts=0",  # replacing the dead is tests/runs/test_healing.py's matter
    )  # fmt: skip
    state = State()
    with runs.run(tmp_path / "run", folder, *overrides) as run:
        first, second, third = run.actors.engines.engines
        assert runs.step(run, state).engines == 3

        send(second, signal.SIGSTOP)  # slow beyond any bound
        try:
            state.version += 1
            started = time.monotonic()
            report = run.weights.sync(state.version)
            assert time.monotonic() - started < 2 * BOUND_S + MARGIN_S
        finally:
            send(second, signal.SIGCONT)
        assert (report.engines, report.left_out) == (2, 1)
        assert second.left_out and second.name in second.left_out and second.version == 1
        assert runs.step(run, state).engines == 3, "it answers again and is taken back"
        assert not second.left_out

        killer = threading.Timer(random.Random(transport).uniform(0.0, 0.2), send, (third, signal.SIGKILL))
        killer.start()
        state.version += 1
        report = run.weights.sync(state.version)
        killer.join()
        if report.engines == 3:  # it died after its commit: the rollout finds out
            state.version += 1
            report = run.weights.sync(state.version)
        assert (report.engines, report.left_out) == (2, 1)
        assert "died" in third.left_out

        model = runs.trainer_model(run, tmp_path / "export")
        for engine in (first, second):
            answers = runs.engine_logprobs(engine, "after")
            assert runs.difference(model, answers) < 1e-3
            assert all(set(versions) == {state.version} for _, _, versions in answers)
        runs.step(run, state)

        for engine in (first, second):
            send(engine, signal.SIGKILL)
        state.version += 1
        with pytest.raises(NoEngineLeft, match=f"none of the 3 engines can get requests: {first.name}: .*died"):
            run.weights.sync(state.version)


@pytest.mark.vllm
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("in_flight", "scheme"), [("keep", "none"), ("wait", "none"), ("wait", "fp8")])
def test_an_engine_core_that_is_killed_in_a_direct_broadcast_costs_the_other_engine_nothing(
    tmp_path: Path, in_flight: str, scheme: str
) -> None:
    folder = runs.model_folder(tmp_path / "model", "tied")
    overrides = (
        "rollout.engine=vllm", "rollout.kv_cache=32", "rollout.num_engines=2", "sync.transport=collective",
        "sync.staging=none", "sync.bucket_mib=1", f"sync.in_flight={in_flight}", f"sync.timeout_s={2 * BOUND_S}",
        "dataplane.timeout_s=20", "run.max_restarts=0", f"rollout.quantization={scheme}", "sync.verify=full",
    )  # fmt: skip
    state = State()
    with runs.run(tmp_path / "run", folder, *overrides) as run:
        first, second = run.actors.engines.engines
        assert runs.step(run, state).engines == 2 and first.joins and second.joins

        children = psutil.Process(second.handle.info.pid).children(recursive=True)
        [core] = [child for child in children if "EngineCore" in child.name()]
        killer = threading.Timer(random.Random(in_flight).uniform(0.0, 0.1), core.kill)
        killer.start()
        state.version += 1
        report = run.weights.sync(state.version)
        killer.join()
        if report.engines == 2:  # it died after its commit: the next sync finds out
            state.version += 1
            report = run.weights.sync(state.version)
        assert (report.engines, report.left_out) == (1, 1)
        assert second.dead and "died" in second.left_out and psutil.pid_exists(second.handle.info.pid)

        model = runs.trainer_model(run, tmp_path / "export")
        answers = runs.engine_logprobs(first, "after")
        assert runs.difference(model, answers) < (1e-3 if scheme == "none" else 0.6), "it rounds activations, too"
        assert all(set(versions) == {state.version} for _, _, versions in answers)
