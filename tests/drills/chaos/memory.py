"""Measures the memory of a run's processes and its files in /dev/shm over time, and tells whether it grows."""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.tests.drills.chaos.faults import ProcessKind

SETTLED_S = 20.0
"""Age in seconds from which a process is measured. Younger ones still import modules and allocate lasting memory."""
MOST_GROWTH = 1.10
"""Largest allowed ratio of the median memory in the last third of a run to the median in its first third."""
SLACK_BYTES = 8 << 20
"""Number of bytes by which memory may grow in any case, because memory pools are this large."""
LEAST_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory in bytes of one kind of process, or of /dev/shm, as medians over the first and the last third of a run."""

    what: str
    early: float
    late: float

    @property
    def flat(self) -> bool:
        return self.late <= max(MOST_GROWTH * self.early, self.early + SLACK_BYTES)

    def __str__(self) -> str:
        return f"{self.what}: {self.early / 2**20:.1f} -> {self.late / 2**20:.1f} MiB"


class MemoryLog:
    """Memory samples of one run. Each sample is also appended to a file as one line of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: dict[str, list[float]] = defaultdict(list)

    def sample(self, processes: dict[ProcessKind, list[psutil.Process]], shared: list[Path]) -> None:
        """Take one sample of the bytes in /dev/shm and of the largest resident memory of each kind of process. Shared
        pages do not count as resident. Raylets (Ray's own processes), and processes younger than SETTLED_S, are left
        out."""
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
        """Return the early and late medians of everything that has at least LEAST_SAMPLES samples."""
        found = []
        for what, sizes in self._sizes.items():
            if len(sizes) >= LEAST_SAMPLES:
                third = len(sizes) // 3
                found.append(Growth(what, statistics.median(sizes[:third]), statistics.median(sizes[-third:])))
        return found


def _settled_bytes(process: psutil.Process) -> int:
    """Return the bytes of resident memory without shared pages; 0 if the process is younger than SETTLED_S or gone."""
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
