"""Tests of the start of vLLM's engine process: the log of its output, the report of its end, and the standby.

No vLLM is needed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.vllm import start
from headrace.actors.engines.vllm.start import (
    MAX_BYTES,
    CoreLog,
    EngineStandby,
    exit_code,
    exit_words,
    lives,
    start_ahead,
    take_standby,
)
from headrace.tests.actors.engines.vllm.builder import build, save_model
from headrace.tests.waiting import wait_until

START_FAILED = """\
(EngineCore pid=7) ERROR 11-23 07:15:22 [core.py:1170] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-23 07:15:22 [core.py:1170] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 07:15:22 [core.py:1170]   File "/vllm/v1/core/kv_cache_utils.py", line 879, in check
(EngineCore pid=7) ERROR 11-23 07:15:22 [core.py:1170]     raise ValueError(
(EngineCore pid=7) ERROR 11-23 07:15:22 [core.py:1170] ValueError: No available memory for the cache blocks.
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7) ValueError: No available memory for the cache blocks.
"""
WORKER_FAILED = """\
\x1b[36m(Worker_TP1 pid=9)\x1b[0;0m ERROR 11-23 07:15:22 [multiproc_executor.py:870] WorkerProc failed to start.
(Worker_TP1 pid=9) ERROR 11-23 07:15:22 [multiproc_executor.py:870] torch.OutOfMemoryError: CUDA out of memory.
(EngineCore pid=7) ERROR 11-23 07:15:23 [core.py:1170] Exception: WorkerProc initialization failed due to an exception \
in a background process. See stack trace for root cause.
(EngineCore pid=7) resource_tracker: There appear to be 2 leaked semaphore objects to clean up at shutdown
"""
WORKER_KILLED = """\
(EngineCore pid=7) ERROR 11-23 07:20:42 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit \
code: -9), shutting down executor.
(EngineCore pid=7) ERROR 11-23 07:20:42 [core.py:1368] EngineCore encountered a fatal error.
(EngineCore pid=7) RuntimeError: cancelled
"""
PATIENCE_S = 60.0
START = """
import sys
from headrace.actors.engines.vllm.start import EngineStandby

if __name__ == "__main__":
    print(EngineStandby(()).pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("text", "exception", "last"),
    [
        (START_FAILED, "ValueError: No available memory for the cache blocks.", None),
        (WORKER_FAILED, "torch.OutOfMemoryError: CUDA out of memory.", "resource_tracker: There appear"),
        ("[W1123 07:15:49.28 utils.cpp:68] Warning: NUMA\n\n", "", "Warning: NUMA"),
        (
            WORKER_KILLED,
            "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
            "RuntimeError: cancelled",
        ),
        ("AssertionError\n", "AssertionError", "AssertionError"),
    ],
)
def test_the_exception_that_points_to_no_other_is_found(text: str, exception: str, last: str | None) -> None:
    log = CoreLog()
    with log.capture():
        os.write(2, text.encode())
    assert log.exception() == exception
    assert log.last_line().startswith(last or exception)
    log.close()


@pytest.mark.processes
def test_processes_started_inside_keep_the_file_and_this_one_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = CoreLog(str(tmp_path / "run" / "engines" / "engine-0.log"))
    code = "import sys; sys.stdin.read(); print('late words', flush=True); raise KeyError('k')"
    with log.capture():
        os.write(1, b"of the start\n")
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    os.write(1, b"afterwards\n")
    child.communicate()
    written = Path(log.path).read_text()
    assert "of the start" in written and "late words" in written and "afterwards" not in written
    assert capfd.readouterr().out == "afterwards\n"
    assert log.exception() == "KeyError: 'k'" and log.path in log.hint
    log.close()


def test_another_engine_continues_the_file_and_reads_only_its_own_lines(tmp_path: Path) -> None:
    path = str(tmp_path / "engine-0.log")
    for number in range(2):
        log = CoreLog(path)
        with log.capture():
            os.write(1, f"ValueError: of engine {number}\n".encode() if number == 0 else b"all is well\n")
        log.close()
    log = CoreLog(path)
    assert log.exception() == "" and log.last_line() == ""
    log.close()
    written = Path(path).read_text()
    assert written.count("starts an engine") == 3 and "of engine 0" in written and "all is well" in written


def test_the_file_stays_small_and_its_writers_go_on_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.log"
    log = CoreLog(str(path))
    line = b"x" * 99 + b"\n"
    with log.capture():
        for number in range(40):
            os.write(1, line * (MAX_BYTES // 2000) + f"part {number}\n".encode())
            log.trim()
            assert path.stat().st_size <= MAX_BYTES * 1.1
        os.write(2, b"RuntimeError: the end\n")
    written = path.read_bytes()
    assert (
        written.startswith(b"--- older lines were dropped\n") and b"part 39\n" in written and b"part 0\n" not in written
    )
    assert b"\0" not in written, "writers would leave a hole if they did not append"
    assert log.exception() == "RuntimeError: the end"
    log.close()
    log.close()


def test_how_a_process_ended_is_told_in_words() -> None:
    assert exit_words(-9) == "it was ended by SIGKILL"
    assert exit_words(1) == "it ended with exit code 1"
    assert exit_words(None) == "it is gone"
    assert exit_words(-200) == "it was ended by signal 200"


@pytest.mark.processes
def test_a_process_that_runs_has_no_exit_code_and_one_that_was_killed_has_its_signal() -> None:
    started, process = _child()
    assert lives(process) and exit_code(started, process) is None
    started.kill()
    wait_until(lambda: not lives(process), timeout_s=60)
    assert exit_code(started, process) == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.parametrize("stored", [True, False])
def test_the_exit_code_is_found_while_another_thread_takes_it(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """The other thread has the exit code from the operating system, and stores it 50 ms later or never."""
    monkeypatch.setattr(start, "PATIENCE_S", 60.0 if stored else 0.1)
    started, process = _child()
    started.kill()
    handle: Any = started._popen  # type: ignore[attr-defined]
    _, status = os.waitpid(process.pid, 0)
    assert started.exitcode is None and not lives(process)
    thread = threading.Timer(0.05, lambda: setattr(handle, "returncode", os.waitstatus_to_exitcode(status)))
    if stored:
        thread.start()
    assert exit_code(started, process) == (-signal.SIGKILL if stored else None)
    handle.returncode = -signal.SIGKILL


def _child() -> tuple[BaseProcess, psutil.Process]:
    started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    started.start()
    return started, psutil.Process(started.pid)


def tell(path: Path, **named: Any) -> None:
    """Run in a standby."""
    print("told", os.environ["HEADRACE_TOLD"], named, flush=True)
    path.write_text(str(os.getpid()))


def expect_end(pid: int) -> None:
    try:
        psutil.Process(pid).wait(PATIENCE_S)
    except psutil.NoSuchProcess:
        pass


@pytest.mark.processes
def test_a_standby_runs_what_it_is_told_with_the_environment_and_outputs_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = EngineStandby(())
    monkeypatch.setenv("HEADRACE_TOLD", "later")
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    saved = os.dup(1)
    try:
        os.dup2(log, 1)
        process = one.run(tell, "Told", {"path": tmp_path / "pid", "rank": 3})
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(log)
    assert process is not None and process.name == "Told"
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert (tmp_path / "pid").read_text() == str(process.pid) == str(one.pid)
    assert (tmp_path / "log").read_text() == "told later {'rank': 3}\n"


@pytest.mark.processes
def test_a_standby_that_cannot_get_the_arguments_ends() -> None:
    one = EngineStandby(())
    assert one.pid is not None and psutil.pid_exists(one.pid)
    assert one.run(tell, "Told", {"lock": multiprocessing.get_context("spawn").Lock()}) is None
    expect_end(one.pid)


@pytest.mark.processes
@pytest.mark.parametrize("end", ["returns", "killed"])
def test_a_standby_ends_with_the_process_that_started_it(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert psutil.pid_exists(pid)
        if end == "killed":
            parent.kill()
        parent.stdin.close()
        assert parent.wait(PATIENCE_S) == (-signal.SIGKILL if end == "killed" else 0)
    expect_end(pid)


@pytest.mark.processes
def test_only_the_first_caller_gets_the_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "EngineStandby", lambda: threading.Event())
    start_ahead()
    first = take_standby()
    assert isinstance(first, threading.Event) and take_standby() is None


@pytest.mark.processes
@pytest.mark.vllm
@pytest.mark.parametrize("lives", [True, False])
def test_vllms_engine_process_is_the_standby_if_that_lives(tmp_path: Path, lives: bool) -> None:
    start_ahead()
    assert start._standby is not None and (pid := start._standby.pid) is not None
    if not lives:
        os.kill(pid, signal.SIGKILL)
        expect_end(pid)
    log = tmp_path / "engine.log"
    engine = build(save_model(tmp_path / "model", "tied"), log=str(log), options={"max_num_batched_tokens": 512})

    async def main() -> None:
        assert (engine.pids[0] == pid) is lives
        [one] = await engine.generate("one", [5, 6, 7], SamplingParams(max_new_tokens=4))
        assert len(one.token_ids) > 0
        os.kill(engine.pids[0], signal.SIGKILL)
        for _ in range(int(PATIENCE_S / 0.05)):
            if engine.died:
                break
            await asyncio.sleep(0.05)
        assert f"(pid {engine.pids[0]}): it was ended by SIGKILL" in engine.died
        await engine.close()

    asyncio.run(main())
