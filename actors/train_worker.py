"""One rank of the train mesh: a Ray actor that hosts a train backend, reads its own rows and writes columns back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ..codecs import messages
from ..codecs.batch import Batch, Jagged
from ..dataplane.client import DataPlaneClient
from ..dataplane.factory import DataPlaneHandle, connect
from ..dataplane.meta import KVBatchMeta
from .protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, ActorInfo, MicroBatch, Span, TrainBackend, WeightSender

PREV = "prev_logprobs"
REF = "ref_logprobs"


@dataclass(frozen=True, slots=True)
class TrainShard:
    """One rank's share of a step's plan; shipped once, then every pass of the step works on it."""

    step: int
    meta: bytes
    """`KVBatchMeta.to_bytes()` of the rank's rows in the order of its microbatches; tags `advantage` float32 and, with
    `loss.aggregation=prompt`, `group_tokens` float32."""
    sizes: np.ndarray
    """int64 `[M]`: rows of each microbatch."""
    digest: str
    """The whole plan's hash, the same on every rank."""
    traced: bool
    """Whether reports of the step carry spans."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a pass tells the driver: figures only."""

    metrics: dict[str, float]
    """Global metrics of the pass; of rank 0 only, the others have the same."""
    data_wait_s: float
    """Seconds this rank waited for rows."""
    bytes_got: int
    bytes_put: int
    calls: int
    """Data-plane client calls of this rank in the pass."""
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a rank is built from. `backend` and `sender` come from the floor above."""

    rank: int
    world: int
    threads: int
    temperature: float
    timeout_s: float
    """Bound of collectives and of data-plane waits."""
    data_plane: DataPlaneHandle
    backend: Callable[[int, int], TrainBackend]
    sender: Callable[[], WeightSender]

    @property
    def name(self) -> str:
        """For errors, traces and the data plane's status."""
        return f"train worker {self.rank}"


