"""The work of one train rank: it feeds rows to a train backend, writes columns back and publishes weights."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ...codecs.batch import Jagged
from ...codecs.jagged import unpack
from ...codecs.tokens.routes import ROUTES
from ...codecs.weights.parameter_digests import ParameterDigests
from ...dataplane.factory import connect
from ...dataplane.listen_address import LOOPBACK
from ...dataplane.meta import KVBatchMeta
from ..process.memory import ProcessMemory, measure
from ..process.own_process import ActorInfo
from ..process.remote_methods import in_thread_of
from ..protocols import TOP_IDS, TOP_LOGPROBS, TRAIN_FIELDS, Span, SpanTable, row_schema
from ..sample_file import trained_line
from ..train_backend import OffloadReport, TrainBackend, device_bytes_in_use, offloaded_error
from ..weight_sync.base_offer import BaseRecord, KnownBase, Recovery, WeightReader
from ..weight_sync.pairs.rank_publisher import RankPublisher
from ..weight_sync.publisher import WeightPublisher
from ..weight_sync.stream import SendReport
from ..weight_sync.transports.protocol import ReceiverGroup, WeightUpdate
from .process_groups import ProcessGroups
from .reader import ReplicaReader, build_links
from .step_rows import TrainShard
from .teachers import LATE, TEACHER, Teachers
from .worker_setup import WorkerReport, WorkerSetup

PREV = "prev_logprobs"
REF = "ref_logprobs"
CPU = torch.device("cpu")


@dataclass(slots=True)
class _Work:
    """State of the work on the rank's current shard: its part of the rows of a step, and its plan of microbatches."""

    shard: TrainShard
    meta: KVBatchMeta | None
    """Receipt of the shard's rows (their keys and locations, without content), on ranks that read or write them, until
    the shard has been accumulated; otherwise None."""
    written: list[str] = field(default_factory=list)
    """Columns that the writer rank of each replica has added to the rows."""
    sampled: bool = False
    """True once the lines of the picked rows have been written to samples.jsonl."""


