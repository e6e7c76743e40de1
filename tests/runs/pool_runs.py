"""Runs that share the GPUs of a pool, for tests: the pool's actor, its tenants, and what its trace must keep."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from headrace.tests import process_pool
from headrace.tests.runs import cli_runs as runs
from headrace.trainers.pool.server.client import PoolClient
from headrace.trainers.pool.server.server import start_actor

NAME = "shared"
RUN_S = 800.0
"""Seconds that a run of a tenant may take. Those that are killed again and again take minutes on a busy machine."""
SCRIPTED = ("rollout.engine=scripted", "trainer.backend=scripted", "warmup.corpus=none", "validation.every=0")
TENANT = (
    "algorithm.mode=async", "sync.in_flight=keep", "rollout.num_engines=2", "rollout.num_actors=1",
    "resources.rollout_gpus=[0,1]", "run.trace_step=0", "sync.verify=full",
)  # fmt: skip


class SharedPool:
    """A pool of two GPUs in this process's Ray cluster."""

    def __init__(self, folder: Path, name: str) -> None:
        """Find the pool, which has been started."""
        self.folder, self.name = folder, name
        self.client = PoolClient(name)

    def run(self, name: str, train_gpu: int, *overrides: str) -> tuple[int, str]:
        """Exit code and output of such a run, which is waited for. Its process is forked."""
        return runs.run(self.folder / name, *self._asked(name, train_gpu), *overrides, timeout_s=RUN_S)

    def _asked(self, name: str, train_gpu: int) -> tuple[str, ...]:
        where = (f"pool.address={process_pool.ray_address()}", f"pool.name={self.name}", f"run.name={name}")
        return (*where, *TENANT, f"resources.trainer_gpus=[{train_gpu}]")

    def driver(self, name: str) -> int:
        """Process id of a tenant's driver."""
        [pid] = [tenant.driver for tenant in self.client.status().tenants if tenant.name == name]
        assert pid is not None
        return pid

    @property
    def suspects(self) -> list[str]:
        return [tenant.suspect for tenant in self.client.status().tenants if tenant.suspect]

    def wait_until_left(self, name: str) -> None:
        """Wait until a tenant is gone: one that has ended leaves by itself, a dead one is found."""
        deadline = time.monotonic() + 60
        while name in [tenant.name for tenant in self.client.status().tenants]:
            assert time.monotonic() < deadline, self.client.status()
            time.sleep(0.2)

    def wait_until_empty(self) -> None:
        """Wait until no tenant is left."""
        for tenant in self.client.status().tenants:
            self.wait_until_left(tenant.name)

    def trace(self) -> list[dict[str, Any]]:
        """The lines of pool_trace.jsonl."""
        return [json.loads(line) for line in (self.folder / "pool_trace.jsonl").read_text().splitlines()]

    def grants(self, name: str, role: str) -> int:
        """Number of times that the pool granted a GPU to a role of a tenant."""
        return sum(line["event"] == "grant" and (line["tenant"], line["role"]) == (name, role) for line in self.trace())

    def expect_kept_rules(self) -> None:
        """No GPU is granted twice, and an engine's GPU is released only after it fell asleep or its tenant died."""
        holder: dict[int, tuple[str, str]] = {}
        for line in self.trace():
            gpu, who = line["gpu"], (line["tenant"], line["role"])
            if line["event"] == "grant":
                assert gpu not in holder, (line, holder)
                holder[gpu] = who
            elif line["event"] == "release":
                assert holder.pop(gpu) == who
        assert not holder, "all have left"


@contextlib.contextmanager
def shared_pool(folder: Path) -> Iterator[SharedPool]:
    """A pool whose GPUs are numbers only."""
    process_pool.start_ray()
    name = f"{NAME}-{folder.name}"
    actor = start_actor(folder, name, 2)
    try:
        yield SharedPool(folder, name)
    finally:
        ray.kill(actor, no_restart=True)


@contextlib.contextmanager
def pool_of_gpus(folder: Path) -> Iterator[SharedPool]:
    """A pool that `headrace pool start` has made of this process's Ray cluster, which has GPUs. It is stopped at the
    end as by Ctrl-C."""
    name, address = f"{NAME}-{folder.name}", process_pool.ray_address()
    asked = ["--name", name, "--address", address, "--dir", str(folder)]
    server = runs.start_command(["headrace.cli", "pool", "start", *asked], folder)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "server.json").exists():
            assert server.poll() is None and time.monotonic() < deadline, server.communicate(timeout=5)[0]
            time.sleep(0.1)
        yield SharedPool(folder, name)
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, "stopping is how a pool ends"
    finally:
        server.kill()
        server.communicate()
