"""Runs the ranks of a benchmark in separate processes, and ends them if the benchmark is interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

_LOOK_S = 0.25
_END_S = 10.0
"""Seconds that a process has to end after it was asked to end."""


def run_ranks(run: Callable[..., None], task: Any, world: int, notes: Path, tell: Callable[[str], None]) -> None:
    """Call `run(rank, task)` in `world` processes and wait for them. Raises an exception of torch if one fails.

    notes: file to which rank 0 appends lines of JSON (`records.note`) during the run. `tell` gets the `phase` of each
    line that has one.
    """
    offset = notes.stat().st_size if notes.exists() else 0
    context = spawn(run, args=(task,), nprocs=world, join=False)
    assert context is not None, "spawn returns it unless it joins"
    try:
        while not context.join(_LOOK_S):
            offset = _tell_phases(notes, offset, tell)
        _tell_phases(notes, offset, tell)
    finally:
        processes = [process for process in context.processes if process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


def _tell_phases(notes: Path, offset: int, tell: Callable[[str], None]) -> int:
    """Report the phases that a file has after `offset`. Returns the offset after the file's last complete line."""
    if not notes.exists():
        return offset
    with notes.open("rb") as file:
        file.seek(offset)
        whole = file.read().rpartition(b"\n")[0]
    for line in whole.splitlines():
        if "phase" in (found := json.loads(line)):
            tell(found["phase"])
    return offset + len(whole) + (1 if whole else 0)
