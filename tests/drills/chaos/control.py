"""The control folder of a chaos run, for the drill's orders to inject faults and for notes of the processes.

`orders/{pid}.json` holds the newest order to the process with this pid. `notes/{pid}.jsonl` holds the process's notes,
one JSON object per line. The key `t` of a note is its time in seconds by `time.monotonic()`, a clock that all processes
of a host share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HEADRACE_CHAOS"
"""Environment variable with the path of the control folder. If it is not set, the hook that every process loads
(`hook.py`) does nothing."""
Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """An order to one process to inject a fault into its own calls."""

    number: int
    """Number of the order. A process recognises a new order by it, and its notes refer to the order by it."""
    kind: str
    """Kind of the fault: `clock`, `cut`, `disk`, `shm`, `slow_store` or `slow_checkpoint` (explained in
    `faults.FAULTS`)."""
    lasts_s: float
    """Seconds from the fault's first effect to its end. A cut ignores this, because it takes effect once."""
    waits_s: float
    """Seconds within which the fault must have its first effect. If it has none by then, it is cancelled."""
    delay_s: float = 0.0
    """Seconds by which a slow-call fault delays each affected call."""
    folder: str = ""
    """Run folder in which writes to files fail or are slow; "" for faults that are not about files."""
    ports: tuple[int, ...] = ()
    """TCP ports of the data plane. A cut shuts down the connections to them, and those over the directory's Unix
    socket."""


class Control:
    """Gives orders to the processes of a run and records their notes, in one control folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders = folder / "orders"
        self._notes = folder / "notes"
        self._descriptors: dict[int, int] = {}
        """Open file descriptor of the notes file for each pid. A forked process thus opens its own file instead of
        using its parent's."""

    def create(self) -> None:
        """Create the folders for orders and notes. Idempotent."""
        for folder in (self._orders, self._notes):
            folder.mkdir(parents=True, exist_ok=True)

    def order(self, pid: int, order: Order) -> None:
        """Give an order to the process `pid`. It replaces any earlier order to that process."""
        draft = self._orders / f"{pid}.new"
        draft.write_text(json.dumps(asdict(order)), encoding="utf-8")
        draft.rename(self._orders / f"{pid}.json")

    def newest_order(self, pid: int) -> Order | None:
        """Return the newest order to the process `pid`; None if it has none."""
        try:
            said = json.loads((self._orders / f"{pid}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Order(**{**said, "ports": tuple(said["ports"])})

    def note(self, **what: Any) -> None:
        """Append a note (the current time and the keyword arguments) to the notes of this process. If the process is
        killed meanwhile, readers see either the whole note or none of it."""
        pid = os.getpid()
        if pid not in self._descriptors:
            path = self._notes / f"{pid}.jsonl"
            self._descriptors[pid] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line = json.dumps({"t": time.monotonic(), **what}, separators=(",", ":"))
        os.write(self._descriptors[pid], line.encode() + b"\n")

    def notes(self) -> list[Note]:
        """Return all notes written so far, in order of time. Each has the additional key `pid`, the process that wrote
        it."""
        found = [note for path in sorted(self._notes.glob("*.jsonl")) for note in _read(path)]
        return sorted(found, key=lambda note: note["t"])


class NotesTail:
    """Reads the notes of all processes step by step: each `new` returns those added since the last one."""

    def __init__(self, control: Control) -> None:
        self._folder = control.folder / "notes"
        self._read: dict[Path, int] = {}

    def new(self) -> list[Note]:
        """Return the notes that were added since the last call, in order of time. Each has the additional key `pid`,
        the process that wrote it."""
        found = []
        for path in self._folder.glob("*.jsonl"):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + end
            pid = int(path.stem)
            found += [{**json.loads(line), "pid": pid} for line in data[:end].splitlines()]
        return sorted(found, key=lambda note: note["t"])


def _read(path: Path) -> Iterator[Note]:
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # else the process was killed while it wrote
            yield {**json.loads(line), "pid": int(path.stem)}
