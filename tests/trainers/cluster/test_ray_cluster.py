"""A Ray that is started here waits for no port of another Ray on this host, and leaves signals to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import ray
from ray._private import ray_constants, services

from headrace.tests.process_pool import start_ray
from headrace.trainers.cluster.ray_cluster import Cluster, CpuDemand


@pytest.mark.processes
def test_the_agent_takes_any_free_port() -> None:
    start_ray()
    context = ray.get_runtime_context()
    node = services.get_node(context.gcs_address, context.get_node_id())
    assert node["dashboard_agent_listen_port"] not in (0, ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT)


def test_signals_are_handled_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes SIGTERM when it begins and leaves it without a handler when it ends."""
    started: list[bool] = []

    def ray_takes_it(**_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        started.append(True)

    monkeypatch.setattr(ray, "init", ray_takes_it)
    monkeypatch.setattr(ray, "shutdown", ray_takes_it)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 8.0})
    monkeypatch.setattr(ray, "nodes", list)
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        for address in (None, "127.0.0.1:1"):
            cluster = Cluster(
                address=address, num_cpus=1, demand=CpuDemand(0, 1, 0), namespace="signals", object_store_mib=128
            )
            os.kill(os.getpid(), signal.SIGTERM)
            cluster.close()
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM] * 4 and len(started) == 4


@pytest.mark.slow
@pytest.mark.processes
def test_sigterm_while_ray_runs_and_after_it() -> None:
    code = (
        "import os, signal\n"
        "from headrace.trainers.cluster.ray_cluster import Cluster, CpuDemand\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))\n"
        "cluster = Cluster(address=None, num_cpus=1, demand=CpuDemand(0, 1, 0), namespace='n', object_store_mib=128)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "cluster.close()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "told\ntold\n"), done.stderr
