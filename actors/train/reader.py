"""A train rank's rows, microbatch by microbatch in plan order: the next one is fetched while this one computes.

    store --read once--> leader --prologue, header, buffer--> siblings      policy `leader`
    store --read by each rank-------------------------------> all ranks     policy `independent`

The leader's failure travels in place of a header, so that every rank of the replica raises the same error at once. A
rank that died or is late is named within the bound. Then the ranks' broadcasts no longer fit one another: the reader is
broken for good and says so at every further call.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from ...codecs.batch import Jagged
from ...codecs.schema import Schema
from ...dataplane.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from ...dataplane.topology import Topology
from ..protocols import MicroBatch, Span
from .links import GRACE_S, ReplicaLinks
from .prefetch import Prefetch
from .roles import Deliver, Independent, Leader, RankView, Role, Sibling
from .step_rows import StepRows, TrainShard
from .wire import ReplicaError

FetchPolicy = Literal["auto", "leader", "independent"]

THREAD_END_S = 2 * GRACE_S
"""Bound of the prefetch thread's end once a pass is given up; a read of the store that is under way ends by itself."""


def shares_reads(topology: Topology, policy: FetchPolicy) -> bool:
    """Whether leaders read for their replicas."""
    if policy not in ("auto", "leader", "independent"):
        raise ValueError(f"trainer.fetch: got {policy!r}, expected 'auto', 'leader' or 'independent'")
    return policy != "independent" and topology.replica_size > 1


def holds_receipt(topology: Topology, policy: FetchPolicy, rank: int) -> bool:
    """Whether `rank` is shipped its replica's receipt: it reads from the store or writes columns back."""
    dp = topology.place(rank).dp
    return not shares_reads(topology, policy) or rank in (topology.leader(dp), topology.writer(dp))


def build_links(
    topology: Topology, rank: int, policy: FetchPolicy, *, name: str, timeout_s: float, device: torch.device
) -> ReplicaLinks | None:
    """The groups that the policy needs; None when every rank reads for itself. Collective, see `ReplicaLinks`."""
    if not shares_reads(topology, policy):
        return None
    return ReplicaLinks(topology, rank, name=name, timeout_s=timeout_s, device=device)


@dataclass(frozen=True, slots=True)
class ReaderFigures:
    """What a reader did since it was last asked."""

    wait_s: float
    """Seconds that the computing thread waited for rows."""
    broadcast_bytes: int
    """Sent to siblings: prologues, headers and buffers, once for each part of the replica."""
    spans: tuple[Span, ...]
    """`read`, `broadcast`, `receive` of the prefetch thread, `wait` of the computing one."""


class ReplicaReader:
    """See the module's docstring. For one thread; `begin`, then any number of passes, one at a time."""

    def __init__(
        self,
        client: DataPlaneClient,
        schema: Schema,
        topology: Topology,
        rank: int,
        links: ReplicaLinks | None,
        *,
        device: torch.device,
    ) -> None:
        """schema: of the partition, at least. links: from `build_links`. device: where columns are delivered."""
        self._client = client
        self._topology = topology
        self._links = links
        self._view = RankView(topology, rank, schema, device)
        self._shard: TrainShard | None = None
        self._rows: StepRows | None = None
        self._role: Role | None = None
        self._broken = ""
        self._wait_s = 0.0

    def begin(self, shard: TrainShard) -> KVBatchMeta | None:
        """Take a step's shard and let go of the last one's columns; returns its receipt where it has one.

        Raises ValueError for a shard that does not agree with itself, or comes without the receipt that this rank
        reads by.
        """
        self._require_whole("begin")
        meta = None if shard.meta is None else KVBatchMeta.from_bytes(shard.meta)
        if meta is not None and int(shard.sizes.sum()) != len(meta):
            raise ValueError(f"plan {shard.digest}: has {int(shard.sizes.sum())} rows, its receipt {len(meta)}")
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
        """The step's microbatches with the named columns, of which this rank gets what it needs.

        Collective over the replica: all its ranks ask for the same fields in the same order of passes. Close it when
        leaving it before the last microbatch; that breaks a shared reader.
        Raises what the store raised, on every rank; ReplicaLost, PlanMismatch; ReplicaError once broken.
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
        """A pass ended early: tell who waits, unless the thread is still at it."""
        if ended and not self._broken:
            role.give_up(reason)
        self._broken = self._broken or reason
        if self._links is None:
            self._broken = ""  # nobody is out of step with a rank that reads for itself

    def keep(self, index: int, field: str, column: Jagged) -> None:
        """This rank, its replica's writer, has written a column of microbatch `index`. Where it is also the one that
        reads, it need not be read."""
        if self._rows is not None:
            self._rows.keep(index, field, column)

    def end(self) -> None:
        """Let go of the step's columns."""
        self._shard = self._rows = self._role = None

    def figures(self) -> ReaderFigures:
        """Since the last call; between passes only."""
        view = self._view
        figures = ReaderFigures(self._wait_s, view.broadcast_bytes, tuple(view.spans))
        self._wait_s, view.broadcast_bytes = 0.0, 0
        view.spans.clear()
        return figures

    def close(self) -> None:
        """Let go of columns and groups. Idempotent; collective unless broken."""
        self.end()
        if self._links is not None:
            self._links.close()

    def _require_whole(self, call: str) -> None:
        if self._broken:
            raise ReplicaError(f"{call}: the reader of rank {self._view.rank} is broken: {self._broken}")
