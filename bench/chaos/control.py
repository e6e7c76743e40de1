"""The control folder, through which the benchmark orders faults inside a run's processes and they note what they do.

`orders/{pid}.json` is the newest order to a process. `notes/{pid}.jsonl` is what it has noted, a JSON object a line,
each with the key `t`, `time.monotonic` in seconds, which all processes of a host share.
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
"""Environment variable that names the control folder. Without it the hook does nothing."""
Note = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """A fault that a process is to suffer."""

    number: int
    """Number of the order, by which a process tells a new one, and by which its notes name it."""
    kind: str
    """`cut`, `disk`, `shm`, `slow_store` or `slow_checkpoint`."""
    lasts_s: float
    """Seconds for which the fault lasts from the first time that it strikes. A cut strikes once."""
    waits_s: float
    """Seconds within which it must strike, else it is over."""
    delay_s: float = 0.0
    """Seconds that a slow call takes longer."""
    folder: str = ""
    """Run folder, whose disk is full or slow."""
    ports: tuple[int, ...] = ()
    """TCP ports of the data plane, whose connections are cut beside those of the directory's Unix socket."""


class Control:
    """One control folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders = folder / "orders"
        self._notes = folder / "notes"
        self._descriptors: dict[int, int] = {}
        """Descriptor of the notes of a process, by its pid: a forked process must not use its parent's."""

    def create(self) -> None:
        """Make the folders."""
        for folder in (self._orders, self._notes):
            folder.mkdir(parents=True, exist_ok=True)

    def order(self, pid: int, order: Order) -> None:
        """Give an order to a process; it replaces the one of before."""
        draft = self._orders / f"{pid}.new"
        draft.write_text(json.dumps(asdict(order)), encoding="utf-8")
        draft.rename(self._orders / f"{pid}.json")

    def newest_order(self, pid: int) -> Order | None:
        """Return the newest order to a process; None when it has none."""
        try:
            said = json.loads((self._orders / f"{pid}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return Order(**{**said, "ports": tuple(said["ports"])})

    def note(self, **what: Any) -> None:
        """Append a note of this process. It is whole, or missing when the process is killed meanwhile."""
        pid = os.getpid()
        if pid not in self._descriptors:
            path = self._notes / f"{pid}.jsonl"
            self._descriptors[pid] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        line = json.dumps({"t": time.monotonic(), **what}, separators=(",", ":"))
        os.write(self._descriptors[pid], line.encode() + b"\n")

    def notes(self) -> list[Note]:
        """Return the notes of all processes so far, in the order of time, each with its `pid`."""
        found = [note for path in sorted(self._notes.glob("*.jsonl")) for note in _read(path)]
        return sorted(found, key=lambda note: note["t"])


class NotesTail:
    """Reads what was noted since the last look."""

    def __init__(self, control: Control) -> None:
        self._folder = control.folder / "notes"
        self._read: dict[Path, int] = {}

    def new(self) -> list[Note]:
        """Return the new notes, in the order of time."""
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
