"""Tests of the file that keeps what vLLM's processes write, and of what is found in it; no vLLM is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.engines.vllm.start import MAX_BYTES, CoreLog

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
