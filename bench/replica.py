"""`headrace bench replica` compares three ways to bring the rows of a step to all ranks of a replica.

The ways are one read and a broadcast, a read by each rank, and one read and a broadcast of padded rows
(`replica_rank.py` describes them). For each replica size, fresh processes are started, one per rank. All ways run in
them in turn, on the same rows of the same plan.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from rich.table import Table

from ..actors.train.shard_plans import Budget, plan_shards
from ..actors.train.step_rows import TrainShard
from ..actors.train.topology import Topology
from ..codecs.batch import Batch, Jagged
from ..dataplane.client.client import DataPlaneClient
from ..dataplane.config import DataPlaneConfig, StoreConfig
from ..dataplane.factory import connect, open_data_plane
from ..dataplane.handle import DataPlaneHandle
from ..dataplane.meta import KVBatchMeta
from ..trainers.cluster.ray_cluster import lean_start
from ..trainers.errors import UserError
from .conditions import conditions
from .replica_rank import SCHEMA, WAYS, RankTask, WayResult, run_rank
from .transfer.baselines.transferqueue import PROCESS_ENV
from .transfer.results import write_records, write_summary

SIZES = (2, 4, 8)
"""Numbers of ranks that are measured by default."""
PARTITION = "bench"
GROUP_SIZE = 8
MAX_TOKENS = 4096
TOKENS_PER_MICROBATCH = 16_384
RANKS_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """The sizes, the store and the device of the benchmark."""

    out: Path
    sizes: tuple[int, ...] = SIZES
    store: str = "simple"
    num_rows: int = 256
    repeats: int = 9
    device: str = "cpu"
    """Device that receives the rows: `cpu`, or `cuda` for one GPU per rank and buffers that are sent over NCCL."""


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """The figures of one way of reading at one replica size."""

    size: int
    way: str
    seconds: tuple[float, ...]
    """Seconds of each run, from the start of the first rank to the end of the last one."""
    valid_bytes: int
    """Number of valid bytes in all columns of the rows."""
    store_bytes: int
    """Number of bytes that all ranks read from the store in one run."""
    sent_bytes: int
    """Number of bytes that the leader broadcasts in one run, counted once however many ranks receive them."""

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    def record(self) -> dict[str, Any]:
        """Return the result as plain data for results.jsonl."""
        return {
            "ranks": self.size,
            "way": self.way,
            "median_ms": self.median_s * 1e3,
            "valid_bytes": self.valid_bytes,
            "store_bytes": self.store_bytes,
            "sent_bytes": self.sent_bytes,
            "times_ms": [round(seconds * 1e3, 3) for seconds in self.seconds],
        }


def run_replica(options: ReplicaOptions, tell: Callable[[str], None]) -> list[ReplicaResult]:
    """Measure every replica size, and write results.jsonl and summary.json. The caller need not start Ray.

    Raises UserError for what this machine cannot do, and RuntimeError when one way of reading delivers other bytes than
    the others.
    """
    if options.device == "cuda" and torch.cuda.device_count() < max(options.sizes):
        raise UserError(
            f"--device: got cuda, expected {max(options.sizes)} GPUs for --sizes {max(options.sizes)}, "
            f"there are {torch.cuda.device_count()}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    facts = conditions(
        store=options.store,
        device=options.device,
        rows=options.num_rows,
        max_tokens=MAX_TOKENS,
        tokens_per_microbatch=TOKENS_PER_MICROBATCH,
        repeats=options.repeats,
    )
    results: list[ReplicaResult] = []
    tell(f"starting the {options.store} store, with dataplane.trusted_network=true")
    with lean_start():
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": PROCESS_ENV},
            logging_level=logging.ERROR,
        )
    try:
        store = StoreConfig.model_validate({"kind": options.store, "capacity_mib": 512})
        config = DataPlaneConfig(store=store, trusted_network=True)
        with open_data_plane(config, run_id=f"bench-{uuid.uuid4().hex[:8]}") as plane:
            with connect(plane.handle, name="bench") as client:
                meta = put_rows(client, options.num_rows)
            for size in options.sizes:
                tell(f"{size} ranks")
                results += measure(plane.handle, meta, size, options)
    finally:
        ray.shutdown()
    write_records(options.out / "results.jsonl", [result.record() for result in results], facts)
    write_summary(options.out / "summary.json", summarise(results), facts)
    return results


def put_rows(client: DataPlaneClient, num_rows: int) -> KVBatchMeta:
    """Put the rows of a step with all columns, group by group, as they are after rollouts and write-back. Returns one
    receipt (the keys and locations of rows) for all of them."""
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(6.5, 0.8, num_rows).clip(16, MAX_TOKENS).astype(np.int64)
    client.register(PARTITION, SCHEMA, group_size=GROUP_SIZE)
    metas = []
    for group, part in enumerate(np.array_split(lengths, max(1, num_rows // GROUP_SIZE))):
        columns = {}
        for name, field in SCHEMA.items():
            assert field.dtype is not None
            values = torch.from_numpy(rng.integers(0, 100, int(part.sum()))).to(field.dtype)
            columns[name] = Jagged(values, part)
        keys = [f"{group:x}.{sample}" for sample in range(len(part))]
        metas.append(client.put(PARTITION, keys, Batch(SCHEMA, len(part), columns)))
    meta = metas[0].concat(*metas[1:])
    return meta.with_tags(advantage=rng.normal(size=len(meta)).astype(np.float32))


def measure(handle: DataPlaneHandle, meta: KVBatchMeta, size: int, options: ReplicaOptions) -> list[ReplicaResult]:
    """Measure all ways of reading with `size` ranks, each rank in a fresh process."""
    topology = Topology(1, tp=size)
    plan = plan_shards(meta.lengths, topology, Budget(TOKENS_PER_MICROBATCH, packing="packed"), meta.groups)
    rows, sizes = plan.shard(0)
    shard = TrainShard(1, meta.select(rows).to_bytes(), sizes, plan.digest, False)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        tasks = [
            RankTask(rank, size, os.path.join(folder, "ranks"), handle, shard, options.repeats, options.device)
            for rank in range(size)
        ]
        with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as pool:
            by_rank = [future.result(RANKS_TIMEOUT_S) for future in [pool.submit(run_rank, task) for task in tasks]]
    valid_bytes = int(meta.lengths.sum()) * sum(field.item_bytes for field in SCHEMA.values())
    check_digests(by_rank)
    return [_joined(size, way, [of_rank[way] for of_rank in by_rank], valid_bytes) for way in WAYS]


def check_digests(by_rank: Sequence[dict[str, WayResult]]) -> None:
    """Raise RuntimeError unless every rank got the same rows with every way of reading."""
    expected = by_rank[0]["independent"].digest
    for rank, ways in enumerate(by_rank):
        for way, result in ways.items():
            if result.digest != expected:
                raise RuntimeError(f"{way}: rank {rank} got rows of digest {result.digest}, expected {expected}")


def _joined(size: int, way: str, ranks: Sequence[WayResult], valid_bytes: int) -> ReplicaResult:
    runs = zip(*[result.spans for result in ranks], strict=True)
    seconds = tuple(max(end for _, end in spans) - min(start for start, _ in spans) for spans in runs)
    store_bytes = sum(result.store_bytes for result in ranks)
    return ReplicaResult(size, way, seconds, valid_bytes, store_bytes, sum(result.sent_bytes for result in ranks))


def summarise(results: Sequence[ReplicaResult]) -> dict[str, float]:
    """Return the summary by key, `replica.{ranks}.*`. In a ratio `a_vs_b`, a value above 1 means that a is faster."""
    summary: dict[str, float] = {}
    found = {(result.size, result.way): result for result in results}
    for size in dict.fromkeys(result.size for result in results):
        leader, independent, padded = (found[size, way] for way in WAYS)
        name = f"replica.{size}"
        summary |= {
            f"{name}.leader_vs_independent": independent.median_s / leader.median_s,
            f"{name}.leader_vs_padded": padded.median_s / leader.median_s,
            f"{name}.broadcast_bytes_over_valid": leader.sent_bytes / leader.valid_bytes,
            f"{name}.padded_bytes_over_valid": padded.sent_bytes / padded.valid_bytes,
            f"{name}.store_bytes_over_valid": leader.store_bytes / leader.valid_bytes,
            f"{name}.independent_store_bytes_over_valid": independent.store_bytes / independent.valid_bytes,
        }
    return summary


def replica_table(results: Sequence[ReplicaResult]) -> Table:
    """Return a table with one row for each replica size and way of reading."""
    table = Table(title="headrace bench replica", title_justify="left", title_style="bold")
    for name in ("ranks", "way", "ms", "read from the store / valid", "broadcast / valid"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for result in results:
        table.add_row(
            str(result.size),
            result.way,
            f"{result.median_s * 1e3:.1f}",
            f"{result.store_bytes / result.valid_bytes:.2f}",
            f"{result.sent_bytes / result.valid_bytes:.3f}" if result.sent_bytes else "",
        )
    return table
