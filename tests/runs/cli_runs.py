"""Runs of the command line for tests: small ones of the quickstart, as separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from headrace import load_config, run_training
from headrace.tests import forks
from headrace.tests.process_pool import ray_address

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "warmup.steps=10",
    "trainer.schedule=constant",
    "algorithm.prompts_per_step=8",
    "validation.num_prompts=16",
    "logging.tensorboard=false",
)


def shared_ray() -> str:
    """The override by which a run joins this process's Ray. Starting one takes 5 seconds, and the workers of this one
    are forked."""
    return f"resources.ray_address={ray_address()}"


def store(kind: str) -> tuple[str, ...]:
    """The overrides for a store of this kind, and for what its ports need."""
    trusted = ("dataplane.trusted_network=true",) if kind in ("simple", "mooncake") else ()
    return (f"dataplane.store.kind={kind}", *trusted)


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """`headrace train examples/quickstart.yaml` in the background, small, in `run_dir`."""
    return start_command(_arguments(run_dir, overrides), run_dir.parent)


def start_command(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """`python -m` with these arguments in the background, in `folder`."""
    return subprocess.Popen(
        _python(arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment()
    )


def command(run_dir: Path, *overrides: str) -> list[str]:
    """The command of a small run."""
    return _python(_arguments(run_dir, overrides))


def _python(arguments: Sequence[str]) -> list[str]:
    # Tests that a shell has started in the background ignore SIGINT, and so would what they start.
    return ["env", "--default-signal=INT", sys.executable, "-m", *arguments]


def run(run_dir: Path, *overrides: str, timeout_s: float = 240) -> tuple[int, str]:
    """Exit code and output of a small run, which joins this process's Ray. The run's process is forked, too."""
    arguments = _arguments(run_dir, (shared_ray(), *overrides))
    return forks.run(arguments, run_dir.parent, environment(), timeout_s)


def finish(run_dir: Path, *overrides: str, timeout_s: float = 240) -> str:
    """Output of such a run, which must end without an error."""
    code, output = run(run_dir, *overrides, timeout_s=timeout_s)
    assert code == 0, output
    return output


def skip_without_packages(name: str) -> None:
    """Skip the test of a run whose name says that it needs Megatron or vLLM, where they are not installed."""
    for kind, package in (("megatron", "megatron.core"), ("vllm", "vllm")):
        if kind in name:
            pytest.importorskip(package)


def trained(run_dir: Path, *overrides: str) -> list[dict]:
    """The steps of such a run."""
    finish(run_dir, *overrides)
    return steps_of(run_dir)


def _arguments(run_dir: Path, overrides: Sequence[str]) -> list[str]:
    config = str(ROOT / "examples" / "quickstart.yaml")
    return ["headrace.cli", "train", config, f"run.dir={run_dir}", *SMALL, *overrides]


def environment() -> dict[str, str]:
    """The environment of a run's process."""
    return {**os.environ, "COLUMNS": "200"}


def run_each(folder: Path, variants: Mapping[str, Sequence[str]], timeout_s: float = 240) -> None:
    """Small runs that differ in a few overrides, one after another in one process. Each has a folder of its name in
    `folder`."""
    config = str(ROOT / "examples" / "quickstart.yaml")
    arguments = [__name__, config, *SMALL, shared_ray(), str(folder), json.dumps(dict(variants))]
    code, output = forks.run(arguments, folder, environment(), timeout_s)
    assert code == 0, output


def succeed(process: subprocess.Popen[str], timeout_s: float = 240) -> str:
    """Wait for a run that was started and must end without an error; returns its output."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be being written


def steps_of(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl with the figures of a step."""
    return [line for line in metrics(run_dir) if "event" not in line and "reward/mean" in line]


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str], timeout_s: float = 180) -> None:
    """Return when the run has logged `step`; raise when it ends or stands still before."""
    deadline = time.monotonic() + timeout_s
    while not any(line["step"] >= step for line in metrics(run_dir)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the run did not reach step {step}:\n{process.communicate()[0]}")
        time.sleep(0.2)


def actors(run_dir: Path) -> dict[str, psutil.Process]:
    """The run's actors by name, but for those that are gone and not replaced yet."""
    found = {}
    for actor in json.loads((run_dir / "actors.json").read_text())["actors"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[actor["name"]] = psutil.Process(actor["pid"])
    return found


def shared_memory(run_dir: Path) -> list[str]:
    """What the run has in /dev/shm."""
    run_id = json.loads((run_dir / "actors.json").read_text())["run_id"]
    return [path.name for path in Path("/dev/shm").iterdir() if run_id in path.name]


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process below the run's own."""
    return psutil.Process(process.pid).children(recursive=True)


if __name__ == "__main__":  # of the process of `run_each`
    config, *overrides, folder, variants = sys.argv[1:]
    for name, more in json.loads(variants).items():
        run_training(load_config(config, [*overrides, f"run.dir={folder}/{name}", *more]))
