"""Runs one rank of the replica benchmark, which reads the rows of a step in each of the three ways that are compared.

leader        The replica reader's leader reads once for all ranks and broadcasts the valid bytes of each microbatch.
independent   Every rank reads for itself with the replica reader.
padded        The leader reads its whole shard, pads every column to the longest row, and broadcasts a pickled list of
              names and shapes and then each tensor. NeMo-RL does this (`TQWorkerMixin`, 2026-08), but the dtypes here
              are Headrace's narrow ones, so that only the way of reading differs.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from ..actors.protocols import ROLLOUT_SCHEMA
from ..actors.train.reader import ReplicaReader, build_links
from ..actors.train.step_rows import TrainShard
from ..actors.train.topology import Topology
from ..codecs.gather import as_bytes
from ..codecs.jagged import from_padded, to_padded
from ..codecs.schema import Kind
from ..dataplane.client.client import DataPlaneClient
from ..dataplane.factory import connect
from ..dataplane.handle import DataPlaneHandle
from ..dataplane.meta import KVBatchMeta

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
    """Path of the file through which the ranks find each other to form a process group."""
    handle: DataPlaneHandle
    shard: TrainShard
    repeats: int
    device: str
    """Type of the device that receives the rows, `cpu` or `cuda`."""


@dataclass(frozen=True, slots=True)
class WayResult:
    """Measurements on one rank of one way to read a batch. The ways are each rank for itself, and one rank that
    broadcasts to the others."""

    spans: tuple[tuple[float, float], ...]
    """Start and end of each run after the warm-up, in CLOCK_MONOTONIC seconds."""
    store_bytes: int
    """Number of bytes that this rank read from the store in one run."""
    sent_bytes: int
    """Number of bytes that this rank broadcast in one run."""
    digest: str
    """xxh3 digests of all columns, over the rows in plan order."""


def run_rank(task: RankTask) -> dict[str, WayResult]:
    """Measure all ways of reading on this rank, and return way -> result. Every repeat runs all ways in turn, so that
    changes of the machine's speed affect all alike."""
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
"""The two functions that implement one way of reading. The first reads all rows once; called with True, it returns a
digest of the rows, else "". The second returns the number of bytes that this rank broadcast in the last read."""


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
