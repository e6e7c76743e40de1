"""Starts a pool and its tenants as a user does, each by `headrace` in a process of its own, and ends them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.gpu.nvml import visible_gpus
from headrace.bench.gpu.train_run import end_process, run_keys, run_phase, start_process, steps_done
from headrace.bench.gpu.works import EXAMPLES, GrpoWork
from headrace.trainers.pool.server.folder import AUTH_MODE, SERVER, ServedPool, find_pool

NUM_GPUS = 2
"""Number of GPUs of the pool."""
START_S = 120.0
"""Seconds within which the pool must be there."""
CPUS = 16
"""Number of logical CPUs of the pool's Ray cluster, which are numbers only."""
MICROBATCH = 4096
"""Number of tokens of a microbatch, with which the 2 G shape trains in 80 GiB beside what sleeps there."""
_LOOK_S = 0.25
_TAIL = 15
"""Number of lines at the end of a failed process's output that are reported."""


@dataclass(frozen=True, slots=True)
class TenantTask:
    """Settings of one tenant: a run with an engine on each GPU of the pool, which trains on one of them."""

    name: str
    work: GrpoWork
    train_gpu: int
    backend: str
    """Train backend, `fsdp` or `megatron`."""
    model: Path
    """Model folder, with the prompts."""
    folder: Path
    """Folder of the run, which does not exist yet."""
    steps: int
    prompts: int
    """Number of prompts of a step."""
    gpu: bool
    """True if the pool's GPUs are no numbers only."""
    overrides: tuple[str, ...] = ()
    """Keys of the run's configuration from the command line, which come after all others."""

    def arguments(self, address: str) -> list[str]:
        """Return the arguments of `headrace` that start the run on the pool at `address`."""
        keys = run_keys(
            self.work, self.model, self.folder, steps=self.steps, prompts=self.prompts, backend=self.backend,
            gpu=self.gpu,
        )  # fmt: skip
        keys += [
            f"run.name={self.name}", f"run.seed={self.train_gpu}", f"pool.address={address}", "algorithm.mode=async",
            "sync.in_flight=keep",  # else training would hold its GPU until the longest sample of the others ends
            "sync.verify=full",  # a woken engine has the trainer's bytes, or the run says that it has not
            f"rollout.num_engines={NUM_GPUS}", "rollout.num_actors=1", f"resources.trainer_gpus=[{self.train_gpu}]",
            f"resources.rollout_gpus={list(range(NUM_GPUS))}", f"trainer.tokens_per_microbatch={MICROBATCH}",
        ]  # fmt: skip
        return ["train", str(EXAMPLES / self.work.example), *keys, *self.overrides]


@dataclass(slots=True)
class RunningTenant:
    """A tenant's process."""

    task: TenantTask
    process: subprocess.Popen[bytes]
    output: Path
    """File with what it prints."""

    def problem(self) -> str:
        """Return a sentence about a process that has failed, with the end of its output; "" otherwise."""
        code = self.process.poll()
        return "" if code in (None, 0) else f"{self.task.name}: ended with exit code {code}: {tail(self.output)}"


@contextmanager
def served(folder: Path, *, gpu: bool) -> Iterator[ServedPool]:
    """Context manager that starts a pool with its files in `folder`, and stops it at the end. gpu: whether it has the
    first NUM_GPUS GPUs of this process, or numbers only. Raises RuntimeError with its output if it does not start."""
    folder.mkdir(parents=True, exist_ok=True)
    output = folder.with_name(f"{folder.name}.txt")
    environment = {AUTH_MODE: "token", **os.environ}
    arguments = ["pool", "start", "--dir", str(folder), "--cpus", str(CPUS)]
    if gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(NUM_GPUS))
    else:
        arguments += ["--gpus", str(NUM_GPUS)]
    process = start_process("headrace.cli", arguments, output, environment)
    try:
        deadline = time.monotonic() + START_S
        while not (folder / SERVER).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the pool did not start: {tail(output)}")
            time.sleep(_LOOK_S)
        yield find_pool(folder)
    finally:
        end_process(process)


@contextmanager
def tenants(tasks: Sequence[TenantTask], pool: ServedPool) -> Iterator[list[RunningTenant]]:
    """Context manager that starts the tenants, and at its end ends the ones that still run. Their outputs are in text
    files of the run folders' names, beside them."""
    environment = {**os.environ, AUTH_MODE: pool.auth_mode}
    running: list[RunningTenant] = []
    try:
        for task in tasks:
            output = task.folder.with_name(f"{task.folder.name}.txt")
            running.append(
                RunningTenant(
                    task, start_process("headrace.cli", task.arguments(pool.address), output, environment), output
                )
            )
        yield running
    finally:
        for tenant in running:
            if tenant.process.poll() is None:
                tenant.process.terminate()  # all at once: one may wait for another's GPUs
        for tenant in running:
            end_process(tenant.process)


def follow(running: Sequence[RunningTenant], limit_s: float, tell: Callable[[str], None], *, steps: int = 0) -> str:
    """Wait until all tenants have ended, or, with `steps`, until each has made that many. Returns a sentence about what
    was wrong: a tenant that failed, or that did not come so far within `limit_s` seconds; "" if all is well."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        tell(", ".join(run_phase(one.task.folder, one.task.steps) for one in running))
        if problems := [problem for one in running if (problem := one.problem())]:
            return "; ".join(problems)
        if all(one.process.poll() is not None or 0 < steps <= steps_done(one.task.folder) for one in running):
            return ""
        time.sleep(_LOOK_S)
    told = [
        f"{one.task.name} made {steps_done(one.task.folder)} steps, its output ends with: {tail(one.output)}"
        for one in running
    ]
    return f"not over after {limit_s:g} s: " + "; ".join(told)


def tail(output: Path) -> str:
    """Return the name and the last lines of a file of output."""
    lines = output.read_text(errors="replace").splitlines() if output.exists() else []
    return f"{output}\n" + "\n".join(f"    {line}" for line in lines[-_TAIL:])
