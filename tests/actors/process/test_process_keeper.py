"""Tests that what a user's process has started ends with it, whoever ends first."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.actors.process.process_keeper import kept_command
from headrace.actors.process.user_function_timeouts import UserFunctionFailed, UserProcesses
from headrace.tests.waiting import wait_until

pytestmark = pytest.mark.processes

FUNCTIONS = """
import os, subprocess, sys, time

def run(folder):
    "Start a process, one in a session of its own, and one that has no parent any more; then hang."
    notes_its_pid = "import os, sys, time; open(sys.argv[1] + '/' + str(os.getpid()), 'w'); time.sleep(600)"
    sleep = [sys.executable, "-S", "-c", notes_its_pid, folder]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if not os.fork():
        subprocess.Popen(sleep, start_new_session=True)
        os._exit(0)
    while len(os.listdir(folder)) < 3:
        time.sleep(0.01)
    open(folder + "/all", "w").close()
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "functions_that_start.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    pids = tmp_path / "pids"
    pids.mkdir()
    yield pids
    for process in started(pids):
        process.kill()


def started(folder: Path) -> list[psutil.Process]:
    """Return the processes that the function has started and that are alive."""
    found = []
    for pid in (int(path.name) for path in folder.iterdir() if path.name != "all"):
        try:
            process = psutil.Process(pid)
            if str(folder) in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def call_that_hangs(processes: UserProcesses, folder: Path) -> asyncio.Task[object]:
    call = asyncio.create_task(processes.call([str(folder)], 600.0))
    while not (folder / "all").exists():
        await asyncio.sleep(0.01)
    assert len(started(folder)) == 3
    return call


@pytest.mark.parametrize("end", ["cancelled", "killed"])
def test_what_a_function_has_started_ends_with_its_process(folder: Path, end: str) -> None:
    async def main() -> None:
        processes = UserProcesses("functions_that_start:run", {}, 1)
        call = await call_that_hangs(processes, folder)
        if end == "cancelled":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:  # as the kernel does when memory runs out
            [relay] = processes._all
            psutil.Process(relay.pid).children()[0].children()[0].kill()
            with pytest.raises(UserFunctionFailed, match="the process of 'run' died"):
                await call
        assert started(folder) == [] and not processes._all

    asyncio.run(main())


ACTOR = """
import asyncio, sys
from pathlib import Path
from headrace.actors.process.user_function_timeouts import UserProcesses
asyncio.run(UserProcesses("functions_that_start:run", {}, 1).call([sys.argv[1]], 600.0))
"""


@pytest.mark.parametrize("victim", ["actor", "its direct child"])
def test_what_a_function_has_started_ends_with_the_actor(folder: Path, victim: str) -> None:
    paths = os.pathsep.join([str(folder.parent), *sys.path])
    actor = subprocess.Popen([sys.executable, "-c", ACTOR, str(folder)], env={**os.environ, "PYTHONPATH": paths})
    try:
        wait_until(lambda: (folder / "all").exists(), timeout_s=60.0)
        if victim != "actor":  # as Ray does with the children of a worker that it ends
            [relay] = psutil.Process(actor.pid).children()
            relay.kill()
        os.kill(actor.pid, signal.SIGKILL)
        wait_until(lambda: not started(folder), timeout_s=10.0)
    finally:
        actor.kill()
        actor.wait()


def test_a_kept_command_keeps_its_input_output_and_end() -> None:
    lines = "import sys; print(sys.stdin.read().upper()); sys.exit(3)"
    done = subprocess.run(kept_command(sys.executable, "-c", lines), input="said", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "SAID\n", "")
    by_signal = subprocess.run(kept_command(sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"))
    assert by_signal.returncode == -signal.SIGTERM
    missing = subprocess.run(kept_command("/no/such/command"), capture_output=True, text=True)
    assert missing.returncode == 127 and "/no/such/command cannot be run" in missing.stderr
