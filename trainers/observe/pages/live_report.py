"""Rebuilds a run's report while the run is in progress, in a process of low priority, so that the run does not wait."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

_log = logging.getLogger(__name__)
CLOSE_S = 10.0
"""Seconds within which a build must end after it is terminated; then it is killed."""
_PRIORITY = 15
"""Increment of the niceness of the process that builds the report."""


class LiveReport:
    """Starts builds of a run's report in child processes, one at a time."""

    def __init__(self, folder: Path, every_s: float) -> None:
        """folder: the run folder. every_s: seconds between the starts of two builds, and before the first build; 0 for
        no builds."""
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
        try:
            self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)
        except OSError as error:  # The run goes on, and the next build is tried in its turn.
            _log.warning("the report is not built: %s", error)
            return
        with contextlib.suppress(psutil.Error):
            psutil.Process(self._process.pid).nice(os.getpriority(os.PRIO_PROCESS, 0) + _PRIORITY)

    def close(self) -> None:
        """End a running build, and wait until its process has exited. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
