"""Settings of an actor's process: the memory that it keeps, and what its garbage collector looks at."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FAULTS = """
import resource, sys
import numpy as np
from headrace.actors.process.own_process import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()

def step():
    for _ in range(4):
        [np.ones(1 << 18) for _ in range(4)]  # 2 MiB each, freed together

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SETTLED = """
import gc
from headrace.actors.process.own_process import settle
class Node:
    pass
made = [Node() for _ in range(1000)]
lost = Node()
lost.itself = lost
looked_at = len(gc.get_objects())
del lost
settle()
assert gc.get_freeze_count() > looked_at / 2, (gc.get_freeze_count(), looked_at)
assert len(gc.get_objects()) < looked_at / 10, (len(gc.get_objects()), looked_at)
gc.unfreeze()
assert sum(isinstance(one, Node) for one in gc.get_objects()) == 1000  # garbage is not kept
"""


def run(code: str, *arguments: str) -> str:
    """Run `code` in a process of its own, which it changes."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc's allocator")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    kept, given_back = (int(run(FAULTS, mode)) for mode in ("kept", "given back"))
    assert kept < 100 < 1000 < given_back


def test_what_exists_when_a_process_has_settled_is_not_looked_at_again() -> None:
    run(SETTLED)
