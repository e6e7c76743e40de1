"""Runs that share a pool's engines, each with its own adapter: figures of runs alone, deaths, and what is refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from headrace import load_config
from headrace.actors.process.remote_methods import decode_result, encode_arguments, submit
from headrace.actors.shared_engine import SharedEngineActor
from headrace.tests import process_pool
from headrace.tests.runs import cli_runs as runs
from headrace.tests.runs.pool_runs import SharedPool, shared_pool
from headrace.tests.runs.test_switch_roles import figures
from headrace.tests.runs.test_time_sharing import _wait_for, _wait_for_step
from headrace.tests.runs.weight_sync_runs import ROOT, model_folder
from headrace.trainers.errors import UserError
from headrace.trainers.pool.tenant.shared_engines import SharedEngines, find_engine
from headrace.trainers.supervision.stuck_report import listed_actors

pytestmark = pytest.mark.processes

COMMON = (
    "warmup.corpus=none", "algorithm.mode=async", "sync.in_flight=keep", "sync.verify=full", "validation.every=0",
    "rollout.num_engines=1", "rollout.num_actors=1", "algorithm.steps=3", "trainer.lr=0.001", "run.deterministic=true",
    "trainer.lora.rank=4", "run.trace_step=0",
)  # fmt: skip


class Shared(SharedPool):
    """A pool of two GPUs, of which its engine keeps the second."""

    model: Path

    def run(self, name: str, train_gpu: int = 0, *overrides: str) -> tuple[int, str]:
        more = ("pool.engines=shared", f"model.path={self.model}", *COMMON, "rollout.num_engines=1")
        return super().run(name, train_gpu, *more, "resources.rollout_gpus=[1]", *overrides)

    def seats(self) -> list[str]:
        """Names of the runs that have a seat in the engine."""
        method = SharedEngineActor.runs
        reply: Any = ray.get(submit(find_engine(self.name, 0, 60.0).actor, method, encode_arguments([])), timeout=60)
        return decode_result(method, reply)

    def engine_pid(self) -> int:
        """Process id of the engine."""
        method = SharedEngineActor.info
        reply: Any = ray.get(submit(find_engine(self.name, 0, 60.0).actor, method, encode_arguments([])), timeout=60)
        return decode_result(method, reply).pid


@contextmanager
def shared(folder: Path, model: Path, *overrides: str) -> Iterator[Shared]:
    gpus = ("resources.trainer_gpus=[0]", "resources.rollout_gpus=[1]")
    asked = (f"model.path={model}", *runs.SMALL, *COMMON, *gpus, "rollout.max_adapters=2")
    with shared_pool(folder) as started:
        config = load_config(ROOT / "examples" / "quickstart.yaml", [*asked, "rollout.max_batch=8", *overrides])
        with SharedEngines(started.name, folder, config).running() as gpus:
            assert gpus == ((1,),)
            pool = Shared(folder, started.name)
            pool.model = model
            yield pool


@pytest.mark.slow  # test_time_sharing compares tenants with runs alone, and test_seats their adapters
@pytest.mark.timeout(400)
def test_each_run_has_the_figures_of_its_run_alone(tmp_path: Path) -> None:
    """Both sample from one engine with adapters of their own, of other ranks. Trainers take turns on the other GPU."""
    model = model_folder(tmp_path / "base", "untied")
    process_pool.start_ray()
    with ThreadPoolExecutor() as threads, shared(tmp_path, model) as pool:
        both = [
            threads.submit(pool.run, "a"), threads.submit(pool.run, "b", 0, "trainer.lora.rank=2", "run.seed=7")
        ]  # fmt: skip
        for done in both:
            code, output = done.result()
            assert code == 0, output
        assert [one.pid for one in listed_actors(tmp_path) or ()] == [pool.engine_pid()]
    runs.finish(tmp_path / "alone", *COMMON, f"model.path={model}")
    alone, beside = runs.steps_of(tmp_path / "alone"), runs.steps_of(tmp_path / "a")
    assert len(alone) == 3
    for line, expected in zip(beside, alone, strict=True):
        decided = ("queue/", "dataplane/", "driver/", "sync/")
        wanted = {key: value for key, value in figures(expected).items() if not key.startswith(decided)}
        assert len(wanted) > 25 and {key: line[key] for key in wanted} == wanted
        assert line["sync/verified_params"] == expected["sync/verified_params"] > 0
        assert line["sync/bytes"] == expected["sync/bytes"]
    models = [(tmp_path / name / "model" / "adapter" / "adapter_model.safetensors") for name in ("alone", "a", "b")]
    assert models[0].read_bytes() == models[1].read_bytes() != models[2].read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_survive_the_death_of_the_engine_and_of_each_other(tmp_path: Path) -> None:
    more = ("algorithm.steps=5000", "run.deterministic=false", "run.checkpoint_every=1")
    with ThreadPoolExecutor() as threads, shared(tmp_path, model_folder(tmp_path / "base", "untied")) as pool:
        both = {name: threads.submit(pool.run, name, 0, *more) for name in ("a", "b")}
        for name, running in both.items():
            _wait_for_step(tmp_path / name, 2, running)
        assert pool.seats() == ["a", "b"]
        code, output = pool.run("c", 0)
        assert code == 2 and "serve rollout.max_adapters=2 runs at the same time, and have a, b" in output
        engine = psutil.Process(pool.engine_pid())
        assert engine in psutil.Process(os.getpid()).children(recursive=True)
        engine.kill()
        steps = {
            name: _wait_for(tmp_path / name, lambda line: line.get("rollout/actors_replaced") == 1, running)
            for name, running in both.items()
        }
        for name, running in both.items():
            _wait_for_step(tmp_path / name, steps[name] + 2, running)
        os.kill(pool.driver("a"), signal.SIGKILL)
        both["a"].result()
        pool.wait_until_left("a")
        deadline = time.monotonic() + 60
        while pool.seats() != ["b"]:
            assert time.monotonic() < deadline, "the seat of a dead run is given up"
            time.sleep(0.5)
        last = runs.steps_of(tmp_path / "a")[-1]["step"]
        both["a"] = threads.submit(pool.run, "a", 0, *more, "--resume")
        _wait_for_step(tmp_path / "a", last + 2, both["a"])
        for name, running in both.items():
            os.kill(pool.driver(name), signal.SIGINT)
            code, output = running.result()
            assert code == 128 + signal.SIGINT, output
            pool.wait_until_left(name)
    assert runs.steps_of(tmp_path / "b")[-1]["run/restarts"] == 0


def test_engines_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    for override, sentence in {
        "trainer.lora.rank=0": "got a configuration with trainer.lora.rank=0, expected at least 1",
        "model.path=builtin:tiny-qwen3": "got model.path='builtin:tiny-qwen3', expected a folder or hub id",
        "resources.rollout_gpus=null": "got a configuration without resources.rollout_gpus",
    }.items():
        asked = [
            f"model.path={tmp_path}",
            *COMMON,
            "resources.rollout_gpus=[1]",
            "resources.trainer_gpus=[0]",
            override,
        ]
        if override.startswith("resources"):
            asked += ["resources.trainer_gpus=null"]
        config = load_config(ROOT / "examples" / "quickstart.yaml", asked)
        with (
            pytest.raises(UserError, match=f"--engines: {sentence}"),
            SharedEngines("none", tmp_path, config).running(),
        ):
            pass


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "base", "untied")
    with shared(tmp_path, model) as pool:
        code, output = pool.run("c", 0, "trainer.lora.rank=5")
        assert code == 2 and "trainer.lora.rank: got 5, expected at most 4, because pool.engines=shared" in output
        code, output = pool.run("c", 0, "trainer.lora.rank=0")
        assert code == 2 and "trainer.lora.rank: got 0 with pool.engines=shared, expected an adapter" in output
        code, output = pool.run("c", 0, "pool.engines=own", "rollout.num_engines=2", "resources.rollout_gpus=[0,1]")
        assert code == 2 and "resources.rollout_gpus: got GPU 1, expected other GPUs than [1], which" in output
        code, output = pool.run("c", 0, f"model.path={model_folder(tmp_path / 'other', 'tied')}")
        assert code == 2 and "model.path: got " in output and f"expected {model}" in output
