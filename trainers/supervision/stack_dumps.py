"""Stacks on demand: a process writes what its threads are doing into a file when another sends it SIGUSR1.

The signal's work is done in C (faulthandler), so that a process answers that hangs in native code, too. It needs
nothing but the standard library: actors import it.
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
"""Of the run's folder."""
SIGNAL = signal.SIGUSR1
SETTLE_S = 0.2
"""A file that has not grown for so long is taken for whole."""

_files: list[TextIO] = []
"""The one that is open; faulthandler keeps its descriptor only."""


def answer_with_stacks(folder: str | os.PathLike[str]) -> None:
    """Have this process answer the signal with its stacks, in the run's `folder`. Again: into another one."""
    path = stacks_path(folder, os.getpid())
    path.parent.mkdir(parents=True, exist_ok=True)
    _files.append(open(path, "w", encoding="utf-8"))  # noqa: SIM115 - open for as long as the signal may come
    faulthandler.register(SIGNAL, _files[-1], all_threads=True)
    while len(_files) > 1:
        _files.pop(0).close()


def stop_answering() -> None:
    """The signal is as deadly as ever. Idempotent."""
    faulthandler.unregister(SIGNAL)
    while _files:
        _files.pop().close()


def stacks_path(folder: str | os.PathLike[str], pid: int) -> Path:
    """Where a process of the run in `folder` writes its stacks."""
    return Path(folder) / FOLDER / f"{pid}.txt"


def collect_stacks(folder: str | os.PathLike[str], pids: Mapping[str, int], timeout_s: float) -> dict[str, str]:
    """Stacks by name of those of `pids` (name -> pid, of this host) that answer; the others have a line that says why
    there are none. Waits `timeout_s` at most for all of them together."""
    asked: dict[str, tuple[Path, int]] = {}
    found: dict[str, str] = {}
    for name, pid in pids.items():
        path = stacks_path(folder, pid)
        # Who has not asked for the signal would die of it.
        if not path.exists() or not is_caught(pid, SIGNAL):
            found[name] = "none: the process is gone, or does not answer the signal for it"
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
    """Remove the files; those that processes have open vanish with them. Idempotent."""
    shutil.rmtree(Path(folder) / FOLDER, ignore_errors=True)


def is_caught(pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal; False when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)
