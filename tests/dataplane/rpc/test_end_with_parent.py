"""A Ray actor ends with the raylet that has started it, and so does all that it has started."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

ACTOR = """
import subprocess, sys, time
from headrace.dataplane.rpc.child_process import end_with_parent
end_with_parent()
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""
RAYLET = """
import subprocess, sys
actor = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(actor.pid, actor.stdout.readline(), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_an_actor_and_its_children_end_with_the_raylet() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RAYLET, ACTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as raylet:
        assert raylet.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in raylet.stdout.readline().split()]
        assert all(process.is_running() for process in processes)
        raylet.kill()
        _, alive = psutil.wait_procs(processes, timeout=30)
    for process in alive:
        if process.status() != psutil.STATUS_ZOMBIE:
            process.kill()
            raise AssertionError(f"{process} outlived its raylet")
