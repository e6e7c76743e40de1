"""Rebuilds report.html while a run goes on, in a process of low priority, so that the run does not wait for plots."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

CLOSE_S = 10.0
"""Seconds that a build may take to end once it is asked to; then it is killed."""
_PRIORITY = 15
"""Increment of the niceness of a build."""


class LiveReport:
    """Starts builds of a run's report in child processes, one at a time."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """folder: the run folder. every_s: seconds between the starts of two builds, the first of which comes that long
        after the start of the run; 0 for none."""
        self._command = [sys.executable, "-m", "headrace.cli", "report", str(folder)]
        self._every_s = every_s
        self._last_s = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    def tick(self) -> None:
        """Start a build if one is due and none is running. Called after each step."""
        if not self._every_s or time.monotonic() - self._last_s < self._every_s:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._last_s = time.monotonic()
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY)

    def close(self) -> None:
        """End a build that is running, and wait until its process has exited. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
