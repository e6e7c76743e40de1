"""Functions that tell whether a process of vLLM lives, and how one ended."""

from __future__ import annotations

import signal
import time
from multiprocessing.process import BaseProcess

import psutil

PATIENCE_S = 1.0
"""Longest time in seconds for which `exit_code` waits until another thread has stored the exit code."""


def lives(process: psutil.Process) -> bool:
    """Return whether the process runs. One that has ended, and whose exit code was not collected yet, does not."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def exit_code(started: BaseProcess, process: psutil.Process) -> int | None:
    """Return the exit code of a child process, negative for a signal. Returns None if the process runs or its exit code
    is unknown.

    A thread of vLLM waits for the same child. While that thread takes the exit code from the operating system and has
    not stored it yet, `started.exitcode` is None although the child has ended. This function then waits for the code,
    for at most PATIENCE_S.
    """
    deadline = time.monotonic() + PATIENCE_S
    while (code := started.exitcode) is None and not lives(process) and time.monotonic() < deadline:
        time.sleep(0.001)
    return code


def exit_words(code: int | None) -> str:
    """Return how a process ended, in words. code: as in `multiprocessing`, negative for a signal; None if it is not
    known."""
    if code is None:
        return "it is gone"
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was ended by signal {-code}"
