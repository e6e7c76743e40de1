"""Measures what the directory costs: CPU time of its process for each row, and rows that it serves per second.

A row goes through put, claim, get, release and clear, in groups of GROUP rows. The CPU time is that of the directory's
process alone, so that the time of clients and storage units does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...codecs.schema import Field, Kind, Schema
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import DataPlane, connect, open_data_plane
from ...dataplane.handle import DataPlaneHandle

GROUP = 8
BLOCK = 64
"""Number of groups for which one operation is done, before the next operation is done for them."""
FIELDS = (
    Field("ids", Kind.PER_TOKEN, torch.int32),
    Field("mask", Kind.PER_TOKEN, torch.uint8),
    Field("logprobs", Kind.PER_TOKEN, torch.float32),
    Field("reward", Kind.PER_SAMPLE, torch.float32),
    Field("advantage", Kind.PER_SAMPLE, torch.float32),
)
NAMES = tuple(field.name for field in FIELDS)
PARTITION, TASK = "train", "train"
TIMEOUT_S = 60.0
PLAYERS = 2
"""Number of client processes that work at the same time when rows per second are measured."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Options of the measurement."""

    connections: int = 1000
    groups: int = 256
    repeats: int = 5
    tcp: bool = False
    """Whether clients connect by TCP, as those of other hosts do."""


@dataclass(frozen=True, slots=True)
class CostResult:
    """CPU time of the directory's process, in microseconds a row."""

    us_per_row: float
    by_operation: dict[str, float]
    open_us: float
    """CPU time in microseconds to open one connection."""

    def record(self) -> dict[str, Any]:
        """Return the result as a line of results.jsonl."""
        return {"subject": "directory", **dataclasses.asdict(self)}


def summarise_cost(runs: Sequence[CostResult], rates: Sequence[float]) -> dict[str, float]:
    """Return the figures of the summary: medians of the runs."""
    return {
        "hosts.directory.us_per_row": statistics.median(run.us_per_row for run in runs),
        "hosts.directory.rows_per_s": statistics.median(rates),
    }


def measure_cost(options: CostOptions) -> list[CostResult]:
    """Measure the CPU time of a directory process. Each of `connections` clients puts and consumes groups in turn; each
    run is `groups` groups."""
    with _plane() as plane:
        # Another checkout, which `tools/measure` compares, may have no such method.
        pid = plane.serving_pid() if hasattr(plane, "serving_pid") else plane.processes()["directory"]
        handle = plane.handle
        if options.tcp:
            address: Any = handle.address
            handle = dataclasses.replace(handle, address=dataclasses.replace(address, local="none"))
        began_s = cpu_s(pid)
        clients = [connect(handle, name=f"client {number}") for number in range(options.connections)]
        open_us = (cpu_s(pid) - began_s) / options.connections * 1e6
        try:
            clients[0].register(PARTITION, Schema(FIELDS), tasks=[TASK], group_size=GROUP)
            runs = range(options.repeats)
            return [_cost(pid, clients, run * options.groups, options.groups, open_us) for run in runs]
        finally:
            for client in clients:
                client.close()


