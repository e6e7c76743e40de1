"""Makes processes write the stacks of their threads into a file on SIGUSR1, and collects these files.

The signal handler is written in C (faulthandler), so that a process that hangs in native code answers too. The module
needs only the standard library, because actors import it.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

FOLDER = "stacks"
"""Name of the folder of stack files in the run's folder."""
SIGNAL = signal.SIGUSR1
SETTLE_S = 0.2
"""Seconds for which a stack file must not have grown before it is considered complete."""

_files: list[TextIO] = []
"""The open stack file. It must stay referenced, because faulthandler keeps only its descriptor."""


def answer_with_stacks(folder: str | os.PathLike[str]) -> None:
    """Install a handler of SIGUSR1 that writes the stacks of this process's threads to a file in the run's `folder`. A
    later call replaces the folder."""
    path = stacks_path(folder, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.append(open(path, "w", encoding="utf-8"))
    faulthandler.register(SIGNAL, _files[-1], all_threads=True)
    while len(_files) > 1:
        _files.pop(0).close()


def stop_answering() -> None:
    """Remove the handler of SIGUSR1, so that the signal ends the process again. Idempotent."""
    faulthandler.unregister(SIGNAL)
    while _files:
        _files.pop().close()


def stacks_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Return the file that process `pid` of the run in `folder` writes its stacks to."""
    return Path(folder) / FOLDER / f"{pid}.txt"


def collect_stacks(folder: str | os.PathLike[str], pids: Mapping[str, int], timeout_s: float) -> dict[str, str]:
    """Ask processes of this host for their stacks, and return name -> stacks. pids: name -> pid.

    For a process that does not answer, the text says why. Waits at most `timeout_s` for all processes together.
    """
    asked: dict[str, tuple[Path, int]] = {}
    found: dict[str, str] = {}
    for name, pid in pids.items():
        path = stacks_path(folder, pid)
        # The signal would end a process that has no handler for it.
        if not path.exists() or not is_caught(pid, SIGNAL):
            found[name] = "none: the process is gone or does not handle the signal"
            continue
        asked[name] = path, path.stat().st_size
        os.kill(pid, SIGNAL)
    deadline = time.monotonic() + timeout_s
    sizes: dict[str, int] = {}
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        before, sizes = sizes, {name: path.stat().st_size - start for name, (path, start) in asked.items()}
        if all(sizes.values()) and sizes == before:
            break
    for name, (path, start) in asked.items():
        text = path.read_bytes()[start:].decode(errors="replace").strip()
        found[name] = text or f"none: no answer to the signal within {timeout_s:g} s"
    return found


def remove_stacks(folder: str | os.PathLike[str]) -> None:
    """Remove all stack files of the run; open ones disappear when their processes close them. Idempotent."""
    shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)


def is_caught(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal; False when the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)
