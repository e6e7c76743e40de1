"""Tests the watchdog beside a driver that makes no progress, does not stop, or is killed, and what counts as ended."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from headrace.dataplane.block_store import StoreSpec
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.owned_folder import pid_space, process_start
from headrace.dataplane.rpc.frames import DirectoryAddress
from headrace.tests.process_pool import has_ended, zombie_with_a_thread
from headrace.trainers.config.load import build_config
from headrace.trainers.run.under_watchdog import StepSize, under_watchdog
from headrace.trainers.supervision import heartbeat
from headrace.trainers.supervision.cleanup import Family, is_running, kill_process
from headrace.trainers.supervision.heartbeat import Heartbeat, HeartbeatReader
from headrace.trainers.supervision.stuck_report import Opened, write_actors
from headrace.trainers.supervision.watchdog import Watchdog

pytestmark = pytest.mark.processes

DRIVER = """
import json, os, signal, subprocess, sys, threading
from headrace.trainers.supervision import heartbeat, stuck_report

folder, run_id, manner = sys.argv[1:]
signal.signal(signal.SIGUSR2, signal.default_int_handler)
child = [sys.executable, "-c", "import time; time.sleep(600)"]
stranger = subprocess.Popen(child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # the driver's, not the run's
memory = heartbeat.shared_memory()
beat = heartbeat.Heartbeat(memory, bound_s=0.2)
watchdog = subprocess.Popen(
    [sys.executable, "-m", "headrace.trainers.supervision.watchdog", str(memory), str(os.getpid()), folder,
     f"--strangers={stranger.pid}", "--margin-s=0.1", "--grace-s=1", "--groups=8", "--group-size=4"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory], start_new_session=True, text=True)
stuck_report.answer_with_stacks(folder)

def tell(said):
    watchdog.stdin.write(json.dumps(said) + "\\n")
    watchdog.stdin.flush()

beat.enter("starting", float("inf"))
member = subprocess.Popen(child, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(json.dumps([stranger.pid, watchdog.pid, member.pid]), flush=True)
nobody = f"headrace-{run_id}-nobody"
sys.stdin.readline()
tell({"run_id": run_id, "local": nobody, "host": "", "port": 0, "key": "00", "peer": "directory"})

def stand_still():
    beat.step(3)
    beat.enter("train")
    threading.Event().wait()

try:
    if manner == "ends":
        sys.stdin.read()
    elif manner == "is killed":
        beat.step(3)
        beat.enter("train", float("inf"))
        print("waiting", flush=True)
        threading.Event().wait()
    elif manner == "does not stop":
        signal.signal(signal.SIGUSR2, lambda *_: None)
        stand_still()
    else:
        stand_still()
except KeyboardInterrupt:
    print(watchdog.stdout.readline(), end="", flush=True)
member.kill()
member.wait()
tell({"end": True})
watchdog.wait()
"""


class Driver:
    """A driver that ends in the given manner, with a watchdog, a child of the run, and a child outside it."""

    def __init__(self, folder: Path, manner: str) -> None:
        self.folder = folder
        self.run_id = f"test{uuid.uuid4().hex[:8]}"
        self.shared_memory = Path(f"/dev/shm/headrace-{self.run_id}")
        self.shared_memory.mkdir()
        (self.shared_memory / "seg-0").write_bytes(b"rows")
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(folder), self.run_id, manner],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        pids = json.loads(self.line())
        self.stranger, self.watchdog, self.member = [psutil.Process(pid) for pid in pids]
        actors = [("train worker 0", _gone()), ("train worker 1", self.member.pid)]
        write_actors(folder, self.run_id, [(*actor, socket.gethostname(), pid_space()) for actor in actors])
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> tuple[str, str]:
        """Return the rest of both outputs, once the driver and its watchdog, which share standard error, are gone."""
        return self.process.communicate(timeout=120)

    @property
    def report(self) -> str:
        return (self.folder / "watchdog.txt").read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Driver]]:
    started: list[Driver] = []

    def start(manner: str) -> Driver:
        started.append(Driver(tmp_path, manner))
        return started[-1]

    yield start
    for driver in started:
        for process in (driver.process, driver.stranger, driver.member, driver.watchdog):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        driver.process.communicate()
        if driver.shared_memory.exists():
            (driver.shared_memory / "seg-0").unlink()
            driver.shared_memory.rmdir()


def test_a_stage_that_does_not_end_is_reported_once_and_the_run_is_told_to_stop(start: Callable[[str], Driver]) -> None:
    driver = start("stands still")
    told = driver.line()
    assert told.startswith("step 3, stage 'train': no progress for ") and "expected within 0.2 s" in told
    output, errors = driver.end()
    assert (driver.process.returncode, output) == (0, "")
    assert errors.count("step 3, stage 'train'") == 1
    report = driver.report
    assert "the directory does not answer: " in report
    assert "train worker 0" in report and "gone" in report
    assert "in stand_still" in report, "the driver's stack"
    assert report.endswith("The run stopped by itself when the watchdog asked it to.\n")
    assert driver.stranger.is_running() and driver.shared_memory.exists(), "the driver's own to end"


def test_a_driver_that_does_not_stop_is_killed_with_all_that_is_the_runs(start: Callable[[str], Driver]) -> None:
    driver = start("does not stop")
    _, errors = driver.end()
    assert driver.process.returncode == -signal.SIGKILL
    assert f"the driver (pid {driver.process.pid}) did not stop when the watchdog asked it to stop" in errors
    assert "in stand_still" in driver.report and f"(pid {driver.member.pid})" in driver.report
    assert not is_running(driver.member.pid) and not driver.shared_memory.exists()
    assert is_running(driver.stranger.pid)


def test_what_a_killed_driver_leaves_behind_is_ended(start: Callable[[str], Driver]) -> None:
    driver = start("is killed")
    assert driver.line() == "waiting\n"
    driver.process.kill()
    _, errors = driver.end()
    assert (
        f"the driver (pid {driver.process.pid}) ended without notice (last heartbeat: step 3, stage 'train'" in errors
    )
    assert f"(pid {driver.member.pid})" in driver.report and driver.shared_memory.name in driver.report
    assert not is_running(driver.member.pid) and not driver.shared_memory.exists()
    assert is_running(driver.stranger.pid)


def test_a_run_that_ends_takes_its_watchdog_along(start: Callable[[str], Driver]) -> None:
    driver = start("ends")
    _, errors = driver.end()
    assert (driver.process.returncode, errors) == (0, "")
    assert not driver.watchdog.is_running() and not (driver.folder / "watchdog.txt").exists()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()
        process.communicate()


def watchdog_of(memory: int, pid: int, folder: Path, margin_s: float = 1.0) -> Watchdog:
    return Watchdog(argparse.Namespace(descriptor=memory, pid=pid, folder=folder, strangers=[], margin_s=margin_s,
                                       grace_s=1, groups=1, group_size=1))  # fmt: skip


def test_a_run_that_somebody_has_suspended_does_not_stand_still(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    memory = heartbeat.shared_memory()
    Heartbeat(memory).enter("train")
    watchdog = watchdog_of(memory, other.pid, tmp_path)
    beat = HeartbeatReader(memory).read()
    os.close(memory)
    deadline = time.monotonic() + 60
    while watchdog.stood_s(beat) < 1 and time.monotonic() < deadline:
        pass
    assert watchdog.stood_s(beat) >= 1
    other.send_signal(signal.SIGSTOP)
    while psutil.Process(other.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        pass
    assert watchdog.stood_s(beat) < 1
    other.send_signal(signal.SIGCONT)


def test_a_watchdog_that_was_away_does_not_count_that_time(
    tmp_path: Path, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    memory = heartbeat.shared_memory()
    Heartbeat(memory).enter("train", 10.0)
    watchdog = watchdog_of(memory, other.pid, tmp_path)
    beat = HeartbeatReader(memory).read()
    os.close(memory)
    now_s[0] += 3600.0  # Both were stopped.
    assert not watchdog.is_stuck(beat)
    found = []
    for _ in range(12):
        now_s[0] += 1.0
        found.append(watchdog.is_stuck(beat))
    assert found[-1]


@pytest.mark.parametrize(("margin_s", "stuck"), [(1000.0, False), (0.0, True)])
def test_a_stage_has_a_margin_beyond_its_bound(
    tmp_path: Path, other: subprocess.Popen[bytes], margin_s: float, stuck: bool
) -> None:
    memory = heartbeat.shared_memory()
    beat = Heartbeat(memory)
    watchdog = watchdog_of(memory, other.pid, tmp_path, margin_s)
    beat.enter("train", 0.001)
    seen = HeartbeatReader(memory).read()
    os.close(memory)
    while watchdog.stood_s(seen) <= seen.bound_s:
        pass
    assert watchdog.is_stuck(seen) is stuck


def test_a_pid_that_another_process_has_now_is_not_hit(other: subprocess.Popen[bytes]) -> None:
    ticks = process_start(other.pid)
    assert ticks is not None
    family = Family(driver_pid=_gone())
    family.add([(other.pid, ticks - 1)])
    assert family.kill() == [] and is_running(other.pid)
    family.add([(other.pid, ticks)])
    [killed] = family.kill()
    assert f"(pid {other.pid})" in killed and not is_running(other.pid)


def test_a_process_that_was_seen_gone_is_not_signalled_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another's by now, and psutil does not look again."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen, sent = psutil.Process(process.pid), list[tuple[int, int]]()
    process.communicate()
    assert not seen.is_running()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    kill_process(seen)
    assert not sent


def _gone() -> int:
    """Return the pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("on", [True, False])
def test_a_run_has_a_watchdog_where_its_configuration_says_so(tmp_path: Path, on: bool) -> None:
    before, started = set(psutil.Process().children()), set()
    config = build_config({"run": {"dir": str(tmp_path)}, "resources": {"watchdog": on}})
    with (
        pytest.raises(RuntimeError, match="its own"),
        under_watchdog(config.resources, tmp_path, StepSize(32, 8)) as under,
    ):
        under.heartbeat.enter("train")
        started = set(psutil.Process().children()) - before
        assert len(started) == on and under.reason() is None
        raise RuntimeError("its own")
    assert not any(is_running(process.pid) for process in started)
    assert list(tmp_path.iterdir()) == []


def test_a_watchdog_that_died_is_replaced_and_told_what_the_first_one_knew(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    config = build_config({"run": {"dir": str(tmp_path)}})
    address = DirectoryAddress("headrace-nobody", "", 0)
    handle = DataPlaneHandle(
        "nobody", config.dataplane, StoreSpec("shm", "nobody", {}, key=b"\0"), "directory", address, "peer"
    )
    with under_watchdog(config.resources, tmp_path, StepSize(32, 8)) as under:
        under.opened(handle)
        [first] = set(psutil.Process().children()) - before
        under.replace_if_dead()
        assert set(psutil.Process().children()) - before == {first}, "it lives"
        first.kill()
        deadline = time.monotonic() + 60
        while set(psutil.Process().children()) - before <= {first}:
            under.replace_if_dead()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        [second] = set(psutil.Process().children()) - before - {first}
        assert under.reason() is None and is_running(second.pid)
        assert under._said == [asdict(Opened("nobody", "headrace-nobody", "", 0, "00", "peer"))]
    assert not is_running(first.pid) and not is_running(second.pid)


@pytest.mark.processes
def test_a_zombie_has_ended_with_its_last_thread() -> None:
    """Until then it keeps its files and its memory, on a GPU, too."""
    with zombie_with_a_thread() as child:
        assert process_start(child.pid) is not None and is_running(child.pid) and not has_ended(child.pid)
        child.communicate("end\n")
    assert process_start(child.pid) is None and not is_running(child.pid) and has_ended(child.pid)
