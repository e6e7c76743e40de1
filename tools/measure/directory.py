"""`python tools/measure/directory.py` measures memory, latency and throughput of the directory with a million rows."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from rich.table import Table

from headrace.bench.records import conditions, table, write_records, write_summary
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import show_results, status_line
from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.directory.calls import ClaimRows, Grouping, PutRows, schema_id
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.factory import connect, open_data_plane
from headrace.trainers.cluster.ray_cluster import Cluster, CpuDemand
from headrace.trainers.errors import UserError

NUM_FIELDS = 10
GROUP_SIZE = 8
BLOCK_ROWS = 64
PUT_ROWS = 1024
"""Number of rows in each call, for every operation."""
FEW_ROWS = 1024
"""Number of rows of the small directory whose ClaimTimeout is timed, for comparison with that of the full one."""
PROBES = 50
"""Number of timed calls of each operation on the full directory."""
TOKENS = 1000
SMALL_ROWS = 64
"""Number of rows in a small call through the directory's actor. Its latency is mostly that of the call itself."""
ACTOR_PROBES = 100

_NAMES = tuple(f"field{number}" for number in range(NUM_FIELDS))
_PARTITION, _TASK = "train", "train"


def run_directory(
    out: Path, *, num_rows: int, tell: Callable[[str], None], in_process: bool = False
) -> dict[str, float]:
    """Measure the directory's operations twice: called directly in this process, and as small remote calls. The former
    has `num_rows` rows; the latter go to a directory actor. Writes results.jsonl and summary.json, and returns the
    summary.

    in_process: for tests; the remote calls go to a thread of this process instead of an actor, without Ray.
    """
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(repeats=PROBES, rows=num_rows, fields=NUM_FIELDS, rows_per_call=PUT_ROWS)
    tell(f"filling the directory with {num_rows} rows")
    summary, times = measure_directory(num_rows)
    tell("through the directory's process" if not in_process else "through its thread")
    with _ray(in_process):
        through, more = measure_calls(in_process)
    summary |= through
    records = [
        {"op": op, "runs": len(found), "median_us": _micros(found), "p99_us": _micros(found, 0.99)}
        for op, found in (times | more).items()
    ]
    write_records(out / "results.jsonl", records, facts)
    write_summary(out / "summary.json", summary, facts)
    return summary