class TrainWorker:
    """Does the work of one rank of the train mesh. Calls run one at a time, in the order they were sent; a collective
    call must be sent to all ranks.

    Methods marked `in_thread_of` run concurrently with the others, in threads of their own. Except for `sent`, they are
    called on rank 0 only.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        address: str = LOOPBACK,
        *,
        groups: ProcessGroups | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """Build the reader, the backend and, on rank 0, the publisher of weights. The call is collective, and the
        ranks' process group must have been joined before.

        address: IP address of this host at which engines reach rank 0. groups: the mesh's process groups, which
        `offload` destroys; None if the rank forms no process groups, such as a single rank whose backend needs none.
        recovery: facts about the base of the adapter for a rank that starts again; None at the first start.
        """
        self._groups = groups
        self._offloaded = False
        """True between `offload` and `onload`."""
        self._setup = setup
        self._name = setup.name
        self._parts = ExitStack()  # The parts are closed last in, first out.
        self._client = connect(setup.data_plane, name=self._name)
        self._parts.callback(self._client.close)
        self._reader = self._open_reader()
        self._replayed = () if setup.routes is None else (ROUTES,)
        """Fields that the policy's passes read for router replay. Those of the reference model have no use for them."""
        self._own = tuple(column.name for column in setup.columns)
        self._parts.callback(self._reader.close)
        build = setup.backend if recovery is None else partial(setup.backend, known=self._known(recovery))
        self._backend = build(setup.rank, setup.world)
        self._parts.callback(self._backend.close)
        self._reference = None if setup.reference is None else setup.reference(setup.rank, setup.world)
        if self._reference is not None:
            self._parts.callback(self._reference.close)
        self._teachers = Teachers(setup.teachers, setup.top_k, setup.rank, setup.world)
        self._parts.callback(self._teachers.close)
        if all(backend.shares_features for backend in self._backends):
            self._reader.share_features()
        self._specs = self._backend.weight_specs() if setup.rank == 0 else {}
        self._ranks = None if setup.rank_publisher is None else self._open_ranks(setup.rank_publisher, address)
        """Publisher of this rank's part of weight updates; None if rank 0 sends everything."""
        self._publisher = self._open_publisher(address) if setup.rank == 0 and self._ranks is None else None
        """Publisher of weight updates; None on all ranks except 0, and if every rank sends its part."""
        self._work: _Work | None = None
        """The shard that was begun last; None before the first."""
        self._spans: list[Span] = []
        self._open = False
        """True while a train step has begun in the backend and is not finished."""

    def _open_reader(self) -> ReplicaReader:
        """Open the reader. It delivers rows to the CPU, because backends arrange them in CPU memory."""
        setup = self._setup
        links = build_links(
            setup.topology,
            setup.rank,
            setup.fetch,
            name=str(ActorInfo.here(self._name)),
            timeout_s=setup.timeout_s,
            device=CPU,
            routes=setup.routes,
        )
        schema = row_schema(setup.routes, setup.columns, setup.top_k, masks=bool(setup.masks))
        return ReplicaReader(self._client, schema, setup.topology, setup.rank, links, device=CPU, routes=setup.routes)

    def _known(self, recovery: Recovery) -> KnownBase:
        sync, key, connect = self._setup.sync, self._setup.data_plane.store.key, None
        if recovery.offer is not None:
            connect = partial(WeightReader, recovery.offer, key, sync.timeout_s)
        return KnownBase(recovery.record, connect, sync.recover == "engine")

    @property
    def base_record(self) -> BaseRecord | None:
        """Digests of the rank's parts of its adapter's base, see `TrainBackend.base_record`."""
        return self._backend.base_record

    def _open_ranks(self, build: Callable[..., RankPublisher], address: str) -> RankPublisher:
        backend = self._backend
        quantization = None if self._setup.quantization is None else self._setup.quantization()
        publisher = build(address, backend.weight_specs(), backend.weight_regions(), backend.adapter, quantization)
        self._parts.callback(publisher.close)
        if self._setup.world > 1:
            publisher.meet()
        return publisher

    def _open_publisher(self, address: str) -> WeightPublisher:
        setup = self._setup
        publisher = WeightPublisher(
            setup.sender(address),
            setup.sync,
            setup.bucket_bytes,
            keep_versions=setup.keep_versions,
            adapter=self._backend.adapter,
            quantization=None if setup.quantization is None else setup.quantization(),
        )
        self._parts.callback(publisher.close)
        publisher.reserve(self._specs)
        return publisher

    # ---------------- These methods run one train step.

    def begin(self, shard: TrainShard) -> None:
        """Start working on `shard`, this rank's share of a step, and drop the rows cached for an earlier shard."""
        self._work = _Work(shard, self._reader.begin(shard))

    def write_logprobs(self, field: str) -> WorkerReport:
        """Compute `prev_logprobs`, `ref_logprobs` or `teacher_logprobs` of the shard's rows. In each replica, the
        writer rank puts them into the store as a column; those of a teacher with its most likely tokens, if wanted.

        The call is collective. Raises RuntimeError between `offload` and `onload`, and what `Teachers.score` raises.
        """
        self._require_onloaded(f"{self._name}: write_logprobs")
        work = self._begun()
        self._write_samples(work)
        if field == TEACHER:
            return self._write_teachers(work)
        fields = ("input_ids", "response_mask", *self._setup.masks, *(self._replayed if field == PREV else ()))
        with self._span(f"logprobs {field}"), closing(self._reader.stream(fields)) as micros:
            count, other = len(work.shard.sizes), self._reference if field == REF else None
            columns = (other or self._backend).logprobs(
                micros, count, reference=field == REF and other is None, temperature=self._setup.temperature
            )
        if self._writes:
            self._put(work, field, columns)
        work.written.append(field)
        return self._report({})

    def sum_logprobs(self) -> float:
        """Return the sum of the log-probs of the shard's trained tokens under the current policy, in nats. Only the
        writer rank of each replica returns the replica's sum; other ranks return 0.

        The call is collective. Raises RuntimeError between `offload` and `onload`.
        """
        self._require_onloaded(f"{self._name}: sum_logprobs")
        work = self._begun()
        with closing(self._reader.stream(("input_ids", "response_mask"))) as micros:
            columns = self._backend.logprobs(micros, len(work.shard.sizes), temperature=self._setup.temperature)
        self._reader.end()
        work.meta = None
        return sum(column.double().sum().item() for column in columns)  # It is 0 where a token is not trained on.

    def _write_teachers(self, work: _Work) -> WorkerReport:
        meta = work.meta if self._writes else None
        with self._span(f"logprobs {TEACHER}"):
            settings = (self._setup.temperature, LATE * self._setup.timeout_s)
            scored = self._teachers.score(work.shard, meta, self._reader, self._client, *settings)
        if scored is not None:
            tokens = [int(scored.lengths[rows].sum()) for rows in work.shard.ranges()]
            for name, values in scored.columns.items():
                self._put(work, name, values.split(tokens))
        work.written.append(TEACHER)
        return replace(self._report({}), divergences={} if scored is None else scored.divergences)

    def set_teachers(self, names: list[str], places: list[str], actors: Any) -> None:
        """Introduce the teachers that have engines. names: names of their actors. places: what errors say about each
        one's process and host. actors: list of Ray handles of the EngineActors."""
        self._teachers.connect(names, places, actors)

    def accumulate(self) -> WorkerReport:
        """Add the gradients of the shard's rows, microbatch by microbatch, to the open train step or a new one.

        The call is collective. A step may have any number of shards, each begun and then accumulated; the gradient does
        not depend on how rows are divided among them. On an error the step is aborted. Raises RuntimeError between
        `offload` and `onload`.
        """
        self._require_onloaded(f"{self._name}: accumulate")
        work = self._begun()
        try:
            self._write_samples(work)
            if not self._open:
                self._backend.begin_step(self._setup.temperature)
                self._open = True
            written = (*work.shard.columns, *work.written)
            top = (TOP_IDS, TOP_LOGPROBS) if TEACHER in written and self._setup.top_k else ()
            fields = (*TRAIN_FIELDS, *self._replayed, *self._setup.masks, *self._own, *written, *top)
            with self._span("forward backward"), closing(self._reader.stream(fields)) as micros:
                self._backend.accumulate(micros, len(work.shard.sizes))
        except BaseException:
            self.abort()
            raise
        finally:
            self._reader.end()
            work.meta = None
        return self._report({})

    def finish(self) -> WorkerReport:
        """Take the optimizer step with the accumulated gradients, and report the step's metrics. The call is
        collective.

        Raises RuntimeError if no step is open.
        """
        self._begun()
        if not self._open:
            raise RuntimeError(f"{self._name}: no step is open (accumulate comes before finish)")
        self._open = False
        try:
            with self._span("optimizer"):
                metrics = self._backend.finish_step()
        except BaseException:
            self._backend.abort_step()
            raise
        return self._report(metrics)

    def abort(self) -> None:
        """Drop the gradients of an open step. Idempotent; the call is not collective."""
        self._open = False
        self._backend.abort_step()

    # ---------------- These methods publish weights and keep the training state.

    @in_thread_of("weights")
    def open_update(self, version: int, receivers: Sequence[ReceiverGroup], base: int | None) -> WeightUpdate:
        """Open a weight update that will send `version`, and return its announcement for the engines `receivers`. Only
        rank 0 is called; no weights are sent yet.

        base: the version that all receivers serve; None if they differ. Raises what `WeightPublisher.open` raises.
        """
        if self._ranks is not None:
            return self._ranks.open(version, receivers, base)
        return self._publishes().open(version, self._specs, receivers, base=base)

    @in_thread_of("weights")
    def open_cached(self, version: int, receivers: Sequence[ReceiverGroup]) -> WeightUpdate:
        """Open a weight update that sends an earlier version again, and return its announcement. `send_cached` then
        sends the weights. Only rank 0 is called."""
        return self._publishes().open(version, self._specs, receivers, cached=True)

    def send_weights(self, update: WeightUpdate | None) -> SendReport | None:
        """Gather the weights and publish them as the open `update`. The call is collective.

        Rank 0 is given the update and returns a report. The other ranks are given None and return None: they only take
        part in the gathering, and only that can fail on them. If every rank sends its part, all are given the update.
        """
        if self._ranks is not None:
            assert update is not None, "every rank is given the update"
            with self._span("send weights"), self._ranks.ending(update):
                if self._backend.adapter is not None:
                    return self._ranks.send_gathered(update, self._backend.weights())
                if self._setup.sync.verify != "off":
                    self._ranks.take_digests(update.version, self._backend.weights())
                return self._ranks.send(update, self._backend.own_weights())
        assert (update is None) == (self._publisher is None), "rank 0, and no other, is given the update"
        weights = self._backend.weights()
        with self._span("send weights"):
            if update is not None:
                return self._publishes().publish(update, weights)
            for _ in weights:
                pass
        return None

    def cache_weights(self, version: int) -> None:
        """Gather the weights into rank 0's host memory as `version`, without sending them. `open_cached` can then send
        them later. The call is collective. Raises ValueError on rank 0 if the run keeps no versions there."""
        weights = self._backend.weights()
        if self._publisher is not None:
            self._publisher.cache(version, self._specs, weights)
        for _ in weights:
            pass

    @in_thread_of("weights")
    def send_cached(self, update: WeightUpdate) -> SendReport:
        """Send the `update` that `open_cached` opened, from rank 0's host memory. Runs in a separate thread, while
        the ranks do other work."""
        return self._publishes().publish_cached(update)

    @in_thread_of("abort")
    def weight_digests(self, version: int) -> ParameterDigests:
        """Return the digests with which engines compare what they loaded, see `WeightPublisher.digests`. Only rank 0 is
        called."""
        return (self._ranks or self._publishes()).digests(version)

    @in_thread_of("abort")
    def sent(self) -> int:
        """Return a progress counter: weights gathered plus cached buckets sent since the start. It is 0 on ranks that
        publish nothing.

        `TrainActor.progress` cannot replace it: it is the CPU time of the main thread, and cached weights are sent by
        another thread.
        """
        publisher = self._ranks or self._publisher
        return 0 if publisher is None else publisher.sent

    @in_thread_of("abort")
    def abort_update(self, reason: str, update: WeightUpdate | None) -> None:
        """End the open update, whichever thread is sending it. Only ranks that send are called. Idempotent.

        update: announcement of the update, which ends it even on a rank that has not begun to send it; None for the
        one that the rank sends.
        """
        if self._ranks is not None:
            self._ranks.abort(reason, update)
        else:
            self._publishes().abort(reason)

    def save(self, path: str) -> None:
        """Start a sharded checkpoint at `path`. It is written in the background while training continues, and appears
        at `path` once it is complete; see `wait_saved`.

        The call is collective.
        """
        self._backend.save(path, wait=False)

    def wait_saved(self) -> None:
        """Wait until the last checkpoint is written. Raises the error that writing it failed with."""
        self._backend.wait_saved()

    def load(self, path: str) -> None:
        """Load the checkpoint at `path`. The call is collective."""
        self._backend.load(path)

    def export_model(self, path: str) -> None:
        """Write the model as a Hugging Face folder, from rank 0. The call is collective."""
        self._backend.export_model(path)

    def offload(self) -> OffloadReport:
        """Give the device's memory back. The backend's tensors go to host memory, and the process groups are destroyed,
        because idle NCCL communicators hold memory.

        Versions of the weights in the publisher's host cache can still be sent (`send_cached`). Calls that need the
        model are refused until `onload`. The call is collective and idempotent. Raises RuntimeError while a step is
        open, and what `TrainBackend.offload` raises.
        """
        with self._span("offload"):
            report = _sum(backend.offload() for backend in self._backends)
            self._offloaded = True
            if self._groups is None:
                return report
            groups_s = self._groups.destroy(self._holders())
        return replace(report, groups_s=groups_s, device_bytes_after=device_bytes_in_use())

    def onload(self) -> OffloadReport:
        """Undo `offload`: form the process groups again, and bring the backend's tensors back to the device.

        The call is collective and idempotent. Raises RuntimeError on every rank when the groups cannot be formed even
        at a second attempt.
        """
        before, groups_s = device_bytes_in_use(), 0.0
        with self._span("onload"):
            if self._groups is not None:
                groups_s = self._groups.form_again(self._holders())
            report = _sum(backend.onload() for backend in self._backends)
            self._offloaded = False
        return replace(report, groups_s=groups_s, device_bytes_before=before)

    def memory(self) -> ProcessMemory:
        """Return the memory that this process holds now. Without NVML, its GPU memory is what torch has reserved."""
        return measure([os.getpid()], lambda: torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0)

    def close(self) -> None:
        """Close publisher, backend, reader and data-plane client. Idempotent. If closing one of them fails, its error
        is raised once all have been closed."""
        self._parts.close()

    # ---------------- These methods are private.

    def _holders(self) -> tuple[object, ...]:
        return (self._reader, *(holder for backend in self._backends for holder in backend.group_holders()))

    @property
    def _backends(self) -> list[TrainBackend]:
        return [self._backend, *filter(None, [self._reference]), *self._teachers.backends]

    def _require_onloaded(self, call: str) -> None:
        if self._offloaded:  # The check is here because the backend would refuse only in the middle of a pass.
            raise offloaded_error(call)

    def _publishes(self) -> WeightPublisher:
        if self._publisher is None:
            raise RuntimeError(f"{self._name}: only rank 0 publishes weights")
        return self._publisher

    def _begun(self) -> _Work:
        if self._work is None:
            raise RuntimeError(f"{self._name}: no step has begun (begin comes first)")
        return self._work

    @property
    def _writes(self) -> bool:
        topology, rank = self._setup.topology, self._setup.rank
        return rank == topology.writer(topology.place(rank).dp)

    def _write_samples(self, work: _Work) -> None:
        """Compute log-probs of the rows that are picked for samples.jsonl. In each replica, the writer rank appends a
        line for each row. Called before the first pass over a shard; the call is collective. No column is written to
        the store, so training is not affected."""
        if work.sampled or not work.shard.sample_passes:
            return
        work.sampled = True
        meta = self._reader.begin(work.shard.of_samples(work.meta))
        fields = ("input_ids", "response_mask", *self._setup.masks, *self._replayed)
        with self._span("logprobs of samples"), closing(self._reader.stream(fields)) as micros:
            columns = self._backend.logprobs(micros, work.shard.sample_passes, temperature=self._setup.temperature)
        file, step = self._setup.samples, work.shard.step
        if self._writes and meta is not None and file is not None and len(meta):
            masks = [mask.numpy() for mask in unpack(self._client.get(meta, ["response_mask"]))["response_mask"]]
            # `columns` is longer if other replicas have more samples, because all replicas make equally many passes.
            rows = zip(meta.keys, meta.tags["advantage"].tolist(), masks, columns, strict=False)
            most = file.config.max_tokens
            file.append([trained_line(key, step, gain, mask, own.numpy(), most) for key, gain, mask, own in rows])
        self._reader.begin(work.shard)

    def _put(self, work: _Work, field: str, columns: Sequence[torch.Tensor]) -> None:
        """Write a column of the shard's rows into the store, one microbatch at a time, and cache it in the reader."""
        meta = work.meta
        if meta is None:
            raise RuntimeError(f"{self._name}: this rank writes {field} back, but has no receipt of the rows")
        for index, (rows, values) in enumerate(zip(work.shard.ranges(), columns, strict=True)):
            if not len(rows):
                continue
            column = Jagged(values, meta.lengths[rows])
            with self._span(f"put {field}"):
                self._client.write(meta.select(rows), {field: column})
            self._reader.keep(index, field, column)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            self._spans.append(Span(name, start, time.perf_counter() - clock))

    def _report(self, metrics: dict[str, float]) -> WorkerReport:
        measured = self._reader.take_metrics()
        traced = (*self._spans, *measured.spans) if self._work is not None and self._work.shard.traced else ()
        spans = SpanTable.of(traced)
        self._spans.clear()
        kept = metrics if self._setup.rank == 0 else {}
        traffic = self._client.stats.take().to_bytes()
        return WorkerReport(kept, measured.wait_s, traffic, measured.broadcast_bytes, spans)


def _sum(reports: Iterable[OffloadReport]) -> OffloadReport:
    """Return the report of several backends of one rank that moved one after the other."""
    first, *others = reports
    for one in others:
        first = replace(
            first,
            bytes_moved=first.bytes_moved + one.bytes_moved,
            copy_s=first.copy_s + one.copy_s,
            memory_s=first.memory_s + one.memory_s,
            device_bytes_after=one.device_bytes_after,
        )
    return first
