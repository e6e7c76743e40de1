"""Streams a train rank's microbatches in plan order, fetching the next while the current one computes.

    store --read once--> leader --prologue, header, buffer--> siblings      policy `leader`
    store --read by each rank-------------------------------> all ranks     policy `independent`

The leader is the first rank of a replica, its siblings are the others. When the leader's read fails, it sends the error
in place of a header, so that every rank of the replica raises the same error at once. When a rank died or is late, the
others raise an error that names it, at the latest at the deadline. After such a failure the ranks' broadcasts no longer
match, so the reader stays broken, and every further call raises ReplicaError.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, cast

import torch

from ...codecs.batch import Jagged
from ...codecs.schema import Schema
from ...codecs.tokens.routes import RouteSpec
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from ..protocols import Span
from ..train_backend import MicroBatch
from .delivery import Deliver, Delivery, Independent, Leader, RankView, Sibling
from .links import GRACE_S, ReplicaLinks
from .step_rows import StepRows, TrainShard
from .topology import Topology
from .wire import PrefetchStopped, ReplicaError

T = TypeVar("T")

FetchPolicy = Literal["auto", "leader", "independent"]

THREAD_END_S = 2 * GRACE_S
"""Seconds that the prefetch thread has to end after a pass over the step's rows ended early. A read of the store that
is in progress ends by its own timeout."""
CHECK_S = 1.0
"""Seconds between two checks of a waiting consumer that the prefetch thread is alive."""


def shares_reads(topology: Topology, policy: FetchPolicy) -> bool:
    """Return whether one rank of each replica, its leader, reads for the whole replica. Raises ValueError for an
    unknown policy."""
    if policy not in ("auto", "leader", "independent"):
        raise ValueError(f"trainer.fetch: got {policy!r}, expected 'auto', 'leader' or 'independent'")
    return policy != "independent" and topology.replica_size > 1


def holds_receipt(topology: Topology, policy: FetchPolicy, rank: int) -> bool:
    """Return whether `rank` needs the receipt of its replica's rows (their keys and locations). It does if it reads
    rows or writes columns back."""
    dp = topology.place(rank).dp
    return not shares_reads(topology, policy) or rank in (topology.leader(dp), topology.writer(dp))


def build_links(
    topology: Topology,
    rank: int,
    policy: FetchPolicy,
    *,
    name: str,
    timeout_s: float,
    device: torch.device,
    routes: RouteSpec | None = None,
) -> ReplicaLinks | None:
    """Create the process groups that the fetch policy needs, or return None when every rank reads for itself.

    The call is collective over the mesh, see `ReplicaLinks`.
    """
    if not shares_reads(topology, policy):
        return None
    return ReplicaLinks(topology, rank, name=name, timeout_s=timeout_s, device=device, routes=routes)


@dataclass(frozen=True, slots=True)
class ReaderMetrics:
    """Measurements of a reader since its previous report."""

    wait_s: float
    """Seconds that the computing thread waited for rows."""
    broadcast_bytes: int
    """Number of bytes broadcast to other ranks of the replica (prologues, headers and buffers), counted once for each
    group of ranks that need identical data."""
    spans: tuple[Span, ...]
    """Timed pieces of work: `read`, `broadcast` and `receive` of the prefetch thread, and `wait` of the computing
    thread."""


class ReplicaReader:
    """Reads one rank's rows, step by step. A step is `begin`, then one `stream` per pass over the step's rows, one at a
    time, all from one thread."""

    def __init__(
        self,
        client: DataPlaneClient,
        schema: Schema,
        topology: Topology,
        rank: int,
        links: ReplicaLinks | None,
        *,
        device: torch.device,
        routes: RouteSpec | None = None,
    ) -> None:
        """Create a reader. Call `begin` before reading rows.

        schema: schema that contains at least the fields to be read. links: result of `build_links`. device: device to
        which columns are delivered. routes: shape of the field `routed_experts`, of which a pipeline stage gets its own
        layers; None if `schema` has no such field.
        """
        self._client = client
        self._topology = topology
        self._links = links
        self._view = RankView(topology, rank, schema, device, routes)
        self._shard: TrainShard | None = None
        self._rows: StepRows | None = None
        self._delivery: Delivery | None = None
        self._broken = ""
        self._wait_s = 0.0

    def share_features(self) -> None:
        """Read pixels only for the first rank of each replica from now on.

        The others get the features of pictures from it. Every rank must make this call, or none.
        """
        self._view.shares_features = True

    def begin(self, shard: TrainShard) -> KVBatchMeta | None:
        """Begin the step of `shard`, drop the previous step's columns, and return the shard's receipt if it has one.
        The receipt has the keys and locations of its rows.

        Raises ValueError if the shard contradicts its own receipt, or has no receipt although this rank reads. Raises
        ReplicaError once the reader is broken.
        """
        self._require_whole("begin")
        meta = None if shard.meta is None else KVBatchMeta.from_bytes(shard.meta)
        if meta is not None and int(shard.sizes.sum()) != len(meta):
            raise ValueError(f"plan {shard.digest} has {int(shard.sizes.sum())} rows, but its receipt has {len(meta)}")
        reads = self._links is None or self._links.leads
        if reads and meta is None:
            raise ValueError(f"plan {shard.digest}: got no receipt, expected one, because rank {self._view.rank} reads")
        self._shard = shard
        self._rows = StepRows(self._client, shard, meta) if reads and meta is not None else None
        self._delivery = self._build_delivery(shard)
        return meta

    def _build_delivery(self, shard: TrainShard) -> Delivery:
        if self._links is None:
            assert self._rows is not None
            return Independent(self._view, self._rows)
        if self._rows is not None:
            return Leader(self._view, self._rows, self._links, shard)
        return Sibling(self._view, self._links, shard)

    def stream(self, fields: Sequence[str]) -> Generator[MicroBatch, None, None]:
        """Yield the step's microbatches, each with those of the columns `fields` that this rank needs.

        A pass is collective over the replica: all its ranks must ask for the same fields, in the same order of passes.
        A caller that leaves before the last microbatch must close the generator, which breaks a reader that shares its
        reads. Raises what the store raised, on every rank; ReplicaLost when a rank died or is late; PlanMismatch when
        ranks have different plans or positions; ReplicaError once the reader is broken; RuntimeError before `begin`.
        """
        self._require_whole("stream")
        delivery, shard = self._delivery, self._shard
        if delivery is None or shard is None:
            raise RuntimeError(f"rank {self._view.rank}: no step has begun; begin comes before stream")
        micros = self._stream(delivery, len(shard.sizes), tuple(fields))
        # The prefetch thread must start now: a later pipeline stage asks for a microbatch only after the first stage
        # has computed, but the first stage waits for this rank to take part in the broadcast.
        next(micros)
        return micros

    def _stream(self, delivery: Delivery, count: int, fields: tuple[str, ...]) -> Generator[MicroBatch, None, None]:
        view = self._view
        # The first pipeline stage runs ahead of the last by as many microbatches as there are stages.
        ahead: Prefetch[Deliver] = Prefetch(
            lambda index, stop: delivery.prepare(index, fields, stop),
            count,
            depth=self._topology.pp,
            name=f"rows of rank {view.rank}",
        )
        taken = 0
        try:
            yield cast(MicroBatch, None)  # `stream` takes this first value.
            while taken < count:
                start = time.perf_counter()
                with view.span(f"wait {taken}"):
                    micro = ahead.take()()
                self._wait_s += time.perf_counter() - start
                taken += 1
                yield micro
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            ended = ahead.close(THREAD_END_S)
            if taken < count:
                self._fail(delivery, f"rank {view.rank} ended a pass after {taken} of {count} microbatches", ended)

    def _fail(self, delivery: Delivery, reason: str, ended: bool) -> None:
        """Handle a pass that ended early. A reader that shares its reads is marked as broken, and ranks that wait get
        an error, unless the prefetch thread still runs."""
        if ended and not self._broken:
            delivery.give_up(reason)
        self._broken = self._broken or reason
        if self._links is None:
            self._broken = ""  # A rank that reads for itself delays no other rank.

    def keep(self, index: int, field: str, column: Jagged) -> None:
        """Cache a column of microbatch `index` that this rank has written, so that it is not read back. Does nothing on
        a rank that reads no rows."""
        if self._rows is not None:
            self._rows.keep(index, field, column)

    def end(self) -> None:
        """Drop the step's shard and its cached columns."""
        self._shard = self._rows = self._delivery = None

    def take_metrics(self) -> ReaderMetrics:
        """Return the measurements since the previous call. Call it only between passes."""
        view = self._view
        metrics = ReaderMetrics(self._wait_s, view.broadcast_bytes, tuple(view.spans))
        self._wait_s, view.broadcast_bytes = 0.0, 0
        view.spans.clear()
        return metrics

    def close(self) -> None:
        """Drop cached columns and destroy the process groups. Idempotent. The call is collective unless the reader is
        broken."""
        self.end()
        if self._links is not None:
            self._links.close()

    def _require_whole(self, call: str) -> None:
        if self._broken:
            raise ReplicaError(f"{call}: the reader of rank {self._view.rank} is broken: {self._broken}")