def measure_rate(num_processes: int = PLAYERS, seconds: float = 2.0, shards: int = 1) -> float:
    """Return how many rows clients put, claim, read, release and clear per second of wall time.

    The clients are in `num_processes` processes, and work at the same time. shards: number of directories; each serves
    one partition, and every client uses the partition of one directory.
    """
    spawn = multiprocessing.get_context("spawn")
    partitions = [PARTITION] if shards == 1 else _one_each(shards)
    with _plane(shards) as plane, connect(plane.handle) as client:
        for partition in partitions:
            client.register(partition, Schema(FIELDS), tasks=[TASK], group_size=GROUP)
        together = spawn.Barrier(num_processes)
        found = spawn.SimpleQueue()
        processes = [
            spawn.Process(
                target=_play,
                args=(plane.handle, number, partitions[number % shards], together, seconds, found),
                daemon=True,
            )
            for number in range(num_processes)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        finally:
            for process in processes:
                process.kill()
        counts = [0 if found.empty() else found.get() for _ in processes]
    if not all(counts):
        raise RuntimeError("a client of the benchmark failed; its output says why")
    return sum(counts) * GROUP / seconds


def cpu_s(pid: int) -> float:
    """Return the CPU time in seconds that a process has used, by the kernel's clock of that process (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)


# ---------------- inside


def _plane(shards: int = 1) -> DataPlane:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Each connection takes a file descriptor.
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=256 * shards), timeout_s=TIMEOUT_S)
    if shards > 1:  # Code that this is measured beside may not have the key.
        config = config.model_copy(update={"directory_shards": shards})
    return open_data_plane(config, process=True, listen="127.0.0.1")


def _one_each(shards: int) -> list[str]:
    """Return the name of a partition for each directory."""
    from ...dataplane.client.partition_shards import shard_of  # Code that this is measured beside may not have it.

    names = (f"{PARTITION}{number}" for number in itertools.count())
    return [next(name for name in names if shard_of(name, shards) == shard) for shard in range(shards)]


def _rows() -> dict[str, Any]:
    ids = [torch.arange(20 + number % 5, dtype=torch.int32) for number in range(GROUP)]
    per_token = {"ids": ids, "mask": [one.to(torch.uint8) for one in ids], "logprobs": [one.float() for one in ids]}
    return per_token | {"reward": torch.rand(GROUP), "advantage": torch.rand(GROUP)}


def _cost(pid: int, clients: Sequence[DataPlaneClient], first: int, groups: int, open_us: float) -> CostResult:
    rows, spent = _rows(), dict[str, float]()

    def timed(operation: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        before = cpu_s(pid)
        results = [call() for call in calls]
        spent[operation] = spent.get(operation, 0.0) + cpu_s(pid) - before
        return results

    for start in range(first, first + groups, BLOCK):
        numbers = range(start, min(start + BLOCK, first + groups))
        writers = [clients[number % len(clients)] for number in numbers]
        readers = [clients[(number + len(clients) // 2) % len(clients)] for number in numbers]
        timed("put", [lambda c=c, n=n: _put(c, n, rows) for c, n in zip(writers, numbers, strict=True)])
        metas = timed("claim", [lambda c=c: _claim(c) for c in readers])
        pairs = list(zip(readers, metas, strict=True))
        timed("get", [lambda c=c, m=m: c.get(m) for c, m in pairs])
        timed("release", [lambda c=c, m=m: c.release(m, TASK, "done") for c, m in pairs])
        timed("clear", [lambda c=c, m=m: c.clear(PARTITION, m.keys) for c, m in pairs])
    scale = 1e6 / (groups * GROUP)
    return CostResult(sum(spent.values()) * scale, {op: used * scale for op, used in spent.items()}, open_us)


def _put(client: DataPlaneClient, name: int | str, rows: dict[str, Any], partition: str = PARTITION) -> None:
    client.put(partition, [f"prompt{name}.{row}" for row in range(GROUP)], rows, versions=0)


def _claim(client: DataPlaneClient, partition: str = PARTITION) -> Any:
    return client.claim(partition, TASK, NAMES, GROUP, whole_groups=True, timeout_s=TIMEOUT_S)


def _play(handle: DataPlaneHandle, number: int, partition: str, together: Any, seconds: float, found: Any) -> None:
    """Put and consume groups for some seconds, in a process of its own."""
    rows, count = _rows(), 0
    with connect(handle, name=f"player {number}") as client:
        together.wait(TIMEOUT_S)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            _put(client, f"{number}-{count}", rows, partition)
            meta = _claim(client, partition)
            client.get(meta)
            client.release(meta, TASK, "done")
            client.clear(partition, meta.keys)
            count += 1
    found.put(count)
