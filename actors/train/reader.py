"""Streams a train rank's microbatches in plan order, fetching the next while the current one computes.

    store --read once--> leader --prologue, header, buffer--> siblings      policy `leader`
    store --read by each rank-------------------------------> all ranks     policy `independent`

The leader is the first rank of a replica, its siblings are the others. When the leader's read fails, it sends the error
in place of a header, so that every rank of the replica raises the same error at once. When a rank died or is late, the
others raise an error that names it, at the latest at the deadline. After such a failure the ranks' broadcasts no longer
match, so the reader is broken for good, and every further call raises ReplicaError.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from ...codecs.batch import Jagged
from ...codecs.schema import Schema
from ...codecs.tokens.routes import RouteSpec
from ...dataplane.client.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from ..protocols import MicroBatch, Span
from .links import GRACE_S, ReplicaLinks
from .prefetch import Prefetch
from .roles import Deliver, Independent, Leader, RankView, Role, Sibling
from .step_rows import StepRows, TrainShard
from .topology import Topology
from .wire import ReplicaError

FetchPolicy = Literal["auto", "leader", "independent"]

THREAD_END_S = 2 * GRACE_S
"""Seconds that the prefetch thread gets to end after a pass over the step's rows is given up. A read of the store that
is in progress ends by its own timeout."""


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
        self._role: Role | None = None
        self._broken = ""
        self._wait_s = 0.0

    def begin(self, shard: TrainShard) -> KVBatchMeta | None:
        """Begin the step of `shard`, drop the previous step's columns, and return the shard's receipt if it has one.
        The receipt has the keys and locations of its rows.

        Raises ValueError if the shard contradicts its own receipt, or has none although this rank reads. Raises
        ReplicaError once the reader is broken.
        """
        self._require_whole("begin")
        meta = None if shard.meta is None else KVBatchMeta.from_bytes(shard.meta)
        if meta is not None and int(shard.sizes.sum()) != len(meta):
            raise ValueError(f"plan {shard.digest}: has {int(shard.sizes.sum())} rows, but its receipt has {len(meta)}")
        reads = self._links is None or self._links.leads
        if reads and meta is None:
            raise ValueError(f"plan {shard.digest}: got no receipt, expected one, as rank {self._view.rank} reads")
        self._shard = shard
        self._rows = StepRows(self._client, shard, meta) if reads and meta is not None else None
        self._role = self._build_role(shard)
        return meta

    def _build_role(self, shard: TrainShard) -> Role:
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
        role, shard = self._role, self._shard
        if role is None or shard is None:
            raise RuntimeError(f"rank {self._view.rank}: no step has begun; begin comes before stream")
        micros = self._stream(role, len(shard.sizes), tuple(fields))
        # Its thread starts now, not when the first microbatch is asked for: a later pipeline stage asks only once the
        # first stage has computed, which waits for this rank to take part in the broadcast.
        next(micros)
        return micros

    def _stream(self, role: Role, count: int, fields: tuple[str, ...]) -> Generator[MicroBatch, None, None]:
        view = self._view
        # A first stage runs ahead of the last by as many microbatches as there are stages.
        ahead: Prefetch[Deliver] = Prefetch(
            lambda index, stop: role.prepare(index, fields, stop),
            count,
            depth=self._topology.pp,
            name=f"rows of rank {view.rank}",
        )
        taken = 0
        try:
            yield cast(MicroBatch, None)  # to `stream`
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
                self._fail(role, f"rank {view.rank} gave a pass up after {taken} of {count} microbatches", ended)

    def _fail(self, role: Role, reason: str, ended: bool) -> None:
        """Handle a pass that ended early. A reader that shares its reads is marked as broken, and ranks that wait get
        an error, unless the prefetch thread still runs."""
        if ended and not self._broken:
            role.give_up(reason)
        self._broken = self._broken or reason
        if self._links is None:
            self._broken = ""  # a rank that reads for itself holds no other up

    def keep(self, index: int, field: str, column: Jagged) -> None:
        """Cache a column of microbatch `index` that this rank has written, so that it is not read back. Does nothing on
        a rank that reads no rows."""
        if self._rows is not None:
            self._rows.keep(index, field, column)

    def end(self) -> None:
        """Drop the step's shard and its cached columns."""
        self._shard = self._rows = self._role = None

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
