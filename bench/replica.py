"""`headrace bench replica` compares three ways to deliver the rows of a step to all ranks of a replica.

leader        The replica reader's leader reads once for all ranks and broadcasts the valid bytes of each microbatch.
independent   Every rank reads all rows itself with the replica reader.
padded        The leader reads its whole shard, pads every column to the longest row, and broadcasts a pickled list of
              names and shapes and then each tensor. NeMo-RL does this (`TQWorkerMixin`, 2026-08), but the dtypes here
              are Headrace's narrow ones, so that only the way of reading differs.

For each replica size, fresh processes are started, one per rank. They run all ways in turn, on the same rows of the
same plan.
"""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
import xxhash
from rich.table import Table

from ..actors.protocols import ROLLOUT_SCHEMA
from ..actors.train.microbatch_plan import Budget, plan_shards
from ..actors.train.reader import ReplicaReader, build_links
from ..actors.train.step_rows import TrainShard
from ..actors.train.topology import Topology
from ..codecs.batch import Batch, Jagged
from ..codecs.jagged import from_padded, to_padded
from ..codecs.memory import as_bytes
from ..codecs.schema import Kind
from ..dataplane.client.client import DataPlaneClient
from ..dataplane.config import DataPlaneConfig, StoreConfig
from ..dataplane.factory import connect, open_data_plane
from ..dataplane.handle import DataPlaneHandle
from ..dataplane.meta import KVBatchMeta
from ..trainers.cluster.ray_cluster import lean_start
from ..trainers.errors import UserError
from .records import conditions, table, write_records, write_summary
from .transfer.baselines import PROCESS_ENV

WAYS = ("leader", "independent", "padded")
TIMEOUT_S = 60.0
SCHEMA = ROLLOUT_SCHEMA.subset([name for name, field in ROLLOUT_SCHEMA.items() if field.kind is Kind.PER_TOKEN])
"""Schema of all rollout columns with one value per token."""
FIELDS = tuple(SCHEMA)


@dataclass(frozen=True, slots=True)
class RankTask:
    """The input of one rank of the benchmark."""

    rank: int
    world: int
    """Number of ranks of the single replica, all tensor-parallel."""
    rendezvous: str
    """Path of the file that the ranks use to form a process group."""
    handle: DataPlaneHandle
    shard: TrainShard
    repeats: int
    device: str
    """Type of the device that receives the rows, `cpu` or `cuda`."""


@dataclass(frozen=True, slots=True)
class WayResult:
    """Measurements on one rank of one way to read a batch. In some ways each rank reads alone; in others one rank reads
    and broadcasts."""

    spans: tuple[tuple[float, float], ...]
    """Start and end of each run after the warm-up, in CLOCK_MONOTONIC seconds."""
    store_bytes: int
    """Number of bytes that this rank read from the store in one run."""
    sent_bytes: int
    """Number of bytes that this rank broadcast in one run."""
    digest: str
    """xxh3 digests of all columns over the rows, in the order of the plan."""