class Prefetch(Generic[T]):
    """Calls `make` for items 0 to count - 1, in order, in one background thread.

    `make` is called with an item's number and an event that is set when the pass ends early. Every blocking operation
    in `make` needs a time limit, and must end soon after the event is set. The thread starts an item only while fewer
    than `depth` items wait to be taken, so at most `depth` items are ready or being made.
    """

    def __init__(self, make: Callable[[int, threading.Event], T], count: int, *, depth: int, name: str) -> None:
        assert depth >= 1, depth
        self._make = make
        self._count = count
        self._depth = depth
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._taken = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True if all items have been taken."""
        return self._taken == self._count

    def take(self) -> T:
        """Return the next item, blocking until it is ready. Raises what `make` raised for the item."""
        with self._changed:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if not self._thread.is_alive():  # The lock is held, so a dead thread cannot add an item now.
                    raise RuntimeError(
                        f"{self._thread.name}: the thread ended before item {self._taken} of {self._count}"
                    )
                self._changed.wait(CHECK_S)
            self._taken += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self, timeout_s: float) -> bool:
        """Give up the remaining items, and return whether the thread ended within `timeout_s` seconds. Idempotent."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            for number in range(self._count):
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._stop.is_set())
                if self._stop.is_set():
                    raise PrefetchStopped
                item = self._make(number, self._stop)
                with self._changed:
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
