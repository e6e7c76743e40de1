"""The wait for the nodes of a job ends when all are there, or with the names of those that are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.tests.process_pool import ray_address


@pytest.mark.processes
def test_a_node_that_does_not_join_is_missed() -> None:
    address = ray_address()
    wait = [sys.executable, "-m", "headrace.trainers.jobs.joined_nodes", address]
    waits = [
        subprocess.Popen([*wait, nodes, seconds], stderr=subprocess.PIPE, text=True)
        for nodes, seconds in (("1", "60"), ("2", "3"))
    ]
    (_, none), (_, said) = (process.communicate(timeout=90) for process in waits)
    assert [process.returncode for process in waits] == [0, 1], none
    [sentence] = said.splitlines()
    assert sentence.startswith(f"headrace: 1 of 2 nodes joined Ray at {address} within 3 s, expected all: ")
