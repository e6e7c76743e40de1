"""Measures the memory of a run's processes and of its shared memory over time, and tells whether it grows."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from .pairs import ProcessKind

SETTLED_S = 20.0
"""Age in seconds from which a process counts: before, it imports and allocates what it keeps."""
MOST_GROWTH = 1.10
"""Largest memory of the last third of a run, as a multiple of the first third's."""
SLACK_BYTES = 8 << 20
"""Growth that is never complained about: pools are this large."""
LEAST_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of one kind of process, or of /dev/shm, early and late in a run, in bytes."""

    what: str
    early: float
    late: float

    @property
    def flat(self) -> bool:
        return self.late <= max(MOST_GROWTH * self.early, self.early + SLACK_BYTES)

    def __str__(self) -> str:
        return f"{self.what}: {self.early / 2**20:.1f} -> {self.late / 2**20:.1f} MiB"


class MemoryLog:
    """Samples of one run, which are also written to a file, a JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[str, list[float]] = defaultdict(list)

    def sample(self, processes: dict[ProcessKind, list[psutil.Process]], shared: list[Path]) -> None:
        """Take one sample: the largest resident memory of each kind's settled processes, and the bytes in /dev/shm."""
        found: dict[str, float] = {}
        if shared:  # else the run is just being started
            found["/dev/shm"] = sum(_disk_bytes(path) for path in shared)
        for kind, members in processes.items():
            sizes = [size for process in members if (size := _settled_bytes(process))]
            if sizes and kind != "raylet":  # Ray's own
                found[kind] = max(sizes)
        for what, size in found.items():
            self._sizes[what].append(size)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"t": time.monotonic(), **found}) + "\n")

    def growths(self) -> list[Growth]:
        """Return early and late medians of what has enough samples."""
        found = []
        for what, sizes in self._sizes.items():
            if len(sizes) >= LEAST_SAMPLES:
                third = len(sizes) // 3
                found.append(Growth(what, statistics.median(sizes[:third]), statistics.median(sizes[-third:])))
        return found


def _settled_bytes(process: psutil.Process) -> int:
    """Return the resident memory without shared pages; 0 of a process that is young or gone."""
    try:
        if time.time() - process.create_time() < SETTLED_S:
            return 0
        memory = process.memory_info()
        return memory.rss - memory.shared
    except psutil.NoSuchProcess:
        return 0


def _disk_bytes(path: Path) -> int:
    total = 0
    for file in [path, *path.rglob("*")]:
        try:
            total += file.stat().st_blocks * 512
        except OSError:
            continue
    return total
