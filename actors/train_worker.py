"""One rank of the train mesh: a Ray actor that hosts a train backend, feeds it its rows and writes columns back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ..codecs import messages
from ..codecs.batch import Jagged
from ..dataplane.client import DataPlaneClient
from ..dataplane.factory import DataPlaneHandle, connect
from ..dataplane.meta import KVBatchMeta
from ..dataplane.topology import Topology
from .protocols import ROLLOUT_FIELDS, ROLLOUT_SCHEMA, ActorInfo, Span, TrainBackend
from .replica_reader import FetchPolicy, ReplicaReader, build_links
from .step_rows import TrainShard
from .transports.protocol import WeightSender

PREV = "prev_logprobs"
REF = "ref_logprobs"


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Spans in few bytes: reports go through the driver."""

    origin_s: float
    """Unix time that they count from; 0.0 when there are none."""
    spans: tuple[tuple[str, int, int], ...]
    """(name, microseconds after the origin, microseconds long)."""

    @staticmethod
    def of(spans: Sequence[Span]) -> SpanTable:
        origin_s = min((span.start_s for span in spans), default=0.0)
        return SpanTable(
            origin_s,
            tuple((span.name, round((span.start_s - origin_s) * 1e6), round(span.dur_s * 1e6)) for span in spans),
        )

    def to_spans(self) -> list[Span]:
        """Inverse of `of`, to the microsecond."""
        return [Span(name, self.origin_s + start / 1e6, length / 1e6) for name, start, length in self.spans]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a pass tells the driver: figures only."""

    metrics: dict[str, float]
    """Global metrics of the pass; of rank 0 only, the others have the same."""
    data_wait_s: float
    """Seconds this rank waited for rows."""
    traffic: bytes
    """This rank's data-plane calls since its last report, as `Traffic.to_bytes`; siblings of a leader make none."""
    bytes_broadcast: int
    """Sent to its siblings by this rank as their leader, once for each part of the replica."""
    spans: SpanTable


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a rank is built from. `backend` and `sender` come from the floor above."""

    rank: int
    topology: Topology
    fetch: FetchPolicy
    """Who reads a replica's rows."""
    threads: int
    temperature: float
    timeout_s: float
    """Bound of collectives and of data-plane waits."""
    data_plane: DataPlaneHandle
    backend: Callable[[int, int], TrainBackend]
    sender: Callable[[], WeightSender]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.topology.world

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
        self._reader: ReplicaReader | None = None
        self._shard: TrainShard | None = None
        self._meta: KVBatchMeta | None = None
        self._written: list[str] = []
        """Columns that the replicas' writers have added to the step's rows."""
        self._spans: list[Span] = []

    def info(self) -> ActorInfo:
        return ActorInfo.here(self._name)

    def open_rendezvous(self, host: str) -> int:
        """Rank 0 only: serve the group's store on `host`, an ephemeral port; returns the port."""
        timeout = timedelta(seconds=self._setup.timeout_s)
        self._store = TCPStore(host, 0, self._setup.world, True, timeout, wait_for_workers=False)
        return self._store.port

    def build(self, host: str, port: int) -> None:
        """Join the ranks' process groups (world > 1) and build reader and backend. Collective."""
        setup = self._setup
        timeout = timedelta(seconds=setup.timeout_s)
        if setup.world > 1:
            if self._store is None:
                self._store = TCPStore(host, port, setup.world, False, timeout)
            kind = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(kind, store=self._store, rank=setup.rank, world_size=setup.world, timeout=timeout)
        self._client = connect(setup.data_plane, name=self._name)
        device = torch.device("cpu")  # where the backends lay rows out
        links = build_links(
            setup.topology,
            setup.rank,
            setup.fetch,
            name=str(self.info()),
            timeout_s=setup.timeout_s,
            device=device,
        )
        self._reader = ReplicaReader(self._client, ROLLOUT_SCHEMA, setup.topology, setup.rank, links, device=device)
        self._backend = setup.backend(setup.rank, setup.world)
        if setup.rank == 0:
            self._sender = setup.sender()

    # ------------------------------------------------------------ one step

    def begin(self, payload: bytes) -> None:
        """Take this rank's shard of a step (`TrainShard`); drops whatever an earlier step left."""
        assert self._reader is not None
        shard = messages.decode(payload, TrainShard)
        self._meta = self._reader.begin(shard)
        self._shard, self._written = shard, []

    def write_logprobs(self, field: str) -> bytes:
        """Compute `prev_logprobs` or `ref_logprobs` of the shard's rows; each replica's writer puts them as a column.

        Collective. Returns an encoded WorkerReport.
        """
        backend, reader, shard = self._ready()
        with self._span(f"logprobs {field}"), closing(reader.stream(("input_ids", "response_mask"))) as micros:
            columns = backend.logprobs(
                micros, len(shard.sizes), reference=field == REF, temperature=self._setup.temperature
            )
        if self._writes:
            self._put(field, columns)
        self._written.append(field)
        return self._report({})

    def train(self) -> bytes:
        """One optimizer step over the shard, microbatch by microbatch. Collective. Returns an encoded WorkerReport."""
        backend, reader, shard = self._ready()
        backend.begin_step(self._setup.temperature)
        try:
            with self._span("forward backward"), closing(reader.stream((*ROLLOUT_FIELDS, *self._written))) as micros:
                backend.accumulate(micros, len(shard.sizes))
            with self._span("optimizer"):
                metrics = backend.finish_step()
        except BaseException:
            backend.abort_step()
            raise
        finally:
            reader.end()
            self._meta = None
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
        """Collective. Sharded checkpoint, written behind the training and published atomically: see `wait_saved`."""
        assert self._backend is not None
        self._backend.save(path, wait=False)

    def wait_saved(self) -> None:
        """Until the last checkpoint is written. Raises what it failed with."""
        assert self._backend is not None
        self._backend.wait_saved()

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
        if self._reader is not None:
            self._reader.close()
        if self._client is not None:
            self._client.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._backend = self._client = self._sender = self._reader = None

    # ------------------------------------------------------------ inside

    def _ready(self) -> tuple[TrainBackend, ReplicaReader, TrainShard]:
        if self._backend is None or self._reader is None or self._shard is None:
            raise RuntimeError(f"{self._name}: no step has begun (build and begin come first)")
        return self._backend, self._reader, self._shard

    @property
    def _writes(self) -> bool:
        topology, rank = self._setup.topology, self._setup.rank
        return rank == topology.writer(topology.place(rank).dp)

    def _put(self, field: str, columns: Sequence[torch.Tensor]) -> None:
        """Write a column back, one block a microbatch."""
        client, reader, meta = self._client, self._reader, self._meta
        assert client is not None and reader is not None and self._shard is not None
        if meta is None:
            raise RuntimeError(f"{self._name}: writes {field} back, but was not shipped the rows' receipt")
        for index, (rows, values) in enumerate(zip(self._shard.ranges(), columns, strict=True)):
            if not len(rows):
                continue
            column = Jagged(values, meta.lengths[rows])
            with self._span(f"put {field}"):
                client.put(meta.partition, [meta.keys[row] for row in rows], {field: column})
            reader.keep(index, field, column)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.perf_counter() - clock))

    def _report(self, metrics: dict[str, float]) -> bytes:
        """Figures since the last report."""
        assert self._client is not None and self._reader is not None
        figures = self._reader.figures()
        traced = (*self._spans, *figures.spans) if self._shard is not None and self._shard.traced else ()
        spans = SpanTable.of(traced)
        self._spans.clear()
        kept = metrics if self._setup.rank == 0 else {}
        traffic = self._client.stats.take().to_bytes()
        return messages.encode(WorkerReport(kept, figures.wait_s, traffic, figures.broadcast_bytes, spans))
