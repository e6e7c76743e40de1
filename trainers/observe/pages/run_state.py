"""Says whether a run is under way, finished, interrupted or failed, from the files in its folder."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..metrics import Record, end_of

_ERROR = re.compile(r"^(?:\w+\.)*(\w+: .*)")
_MAX_SENTENCE = 400


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run, for the top of its page."""

    kind: str
    """One of `finished`, `running`, `interrupted`, `failed`."""
    text: str
    """Sentence for readers, without a full stop."""
    detail: str = ""
    """Error of a run that has failed, else ""."""
    age_s: float = 0.0
    """Seconds since the run wrote its last figures."""


def run_state(folder: Path, step: int, num_steps: int | None, events: Sequence[Record]) -> RunState:
    """Return the state of the run in `folder`. step: last step with metrics. num_steps: steps of the whole run; None if
    this is not known. events: events of metrics.jsonl, in the order of the file."""
    steps = f"step {step} of {num_steps}" if num_steps else f"step {step}"
    end = end_of(events)
    if end is not None and end["step"] == step:
        early = end.get("stopped")
        return RunState("finished", f"ended early at {steps}: {early}" if early else f"finished, {step} steps")
    written_s = _modified_s(folder / "metrics.jsonl")
    age_s = max(0.0, time.time() - written_s) if written_s else 0.0
    last = f" (last write {datetime.datetime.fromtimestamp(written_s):%Y-%m-%d %H:%M})" if written_s else ""
    if is_open(folder):
        return RunState("running", f"running, {steps}{last}", age_s=age_s)
    detail = _error(folder)
    if detail:
        return RunState("failed", f"failed at {steps}{last}", detail, age_s)
    return RunState("interrupted", f"interrupted at {steps}{last}", age_s=age_s)


def is_open(folder: Path) -> bool:
    """Return whether a process of this machine has the run in `folder` open. Takes no lock, which would make the start
    of a run fail at the same moment."""
    lock = folder / "run.lock"
    try:
        status, pid = lock.stat(), int(lock.read_text().strip() or 0)
    except (OSError, ValueError):
        return False
    try:
        files = psutil.Process(pid).open_files() if pid > 0 else []
        return any(_same(file.path, status.st_ino, status.st_dev) for file in files)
    except psutil.AccessDenied:
        return True  # The process of another user lives, and its files cannot be seen.
    except psutil.Error:
        return False


def _same(path: str, inode: int, device: int) -> bool:
    try:
        found = Path(path).stat()
    except OSError:
        return False
    return (found.st_ino, found.st_dev) == (inode, device)


def _modified_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _error(folder: Path) -> str:
    """Return the error that ended the run as one line; "" if the folder has none."""
    try:
        lines = (folder / "error.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "the watchdog ended it, see watchdog.txt" if (folder / "watchdog.txt").exists() else ""
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    found = (errors or lines or ["see error.txt"])[-1]
    return found if len(found) <= _MAX_SENTENCE else f"{found[:_MAX_SENTENCE]}..."