def measure_directory(num_rows: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Fill a directory in this process, without a store, with `num_rows` rows, and time its operations. Returns the
    summary and, for each operation, the seconds of each call."""
    times: dict[str, list[float]] = {}
    few = _empty_directory()
    _write(few, _put_rows(0, FEW_ROWS))
    _probe_timeouts(few, FEW_ROWS, times, "claim_timeout_few")
    directory = _empty_directory()
    before = _resident_bytes()
    starts = range(0, num_rows, PUT_ROWS)
    for start in starts:
        put = _put_rows(start, min(PUT_ROWS, num_rows - start))
        with _timed(times, "put"):
            _write(directory, put)
    held = _resident_bytes() - before
    rng = np.random.default_rng(0)
    size = min(PUT_ROWS, num_rows)
    for _ in range(PROBES):
        keys = [_key(row) for row in rng.integers(0, num_rows, size).tolist()]
        with _timed(times, "lookup"):
            directory.lookup(_PARTITION, keys, _NAMES)
    _probe_claims(directory, num_rows, size, times)
    _probe_timeouts(directory, num_rows, times, "claim_timeout")
    for start in [starts[i] for i in rng.permutation(len(starts))[:PROBES]]:
        count = min(PUT_ROWS, num_rows - start)
        keys = [_key(row) for row in range(start, start + count)]
        with _timed(times, "clear"):
            directory.clear(_PARTITION, keys)
        with _timed(times, "put_when_full"):
            _write(directory, _put_rows(start, count))
    summary = {"directory.rows": float(num_rows), "directory.bytes_per_row": held / num_rows}
    summary["directory.mib"] = held / 2**20
    for op, found in times.items():
        summary[f"directory.{op}.latency_us"] = _micros(found)
        summary[f"directory.{op}.p99_us"] = _micros(found, 0.99)
        if not op.startswith("claim_timeout"):  # which moves no rows
            summary[f"directory.{op}.rows_per_s"] = size / float(np.median(found))
    return summary, times


def _probe_claims(directory: Directory, num_rows: int, size: int, times: dict[str, list[float]]) -> None:
    """Time claims and releases of whole groups. The first claim is timed separately, because it builds the index that
    later claims use."""
    size -= size % GROUP_SIZE
    claim = ClaimRows(_PARTITION, _TASK, _NAMES, max(size, GROUP_SIZE), whole_groups=True)
    for number in range(min(PROBES, num_rows // claim.num_rows)):
        with _timed(times, "claim_first" if number == 0 else "claim"):
            receipt = directory.claim(claim, 0.0)
        assert receipt is not None, "the rows are there"
        with _timed(times, "release"):
            directory.release(_PARTITION, _TASK, receipt.lease_id, receipt.keys, "retry" if number % 2 else "done")


def _probe_timeouts(directory: Directory, num_rows: int, times: dict[str, list[float]], op: str) -> None:
    """Time what the directory does for a claim that times out: a try that finds too few rows, and the error's text."""
    claim = ClaimRows(_PARTITION, _TASK, _NAMES, (num_rows // GROUP_SIZE + 1) * GROUP_SIZE, whole_groups=True)
    directory.claim(claim, 0.0)  # builds the index, unless an earlier claim has
    for _ in range(PROBES):
        with _timed(times, op):
            receipt = directory.claim(claim, 0.0)
            message = directory.shortage(claim)
        assert receipt is None and "rows are ready" in message


def measure_calls(in_process: bool) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Time a client's small calls of SMALL_ROWS rows to a directory in another process. Returns the summary and, for
    each operation, the seconds of each call."""
    times: dict[str, list[float]] = {}
    config = DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=64), timeout_s=60)
    with open_data_plane(config, in_process=in_process) as plane, connect(plane.handle, name="bench") as client:
        client.register(_PARTITION, _schema(), (_TASK,), group_size=GROUP_SIZE)
        values = {name: torch.zeros(SMALL_ROWS) for name in _NAMES}
        values |= {_NAMES[0]: torch.zeros(SMALL_ROWS, 1)}
        for number in range(ACTOR_PROBES):
            keys = [_key(row) for row in range(number * SMALL_ROWS, (number + 1) * SMALL_ROWS)]
            with _timed(times, "put"):
                client.put(_PARTITION, keys, values)
            with _timed(times, "lookup"):
                client.lookup(_PARTITION, keys, _NAMES)
            with _timed(times, "claim"):
                receipt = client.claim(_PARTITION, _TASK, _NAMES, SMALL_ROWS)
            with _timed(times, "get"):
                client.get(receipt)
            with _timed(times, "release"):
                client.release(receipt, _TASK, "done")
            with _timed(times, "clear"):
                client.clear(_PARTITION, keys)
            with _timed(times, "status"):
                client.status()
    named = {f"actor.{op}": found[1:] for op, found in times.items()}  # the first call of each warms up
    summary = {f"directory.{op}.latency_us": _micros(found) for op, found in named.items()}
    summary |= {f"directory.{op}.p99_us": _micros(found, 0.99) for op, found in named.items()}
    return summary, named


def directory_table(summary: dict[str, float]) -> Table:
    """Return a table with one row per operation."""
    rows = int(summary["directory.rows"])
    title = f"directory: {rows} rows x {NUM_FIELDS} fields, {summary['directory.mib']:.0f} MiB, "
    found = []
    for op in [name.split(".", 1)[1].rsplit(".", 1)[0] for name in summary if name.endswith(".latency_us")]:
        speed = summary.get(f"directory.{op}.rows_per_s")
        count = SMALL_ROWS if op.startswith("actor.") else 0 if op.startswith("claim_timeout") else min(PUT_ROWS, rows)
        median, late = summary[f"directory.{op}.latency_us"], summary[f"directory.{op}.p99_us"]
        found.append((op, str(count), f"{median:.0f}", f"{late:.0f}", "" if speed is None else f"{speed:,.0f}"))
    title += f"{summary['directory.bytes_per_row']:.0f} bytes per row"
    return table(title, ("operation", "rows per call", "median us", "p99 us", "rows/s"), found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit code."""
    parser = Parser("tools/measure/directory.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1 << 20, metavar="N", help="number of rows")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)

    def run() -> int:
        if arguments.rows < 1:
            raise UserError(f"--rows: got {arguments.rows}, expected at least 1")
        out = results_folder(arguments, "directory")
        with status_line("filling the directory") as (console, tell):
            summary = run_directory(out, num_rows=arguments.rows, tell=tell)
        return show_results(console, directory_table(summary), out)

    return ended(run)


# ---------------------------------------------------------------- inside


def _empty_directory() -> Directory:
    directory = Directory(capacity_bytes=1 << 50, lease_s=600.0, reserve_s=60.0)
    directory.register(_PARTITION, _schema(), (_TASK,), GROUP_SIZE)
    return directory


def _schema() -> Schema:
    tokens = Field(_NAMES[0], Kind.PER_TOKEN, torch.float32)
    return Schema([tokens, *[Field(name, Kind.PER_SAMPLE, torch.float32) for name in _NAMES[1:]]])


def _key(row: int) -> str:
    return f"prompt{row // GROUP_SIZE}.{row % GROUP_SIZE}"


def _put_rows(start: int, count: int) -> PutRows:
    """Return the `PutRows` of one put of `count` rows from row `start` on, in blocks of BLOCK_ROWS rows. It is metadata
    without row content."""
    layouts = []
    for at in range(0, count, BLOCK_ROWS):
        rows = min(BLOCK_ROWS, count - at)
        layouts.append(
            BlockLayout(_NAMES, rows, rows * TOKENS, (512, rows * TOKENS * 4, *[rows * 4] * (NUM_FIELDS - 1)))
        )
    keys = [_key(row) for row in range(start, start + count)]
    return PutRows(
        _PARTITION,
        keys,
        _NAMES,
        np.full(count, TOKENS, dtype=np.int64),
        np.full(count, start // PUT_ROWS, dtype=np.int64),
        Grouping.of(keys, None),
        {"reward": np.zeros(count, dtype=np.float32)},
        tuple(layouts),
        False,
        "bench",
        schema_id(_schema()),
    )


def _write(directory: Directory, put: PutRows) -> None:
    reservation = directory.reserve(put, 0.0)
    assert reservation is not None, "there is room for all"
    directory.commit(reservation.reservation_id, put, lambda block_ids, sizes: [b"location"] * len(sizes))


@contextmanager
def _timed(times: dict[str, list[float]], op: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    times.setdefault(op, []).append(time.perf_counter() - started)


@contextmanager
def _ray(in_process: bool) -> Iterator[Any]:
    """Start a Ray cluster for the benchmark, unless none is needed."""
    if in_process:
        yield None
        return
    cluster = Cluster(
        address=None, num_cpus=1, demand=CpuDemand(0, 0, 0), namespace="headrace-bench", object_store_mib=128
    )
    try:
        yield ray
    finally:
        cluster.close()


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _micros(seconds: Sequence[float], quantile: float = 0.5) -> float:
    return float(np.quantile(seconds, quantile)) * 1e6


if __name__ == "__main__":
    sys.exit(main())
