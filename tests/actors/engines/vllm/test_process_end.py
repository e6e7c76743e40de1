"""Tests of how the end of a process is reported; no vLLM is needed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

from headrace.actors.engines.vllm import start as process_end
from headrace.actors.engines.vllm.start import exit_code, exit_words, lives


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
    _wait_until_ended(process)
    assert exit_code(started, process) == -signal.SIGKILL


@pytest.mark.processes
@pytest.mark.parametrize("stored", [True, False])
def test_the_exit_code_is_found_while_another_thread_takes_it(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    """The other thread has the exit code from the operating system, and stores it 50 ms later or never."""
    monkeypatch.setattr(process_end, "PATIENCE_S", 60.0 if stored else 0.1)
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


def _wait_until_ended(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while lives(process):
        assert time.monotonic() < deadline
        time.sleep(0.001)
