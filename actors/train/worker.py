"""One rank of the train mesh: a Ray actor that hosts a train backend, feeds it its rows and writes columns back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported

from ...codecs import messages
from ...codecs.batch import Jagged
from ...dataplane.client import DataPlaneClient
from ...dataplane.factory import connect
from ...dataplane.handle import DataPlaneHandle
from ...dataplane.meta import KVBatchMeta
from ...dataplane.topology import Topology
from ..protocols import ROLLOUT_SCHEMA, TRAIN_FIELDS, ActorInfo, Span, SpanTable, TrainBackend
from ..weights.config import SyncConfig
from ..weights.publisher import WeightPublisher
from ..weights.transports.protocol import ReceiverGroup, WeightSender, WeightUpdate
from .reader import FetchPolicy, ReplicaReader, build_links
from .step_rows import TrainShard

F = TypeVar("F", bound=Callable[..., object])

CONCURRENCY_GROUPS = {"weights": 1, "abort": 1}
"""Threads of the actor beside its main one: `ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(TrainWorker)`.
All other methods run in one thread, always the same: a backend may be bound to the thread that built it."""
PREV = "prev_logprobs"
REF = "ref_logprobs"


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
    sync: SyncConfig
    bucket_bytes: int
    """Size of the largest bucket of weights, a multiple of 64."""

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.topology.world

    @property
    def name(self) -> str:
        """For errors, traces and the data plane's status."""
        return f"train worker {self.rank}"


def _beside(group: str) -> Callable[[F], F]:
    """A method that Ray runs in the threads of `group`; it stays one that can be called without Ray."""

    def mark(method: F) -> F:
        ray.method(concurrency_group=group)(method)  # notes it on the function itself
        return method

    return mark


class TrainWorker:
    """Hosts one rank. Calls run one at a time, in the order they were sent; collective ones go to all ranks.

    Those of the groups `weights` and `abort` run beside them, as CONCURRENCY_GROUPS says; only rank 0 has them.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._name = setup.name
        self._store: TCPStore | None = None
        self._backend: TrainBackend | None = None
        self._publisher: WeightPublisher | None = None
        """Rank 0's."""
        self._specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._client: DataPlaneClient | None = None
        self._reader: ReplicaReader | None = None
        self._shard: TrainShard | None = None
        self._meta: KVBatchMeta | None = None
        self._written: list[str] = []
        """Columns that the replicas' writers have added to the step's rows."""
        self._spans: list[Span] = []
        self._open = False
        """A train step has begun and is not finished."""

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
            self._specs = self._backend.weight_specs()
            self._publisher = WeightPublisher(setup.sender(), setup.sync, setup.bucket_bytes)
            self._publisher.reserve(self._specs)

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

    def accumulate(self) -> bytes:
        """Gradients of the shard's rows, microbatch by microbatch, into the step that is open; opens one if none is.

        Collective. A step may have any number of shards, each begun, accumulated and let go of in turn; the gradient
        is the same however its rows are dealt to them. On an error the step is aborted. Returns a WorkerReport.
        """
        backend, reader, shard = self._ready()
        try:
            if not self._open:
                backend.begin_step(self._setup.temperature)
                self._open = True
            with self._span("forward backward"), closing(reader.stream((*TRAIN_FIELDS, *self._written))) as micros:
                backend.accumulate(micros, len(shard.sizes))
        except BaseException:
            self.abort()
            raise
        finally:
            reader.end()
            self._meta = None
        return self._report({})

    def finish(self) -> bytes:
        """The optimizer step over all that was accumulated. Collective. Returns an encoded WorkerReport with metrics.

        Raises RuntimeError when no step is open.
        """
        backend, _, _ = self._ready()
        if not self._open:
            raise RuntimeError(f"{self._name}: no step is open (accumulate comes before finish)")
        self._open = False
        try:
            with self._span("optimizer"):
                metrics = backend.finish_step()
        except BaseException:
            backend.abort_step()
            raise
        return self._report(metrics)

    def abort(self) -> None:
        """Drop the gradients of an open step. Idempotent; not collective."""
        self._open = False
        if self._backend is not None:
            self._backend.abort_step()

    # ------------------------------------------------------------ weights and state

    @_beside("weights")
    def open_update(self, version: int, receivers: Sequence[tuple[str, int]], base: int | None = None) -> bytes:
        """Announce `version` to `receivers` (engine's name, its number of workers). Returns an encoded WeightUpdate.

        Rank 0 only. base: the version that all receivers serve. Raises what `WeightPublisher.open` raises.
        """
        return messages.encode(self._publishes().open(version, self._specs, _groups(receivers), base=base))

    @_beside("weights")
    def open_cached(self, version: int, receivers: Sequence[tuple[str, int]]) -> bytes:
        """As `open_update`, of a version that was sent before and is to be sent again by `send_cached`."""
        return messages.encode(self._publishes().open(version, self._specs, _groups(receivers), cached=True))

    def send_weights(self, update: bytes) -> bytes:
        """Gather the weights and publish them as the open `update`, which only rank 0 need be given. Collective.

        Rank 0 returns an encoded SendReport, the others b""; on them only the gathering itself can fail.
        """
        if self._backend is None:
            raise RuntimeError(f"{self._name}: build comes before send_weights")
        weights = self._backend.weights()
        with self._span("send weights"):
            if self._setup.rank == 0:
                return messages.encode(self._publishes().publish(messages.decode(update, WeightUpdate), weights))
            for _ in weights:
                pass
        return b""

    @_beside("weights")
    def send_cached(self, update: bytes) -> bytes:
        """Publish the open `update` of `open_cached` from rank 0's host memory, beside whatever the ranks do.

        Returns an encoded SendReport.
        """
        return messages.encode(self._publishes().publish_cached(messages.decode(update, WeightUpdate)))

    @_beside("abort")
    def abort_update(self, reason: str) -> None:
        """End the open update, whoever sends it. Rank 0 only; idempotent."""
        self._publishes().abort(reason)

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
        """Leave group and data plane. Idempotent; raises what a part fails with once all have been closed."""
        with ExitStack() as stack:  # last in, first out
            if dist.is_initialized():
                stack.callback(dist.destroy_process_group)
            for part in (self._client, self._reader, self._backend, self._publisher):
                if part is not None:
                    stack.callback(part.close)
            self._backend = self._client = self._publisher = self._reader = None

    # ------------------------------------------------------------ inside

    def _publishes(self) -> WeightPublisher:
        if self._publisher is None:
            raise RuntimeError(f"{self._name}: only rank 0 publishes weights, once it is built")
        return self._publisher

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
        figures = self._reader.take_metrics()
        traced = (*self._spans, *figures.spans) if self._shard is not None and self._shard.traced else ()
        spans = SpanTable.of(traced)
        self._spans.clear()
        kept = metrics if self._setup.rank == 0 else {}
        traffic = self._client.stats.take().to_bytes()
        return messages.encode(WorkerReport(kept, figures.wait_s, traffic, figures.broadcast_bytes, spans))


def _groups(receivers: Sequence[tuple[str, int]]) -> list[ReceiverGroup]:
    return [ReceiverGroup(engine, num_workers) for engine, num_workers in receivers]