def run_rank(task: RankTask) -> dict[str, WayResult]:
    """Measure all ways of reading on this rank, and return way -> result. Every repeat runs all ways in turn, so that
    changes of the machine's speed affect all ways alike."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", task.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.world,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    with connect(task.handle, name=f"rank {task.rank}") as client:
        ways, close = _ways(task, client, device)
        digests = {way: drain(True) for way, (drain, _) in ways.items()}
        spans: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        counts: dict[str, tuple[int, int]] = {}
        for _ in range(task.repeats):
            for way, (drain, sent_bytes) in ways.items():
                before = client.stats.bytes_got
                dist.barrier()
                start = time.monotonic()
                drain(False)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                spans[way].append((start, time.monotonic()))
                counts[way] = (client.stats.bytes_got - before, sent_bytes())
        dist.barrier()
        close()
    dist.destroy_process_group()
    return {way: WayResult(tuple(spans[way]), *counts[way], digests[way]) for way in ways}


_Way = tuple[Callable[[bool], str], Callable[[], int]]
"""The two functions that implement one way of reading. The first reads all rows once. It returns a digest of the rows
if it is called with True, else "". The second returns the number of bytes that this rank broadcast in the last read."""


def _ways(task: RankTask, client: DataPlaneClient, device: torch.device) -> tuple[dict[str, _Way], Callable[[], None]]:
    topology = Topology(1, tp=task.world)
    ways: dict[str, _Way] = {}
    readers = []
    for policy in ("leader", "independent"):
        name = f"rank {task.rank} (pid {os.getpid()})"
        links = build_links(topology, task.rank, policy, name=name, timeout_s=TIMEOUT_S, device=device)
        reader = ReplicaReader(client, SCHEMA, topology, task.rank, links, device=device)
        readers.append(reader)
        ways[policy] = _reader_way(reader, task.shard)
    padded = PaddedBroadcast(client, task, device)
    ways["padded"] = (padded.drain, lambda: padded.sent_bytes)

    def close() -> None:
        for reader in readers:
            reader.close()

    return ways, close


def _reader_way(reader: ReplicaReader, shard: TrainShard) -> _Way:
    def drain(look: bool) -> str:
        reader.take_metrics()
        reader.begin(shard)
        digest = RowsDigest()
        for micro in reader.stream(FIELDS):
            if look:
                digest.add({name: micro.batch.jagged(name).values.cpu() for name in FIELDS})
        reader.end()
        return digest.text() if look else ""

    return drain, lambda: reader.take_metrics().broadcast_bytes


class PaddedBroadcast:
    """Implements the way `padded`: the leader pads every column of its shard to the longest row and broadcasts it."""

    def __init__(self, client: DataPlaneClient, task: RankTask, device: torch.device) -> None:
        assert task.shard.meta is not None
        self._client = client
        self._meta = KVBatchMeta.from_bytes(task.shard.meta)
        self._sizes = task.shard.sizes
        self._leads = task.rank == 0
        self._device = device
        ranks = list(range(task.world))
        group = dist.new_group(ranks, backend="nccl" if device.type == "cuda" else "gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self.sent_bytes = 0

    def drain(self, look: bool) -> str:
        columns: dict[str, torch.Tensor] = {}
        manifest: list[Any] = [None]
        if self._leads:
            columns, _ = to_padded(self._client.get(self._meta, FIELDS))
            columns = {name: column.to(self._device) for name, column in columns.items()}
            manifest = [[(name, column.dtype, tuple(column.shape)) for name, column in columns.items()]]
        dist.broadcast_object_list(manifest, src=0)
        for name, dtype, shape in manifest[0]:
            if not self._leads:
                columns[name] = torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(columns[name], 0, group=self._group)
        self.sent_bytes = sum(column.nbytes for column in columns.values()) if self._leads else 0
        if not look:
            return ""
        digest, begin = RowsDigest(), 0
        host = {name: column.cpu() for name, column in columns.items()}
        for size in self._sizes.tolist():
            part = slice(begin, begin + size)
            rows = {name: column[part] for name, column in host.items()}
            batch = from_padded(SCHEMA, rows, torch.from_numpy(self._meta.lengths[part].copy()))
            digest.add({name: batch.jagged(name).values for name in FIELDS})
            begin += size
        return digest.text()


class RowsDigest:
    """Computes one xxh3 digest per field over all rows, however they are split into microbatches."""

    def __init__(self) -> None:
        self._hashes = {name: xxhash.xxh3_64() for name in FIELDS}

    def add(self, columns: dict[str, torch.Tensor]) -> None:
        for name, values in columns.items():
            self._hashes[name].update(np.ascontiguousarray(as_bytes(values.contiguous())).data)

    def text(self) -> str:
        return " ".join(digest.hexdigest() for digest in self._hashes.values())


SIZES = (2, 4, 8)
"""Replica sizes that are measured by default."""
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
    """Device that receives the rows: `cpu`, or `cuda` for one GPU per rank, with buffers sent over NCCL."""


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """The figures of one way of reading at one replica size."""

    size: int
    way: str
    seconds: tuple[float, ...]
    """Seconds of each run, from the start of its first rank to the end of its last one."""
    valid_bytes: int
    """Number of valid bytes in all columns of the rows."""
    store_bytes: int
    """Number of bytes that all ranks read from the store in one run."""
    sent_bytes: int
    """Number of bytes that the leader broadcasts in one run. They are counted once, however many ranks receive them."""

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
    """Measure every replica size, and write results.jsonl and summary.json. The function starts Ray itself. Raises
    UserError if this machine has too few GPUs, and RuntimeError if one way of reading delivers other bytes than the
    others.
    """
    if options.device == "cuda" and torch.cuda.device_count() < max(options.sizes):
        raise UserError(
            f"--device: got cuda, expected {max(options.sizes)} GPUs for --sizes {max(options.sizes)}, "
            f"but this machine has {torch.cuda.device_count()}"
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
    """Put the rows of a step group by group, with all columns that exist after rollouts and write-back. Returns one
    receipt (the keys and locations of rows) for all rows."""
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
    """Return the summary with the keys `replica.{ranks}.*`. In a ratio `a_vs_b`, a value above 1 means that a is
    faster."""
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
    rows = [
        (
            str(result.size),
            result.way,
            f"{result.median_s * 1e3:.1f}",
            f"{result.store_bytes / result.valid_bytes:.2f}",
            f"{result.sent_bytes / result.valid_bytes:.3f}" if result.sent_bytes else "",
        )
        for result in results
    ]
    header = ("ranks", "way", "ms", "read from the store / valid", "broadcast / valid")
    return table("headrace bench replica", header, rows, left=("way",))
