"""The hook notes what a process puts and reads, and makes its calls fail as it is ordered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.tests.drills.chaos.control import VARIABLE, Control
from headrace.tests.drills.chaos.hook import RUN_FOLDER, SITE

_PROCESS = """
import asyncio, errno, importlib, os, socket, sys, time
from pathlib import Path
import torch
from headrace.tests.drills.chaos.control import Control, Order
from headrace.tests.drills.chaos.faulty_calls import POLL_S
from headrace.tests.drills.chaos.hook import PATCHES
from headrace.actors.protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import connect, connect_async, open_data_plane

control, run = Control(Path(os.environ["HEADRACE_CHAOS"])), Path(os.environ["HEADRACE_CHAOS_RUN"])
for name in PATCHES:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "transferqueue" in str(error).lower(), error

def struck(number, kind, act, **more):
    control.order(os.getpid(), Order(number, kind, lasts_s=30.0, waits_s=30.0, **more))
    deadline = time.monotonic() + 30
    while not act():
        assert time.monotonic() < deadline, kind
        time.sleep(0.01)

def full():
    try:
        (run / "file").write_text("text")
    except OSError as error:
        return error.errno == errno.ENOSPC
    return False

file = open(run / "early", "ab")
torn = os.open(run / "torn", os.O_WRONLY | os.O_CREAT)
descriptor = os.open(run / "low", os.O_WRONLY | os.O_CREAT)
assert not full()
struck(1, "disk", full, folder=str(run))
assert os.write(torn, b"12345678") == 4, "a full disk takes a part first"
assert (run / "torn").read_bytes() == b"1234"
second = lambda: os.write(torn, b"5678")
for write in (second, lambda: (file.write(b"x"), file.flush()), lambda: os.write(descriptor, b"x")):
    try:
        write()
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("it was written")
(run.parent / "elsewhere").write_text("text")

listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0headrace-test-directory-" + str(os.getpid()))
listener.listen()
client = socket.socket(socket.AF_UNIX)
client.connect(listener.getsockname())
served, _ = listener.accept()
other, _end = socket.socketpair()
served.settimeout(0.01)

def cut():
    try:
        return served.recv(1) == b""
    except TimeoutError:
        return False

struck(2, "cut", cut)
other.send(b"x")
struck(3, "slow_store", lambda: True)
time.sleep(10 * POLL_S)  # the rows are put and read once, which must happen after the process has seen the order

async def rows(plane):
    async with connect_async(plane.handle) as writer:
        await writer.register("train", ROLLOUT_SCHEMA, ["train"], group_size=2)
        columns = {"input_ids": torch.int32, "response_mask": torch.uint8, "rollout_logprobs": torch.float32}
        from headrace.codecs.jagged import pack
        fields = {name: [torch.full((n,), 3, dtype=d) for n in (2, 3)] for name, d in columns.items()}
        batch = pack(ROLLOUT_SCHEMA.subset(list(columns)), fields)
        return await writer.put("train", ["0.0", "0.1"], batch, versions=0)

with open_data_plane(DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=4)), run_id=f"hook{os.getpid()}",
                     in_process=True) as plane:
    receipt = asyncio.run(rows(plane))
    connect(plane.handle).get(receipt)

from headrace.dataplane.stores.registry import store_entry

host = store_entry("shm").open_host(StoreConfig(kind="shm", capacity_mib=4), f"full{os.getpid()}", "")
assert host.allocate(1, 64) is not None and host.has_ready(64)
struck(4, "shm", lambda: not host.has_ready(64))
assert host.allocate(2, 64) is None and "No space left" in host.shortage()
host.close()
before = time.time()
struck(5, "clock", lambda: time.time() - before > 3000)
"""


@pytest.mark.processes
def test_a_process_notes_its_rows_and_suffers_what_it_is_ordered(tmp_path: Path):
    control, run, site = Control(tmp_path / "control"), tmp_path / "run", tmp_path / "site"
    control.create()
    run.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    paths = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    chaos = {VARIABLE: str(control.folder), RUN_FOLDER: str(run) + os.sep, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS], env={**os.environ, **chaos}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    notes = control.notes()
    [putting] = [note for note in notes if "putting" in note]
    [put] = [note for note in notes if "put" in note]
    [read] = [note for note in notes if "read" in note]
    assert putting["putting"] == read["read"], "the same bytes have the same digests"
    assert put["keys"] == read["keys"] == ["0.0", "0.1"] and put["plane"] == read["plane"]
    assert len(set(read["read"]["input_ids"])) == 2, "rows of two lengths"
    assert [note["struck"] for note in notes if "struck" in note] == [1, 2, 3, 4, 5]
