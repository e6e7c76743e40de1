"""Tests of process groups: a process that leaves one may end at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

LEAVES_AND_ENDS = """
import torch
from headrace.actors.rendezvous_store import RendezvousServer, RendezvousStore
from headrace.actors.weights.transports.rendezvous import Group

server = RendezvousServer("127.0.0.1", b"key")
store = RendezvousStore("127.0.0.1", server.port, b"key", 20.0)
group = Group(store, "alone", 0, 1, host="127.0.0.1", device=torch.device("cpu"), timeout_s=20.0)
assert group.broadcast(torch.zeros(8, dtype=torch.uint8)).ended(20.0)
group.leave()
"""


def test_a_process_that_has_left_its_group_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_AND_ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