class TrainWorker:
    """Hosts one rank. Calls run one at a time, in the order they were sent; collective ones go to all ranks."""

    def __init__(self, setup: WorkerSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._name = setup.name
        self._store: TCPStore | None = None
        self._backend: TrainBackend | None = None
        self._sender: WeightSender | None = None
        self._client: DataPlaneClient | None = None
        self._shard: TrainShard | None = None
        self._meta: KVBatchMeta | None = None
        self._columns: dict[int, Batch] = {}
        self._spans: list[Span] = []
        self._wait_s = 0.0
        self._seen = (0, 0, 0)

    def info(self) -> ActorInfo:
        return ActorInfo.here(self._name)

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 only: serve the group's store on `host`, an ephemeral port; returns the port."""
        timeout = timedelta(seconds=self._setup.timeout_s)
        self._store = TCPStore(host, 0, self._setup.world, True, timeout, wait_for_workers=False)
        return self._store.port

    def build(self, host: str, port: int) -> None:
        """Join the ranks' process group (world > 1) and build the backend. Collective."""
        setup = self._setup
        timeout = timedelta(seconds=setup.timeout_s)
        if setup.world > 1:
            if self._store is None:
                self._store = TCPStore(host, port, setup.world, False, timeout)
            kind = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(kind, store=self._store, rank=setup.rank, world_size=setup.world, timeout=timeout)
        self._client = connect(setup.data_plane, name=self._name)
        self._backend = setup.backend(setup.rank, setup.world)
        if setup.rank == 0:
            self._sender = setup.sender()

    # ------------------------------------------------------------ one step

    def begin(self, payload: bytes) -> None:
        """Take this rank's shard of a step (`TrainShard`); drops whatever an earlier step left."""
        shard = messages.decode(payload, TrainShard)
        self._shard, self._meta = shard, KVBatchMeta.from_bytes(shard.meta)
        rows = int(shard.sizes.sum())
        if rows != len(self._meta.keys):
            raise ValueError(f"{self._name}: plan {shard.digest} has {rows} rows, its receipt {len(self._meta.keys)}")
        self._columns = {}

    def write_logprobs(self, field: str) -> bytes:
        """Compute `prev_logprobs` or `ref_logprobs` of the shard's rows and write them back as a column.

        Collective. Returns an encoded WorkerReport.
        """
        backend, client, meta = self._ready()
        receipts = []
        ranges = self._row_ranges()
        with self._span(f"logprobs {field}"):
            micros = self._micros(("input_ids", "response_mask"))
            temperature = self._setup.temperature
            columns = backend.logprobs(micros, len(ranges), reference=field == REF, temperature=temperature)
        for index, (rows, values) in enumerate(zip(ranges, columns, strict=True)):
            if not len(rows):
                continue
            column = Jagged(values, meta.lengths[rows])
            with self._span(f"put {field}"):
                receipts.append(client.put(meta.partition, [meta.keys[row] for row in rows], {field: column}))
            self._add(index, field, column)
        if receipts:
            self._meta = meta.merge_fields(receipts[0].concat(*receipts[1:]))
        return self._report({})

    def train(self) -> bytes:
        """One optimizer step over the shard, microbatch by microbatch. Collective. Returns an encoded WorkerReport."""
        backend, _, meta = self._ready()
        fields = (*ROLLOUT_FIELDS, *(field for field in (PREV, REF) if field in meta.fields))
        backend.begin_step(self._setup.temperature)
        try:
            with self._span("forward backward"):
                backend.accumulate(self._micros(fields), len(self._row_ranges()))
            with self._span("optimizer"):
                metrics = backend.finish_step()
        except BaseException:
            backend.abort_step()
            raise
        finally:
            self._columns = {}
        return self._report(metrics)

    # ------------------------------------------------------------ weights and state

    def send_weights(self, version: int) -> bytes:
        """Gather the weights and publish them as `version`. Collective; rank 0 returns the manifest, the others b""."""
        assert self._backend is not None
        with self._span("gather weights"):
            named = self._backend.export_weights()
        if self._sender is None:
            return b""
        with self._span("send weights"):
            return messages.encode(self._sender.send(version, named))

    def save(self, path: str) -> None:
        """Collective. Sharded checkpoint, published atomically."""
        assert self._backend is not None
        self._backend.save(path)

    def load(self, path: str) -> None:
        """Collective."""
        assert self._backend is not None
        self._backend.load(path)

    def export_model(self, path: str) -> None:
        """Write the model as a HF folder. Collective; rank 0 writes."""
        assert self._backend is not None
        self._backend.export_model(path)

    def close(self) -> None:
        """Leave group and data plane. Idempotent."""
        if self._sender is not None:
            self._sender.close()
        if self._backend is not None:
            self._backend.close()
        if self._client is not None:
            self._client.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._backend = self._client = self._sender = None

    # ------------------------------------------------------------ inside

    def _ready(self) -> tuple[TrainBackend, DataPlaneClient, KVBatchMeta]:
        if self._backend is None or self._client is None or self._meta is None:
            raise RuntimeError(f"{self._name}: no step has begun (build and begin come first)")
        return self._backend, self._client, self._meta

    def _row_ranges(self) -> list[np.ndarray]:
        """Rows of the shard's receipt, by microbatch."""
        assert self._shard is not None
        ends = np.cumsum(self._shard.sizes)
        return [np.arange(end - size, end) for size, end in zip(self._shard.sizes, ends, strict=True)]

    def _micros(self, fields: Sequence[str]) -> Iterator[MicroBatch]:
        """The shard's microbatches, read as they are asked for."""
        meta = self._ready()[2]
        advantages = meta.tags["advantage"].astype(np.float32)
        tokens = meta.tags["group_tokens"].astype(np.int64) if "group_tokens" in meta.tags else None
        for index, rows in enumerate(self._row_ranges()):
            batch = self._read(index, rows, fields)
            group_tokens = None if tokens is None else tokens[rows]
            yield MicroBatch(batch, meta.lengths[rows], advantages[rows], meta.groups[rows], group_tokens)

    def _read(self, index: int, rows: np.ndarray, fields: Sequence[str]) -> Batch:
        """Columns of one microbatch; one that this step has read or written already is not read again."""
        _, client, meta = self._ready()
        have = self._columns.get(index)
        missing = [field for field in fields if have is None or field not in have]
        if missing:
            start = time.perf_counter()
            with self._span("get " + " ".join(missing)):
                got = client.get(meta.select(rows), missing)
            self._wait_s += time.perf_counter() - start
            have = got if have is None else have.merge(got)
            self._columns[index] = have
        assert have is not None
        return have.subset(fields)

    def _add(self, index: int, field: str, column: Jagged) -> None:
        have = self._columns[index]
        self._columns[index] = have.merge(Batch(ROLLOUT_SCHEMA.subset([field]), have.num_rows, {field: column}))

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.perf_counter() - clock))

    def _report(self, metrics: dict[str, float]) -> bytes:
        """Figures since the last report."""
        assert self._client is not None
        stats = self._client.stats
        now = (stats.bytes_got, stats.bytes_put, stats.calls.total())
        got, put, calls = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen, wait_s, self._wait_s = now, self._wait_s, 0.0
        spans = tuple(self._spans) if self._shard is not None and self._shard.traced else ()
        self._spans.clear()
        kept = metrics if self._setup.rank == 0 else {}
        return messages.encode(WorkerReport(kept, wait_s, got, put, calls, spans))
