"""Tests that the report is rebuilt beside the run when it is due, one build at a time, and that none outlives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from headrace.trainers.observe import report as live_report
from headrace.trainers.observe.report import LiveReport


def test_builds_come_by_time_and_never_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    now, started = [0.0], list[float]()

    def gone(pid: int) -> psutil.Process:
        raise psutil.NoSuchProcess(pid)

    class Build:
        pid = 1

        def __init__(self, *arguments: object, **keys: object) -> None:
            started.append(now[0])

        def poll(self) -> int | None:
            return None if now[0] < started[-1] + 150 else 0

    monkeypatch.setattr(live_report.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(live_report.subprocess, "Popen", Build)
    monkeypatch.setattr(live_report.psutil, "Process", gone)
    often, never = LiveReport(Path("run"), 100.0), LiveReport(Path("run"), 0.0)
    for at in range(0, 500, 10):
        now[0] = at
        often.tick()
        never.tick()
    assert started == [100, 250, 400], "a slow build delays the next one"


@pytest.mark.processes
def test_a_build_that_is_running_ends_with_the_run(tmp_path: Path) -> None:
    report = LiveReport(tmp_path, 1e-9)
    report._command = [sys.executable, "-c", "import time; time.sleep(60)"]
    time.sleep(0.01)
    report.tick()
    assert report._process is not None
    process = psutil.Process(report._process.pid)
    report.close()
    report.close()
    assert not process.is_running()
