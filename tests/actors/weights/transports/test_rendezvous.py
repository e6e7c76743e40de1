"""Groups made and left at will: a process that leaves one may end at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

LEAVES_AND_ENDS = """
import torch
from headrace.actors.weights.transports.control_link import listen
from headrace.actors.weights.transports.rendezvous import Group, RendezvousStore, join_store

point = RendezvousStore(listen("127.0.0.1"), 20.0)
store = join_store("127.0.0.1", point.port, 20.0)
group = Group(store, "alone", 0, 1, host="127.0.0.1", device=torch.device("cpu"), timeout_s=20.0)
assert group.broadcast(torch.zeros(8, dtype=torch.uint8)).ended(20.0)
group.leave()
"""


def test_a_process_that_has_left_its_group_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_AND_ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
