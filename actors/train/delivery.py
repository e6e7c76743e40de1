"""Delivers microbatches to a rank in one of three ways: as an independent reader, replica leader, or sibling.

An independent rank reads for itself, a leader reads for its whole replica, and a sibling receives from its leader. A
delivery's `prepare` runs in the prefetch thread and does everything that may block. It returns a function that the
computing thread calls to get the microbatch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from ...codecs.batch import Batch
from ...codecs.blobs import BlobRows
from ...codecs.jagged import concat
from ...codecs.schema import Schema
from ...codecs.tokens.packed_rows import piece_lengths, slice_batch
from ...codecs.tokens.routes import RouteSpec
from ..protocols import Span
from ..train_backend import MicroBatch
from .links import Part, ReplicaLinks
from .step_rows import (
    ColumnCache,
    StepRows,
    TrainShard,
    cut,
    load_of,
    stage_batch,
    stage_fields,
    stage_schema,
    without_pixels,
)
from .topology import Place, Topology
from .wire import (
    PROLOGUE_BYTES,
    Header,
    PlanMismatch,
    Prologue,
    ReplicaError,
    ReplicaLost,
    RowFacts,
    aligned,
    buffer_bytes,
    decode_header,
    decode_pictures,
    describe,
    encode_error,
    encode_header,
    encode_pictures,
    fill_buffer,
    raise_error,
    read_buffer,
)

_logger = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""Longest time in seconds that a leader spends on informing its replica's other ranks of a pass that ended early."""

SHOWN_S = 1e-4
"""Seconds below which a span (a timed piece of work) is left out of reports. Columns that are cached take microseconds,
and every report goes through the driver."""

Deliver = Callable[[], MicroBatch]


class Delivery(Protocol):
    """Delivers the microbatches of one step to one rank."""

    def prepare(self, index: int, fields: Sequence[str], stop: threading.Event) -> Deliver:
        """Do everything that may block for microbatch `index`, and return the function that delivers it.

        The microbatch holds those of `fields` that this rank's pipeline stage uses. stop: event that is set when the
        pass is to end early.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Tell the other ranks of the replica that this rank has ended the pass early.

        The caller makes sure that no `prepare` is running. The call takes a bounded time and raises no network error.
        """
        ...


class RankView:
    """Cuts full rows to the slice that one rank needs, moves them to its device, and times the work."""

    def __init__(
        self, topology: Topology, rank: int, schema: Schema, device: torch.device, routes: RouteSpec | None = None
    ) -> None:
        """schema: fields of the whole rows. routes: shape of the routes of all layers; None without router replay."""
        self.topology = topology
        self.rank = rank
        self.place = topology.place(rank)
        self.routes = routes
        self.schema = stage_schema(schema, topology, self.place, routes)
        self.device = device
        self.spans: list[Span] = []
        """Timed pieces of work since the last report. Two threads append to it; it is read only while neither of them
        works."""
        self.shares_features = False
        """True if only the first rank of each replica needs pixels."""
        self.broadcast_bytes = 0
        """Number of bytes sent as leader: prologues, headers and buffers, counted once for each part of the replica."""

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context manager that times a piece of work, named `{what} {microbatch}`, for the trace. Times below SHOWN_S
        are left out."""
        start, clock = time.time(), time.perf_counter()
        try:
            yield
        finally:
            taken_s = time.perf_counter() - clock
            if taken_s >= SHOWN_S:
                self.spans.append(Span(name, start, taken_s))

    def slice(self, batch: Batch, lengths: np.ndarray, place: Place) -> Batch:
        """Return the slice of full rows that the rank at mesh coordinates `place` computes. It has the tokens of its
        context-parallel rank, and the routes of its pipeline stage. lengths: number of tokens of each row before
        slicing, int64 `[N]`."""
        topology = self.topology
        batch = stage_batch(batch, topology, place, self.routes)
        return batch if topology.cp == 1 else slice_batch(batch, lengths, topology.pad_multiple, topology.cp, place.cp)

    def fields(self, place: Place, fields: Iterable[str]) -> tuple[str, ...]:
        """Return those of `fields` that the rank at mesh coordinates `place` receives."""
        return stage_fields(self.topology, place, fields, self.routes)

    def sent_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row this rank receives, int64 `[N]`. lengths: number of tokens of each row
        before slicing, int64 `[N]`."""
        topology = self.topology
        return (
            lengths if topology.cp == 1 else piece_lengths(lengths, topology.pad_multiple, topology.cp, self.place.cp)
        )

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return an uninitialised uint8 tensor `[nbytes]` on the host, pinned when its contents go to a GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def landed(self, header: Header, lengths: np.ndarray, buffer: torch.Tensor) -> Batch:
        """Return this rank's columns in a received buffer, as views on the rank's device. lengths: number of tokens of
        each row before slicing, int64 `[N]`."""
        return read_buffer(header, self.schema, self.sent_lengths(lengths), buffer.to(self.device, non_blocking=True))

    def place_on_device(self, batch: Batch, lengths: np.ndarray) -> Batch:
        """Move `batch`, which this rank read itself, to the rank's device. A GPU takes one copy, a CPU none. lengths:
        number of tokens of each row before slicing, int64 `[N]`."""
        if self.device.type == "cpu":
            return batch
        header = describe(batch, None)
        buffer = self.host_memory(buffer_bytes(header))
        fill_buffer(batch, header, buffer)
        return self.landed(header, lengths, buffer)


def _micro(batch: Batch, facts: RowFacts, pictures: BlobRows | None = None) -> MicroBatch:
    counts = (facts.group_tokens, facts.row_tokens, facts.counted)
    return MicroBatch(batch, facts.lengths, facts.advantages, facts.group_ids, *counts, pictures)


class Independent:
    """Delivery to a rank that reads its own columns from the store and cuts its slice out of them."""

    def __init__(self, view: RankView, rows: StepRows) -> None:
        self._view = view
        self._rows = rows
        self._own = ColumnCache()

    def prepare(self, index: int, fields: Sequence[str], stop: threading.Event) -> Deliver:
        view, facts = self._view, self._rows.facts(range(index, index + 1))
        wanted = view.fields(view.place, fields)
        missing, pictures = self._own.missing(index, wanted), None
        if missing:
            with view.span(f"read {index}"):
                whole = self._rows.columns(index, missing)
            self._own.add(index, view.place_on_device(view.slice(whole, facts.lengths, view.place), facts.lengths))
        if self._rows.images is not None:
            with view.span(f"read-pictures {index}"):
                leads = view.rank == view.topology.leader(view.place.dp)
                pictures = self._rows.pictures(index, pixels=leads or not view.shares_features)
        return lambda: _micro(self._own.batch(index, wanted, len(facts.lengths)), facts, pictures)

    def give_up(self, reason: str) -> None:
        """No-op: no other rank waits for a rank that reads for itself."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A load (a group of microbatches sent together), encoded and ready for one part of the replica."""

    part: Part
    """Ranks that receive the load."""
    header: Header
    """Header of the load, which describes the buffer."""
    on_host: list[torch.Tensor]
    """uint8 tensors that gloo broadcasts in order: the prologue, then the header. The buffer follows the header in the
    same tensor, unless NCCL broadcasts it."""
    on_device: torch.Tensor | None
    """The buffer, uint8 in pinned memory, when NCCL broadcasts it; None when gloo does."""


class Leader:
    """Delivery to a replica's leader. It reads each column once, and sends each part of the replica its missing
    columns."""

    def __init__(self, view: RankView, rows: StepRows, links: ReplicaLinks, shard: TrainShard) -> None:
        self._view = view
        self._rows = rows
        self._links = links
        self._digest = shard.digest
        self._sizes = shard.sizes.tolist()
        self._own = ColumnCache()
        self._sent: dict[tuple[Part, int], set[str]] = {}
        self._next: int | None = None
        """Index in the next message that the other ranks wait for: a load (group of microbatches), or the pictures of a
        microbatch. None at the start and while one is being sent."""

    def prepare(self, index: int, fields: Sequence[str], stop: threading.Event) -> Deliver:
        load = load_of(index, len(self._sizes))
        parcels = self._send(load, fields, stop) if index == load.start else []
        pictures = None if self._rows.images is None else self._show(index, stop)
        whole = self._rows.columns(index, fields)
        return lambda: replace(self._deliver(index, load, fields, whole, parcels), pictures=pictures)

    def _show(self, index: int, stop: threading.Event) -> BlobRows:
        """Read the pictures of a microbatch, and broadcast them to the other ranks."""
        view, links = self._view, self._links
        self._next = index
        try:
            with view.span(f"read-pictures {index}"):
                pictures = self._rows.pictures(index)
                head, buffer = encode_pictures(without_pixels(pictures) if view.shares_features else pictures)
        except Exception as error:
            self._send_failure(index, error)
            raise
        self._next = None
        prologue = Prologue(self._digest, False, index, len(head), len(buffer))
        frames = [_as_tensor(prologue.to_bytes()), _as_tensor(head), *([buffer] if len(buffer) else [])]
        with view.span(f"broadcast-pictures {index}"):
            remote = links.remote()
            links.send([(part, frames) for part in remote], f"broadcast of the pictures of microbatch {index}", stop)
        view.broadcast_bytes += len(remote) * (PROLOGUE_BYTES + len(head) + len(buffer))
        self._next = index + 1
        return pictures

    def _send(self, load: range, fields: Sequence[str], stop: threading.Event) -> list[Parcel]:
        """Read a load, a group of microbatches, and broadcast everything that travels over gloo. Returns the encoded
        load for each part of the replica."""
        view, links = self._view, self._links
        self._next = load.start
        try:
            with view.span(f"read {_text(load)}"):
                whole = [self._rows.columns(number, fields) for number in load]
            batch, facts = whole[0] if len(whole) == 1 else concat(whole), self._rows.facts(load)
            parcels = [self._parcel(part, load, batch, facts) for part in links.remote()]
        except Exception as error:  # The siblings wait for this load, so any error is sent to them.
            self._send_failure(load.start, error)
            raise
        self._next = None
        with view.span(f"broadcast {_text(load)}"):
            frames = [(parcel.part, parcel.on_host) for parcel in parcels]
            links.send(frames, f"broadcast of microbatch {_text(load)}", stop)
        self._next = load.stop
        return parcels

    def _parcel(self, part: Part, load: range, batch: Batch, facts: RowFacts) -> Parcel:
        """Encode the columns of `batch` that the ranks of `part` need and have not received in this step. An earlier
        pass over the step's rows may have sent some."""
        view, sent = self._view, self._sent.get((part, load.start))
        names = [name for name in view.fields(part.place, batch) if not sent or name not in sent]
        self._sent[part, load.start] = {*(sent or ()), *names}
        sliced = view.slice(batch.subset(names), facts.lengths, part.place)
        header = describe(sliced, facts if sent is None else None)
        head, nbytes = encode_header(header), buffer_bytes(header)
        prologue = Prologue(self._digest, False, load.start, len(head), nbytes)
        view.broadcast_bytes += PROLOGUE_BYTES + len(head) + nbytes
        first = _as_tensor(prologue.to_bytes())
        if self._links.on_device:
            buffer = view.host_memory(nbytes)
            fill_buffer(sliced, header, buffer)
            return Parcel(part, header, [first, _as_tensor(head)], buffer)
        begin = aligned(len(head))
        body = torch.empty(begin + nbytes, dtype=torch.uint8)
        body[: len(head)] = _as_tensor(head)
        fill_buffer(sliced, header, body[begin:])
        return Parcel(part, header, [first, body], None)

    def _deliver(
        self, index: int, load: range, fields: Sequence[str], whole: Batch, parcels: Sequence[Parcel]
    ) -> MicroBatch:
        view, links = self._view, self._links
        for parcel in parcels:
            if parcel.on_device is not None and len(parcel.on_device):
                shared = parcel.on_device.to(view.device, non_blocking=True)
                links.share(parcel.part, shared)
                if parcel.part == links.own:
                    landed = view.landed(parcel.header, self._rows.facts(load).lengths, shared)
                    for number, part in zip(load, cut(landed, self._sizes[load.start : load.stop]), strict=True):
                        self._own.add(number, part)
        facts = self._rows.facts(range(index, index + 1))
        wanted = view.fields(view.place, fields)
        missing = self._own.missing(index, wanted)
        if missing:
            own = view.slice(whole.subset(missing), facts.lengths, view.place)
            self._own.add(index, view.place_on_device(own, facts.lengths))
        return _micro(self._own.batch(index, wanted, len(facts.lengths)), facts)

    def _send_failure(self, index: int, error: BaseException) -> None:
        """Send `error` to the siblings, which raise it. A sibling that cannot be reached fails by its own timeout."""
        body = encode_error(error)
        prologue = Prologue(self._digest, True, index, len(body), 0).to_bytes()
        frames = [(part, [_as_tensor(prologue), _as_tensor(body)]) for part in self._links.remote()]
        self._next = None
        try:
            self._links.send(frames, f"telling of a failure at microbatch {index}", threading.Event(), FAREWELL_S)
        except ReplicaLost as lost:
            _logger.warning("%s", lost)

    def give_up(self, reason: str) -> None:
        if self._next is not None:
            self._send_failure(self._next, ReplicaError(reason))


class Sibling:
    """Delivery to a rank that receives all its rows from its replica's leader."""

    def __init__(self, view: RankView, links: ReplicaLinks, shard: TrainShard) -> None:
        self._view = view
        self._links = links
        self._digest = shard.digest
        self._sizes = shard.sizes.tolist()
        self._images = shard.images
        self._own = ColumnCache()
        self._facts: dict[int, RowFacts] = {}

    def prepare(self, index: int, fields: Sequence[str], stop: threading.Event) -> Deliver:
        load = load_of(index, len(self._sizes))
        wanted = self._view.fields(self._view.place, fields)
        land = self._receive(load, wanted, stop) if index == load.start else _nothing
        pictures = None if self._images is None else self._look(index, Schema(self._images.parts), stop)

        def deliver() -> MicroBatch:
            land()
            facts = self._facts[index]
            return _micro(self._own.batch(index, wanted, len(facts.lengths)), facts, pictures)

        return deliver

    def _look(self, index: int, parts: Schema, stop: threading.Event) -> BlobRows:
        """Receive the pictures of a microbatch from the leader. parts: declaration of one picture."""
        view, links = self._view, self._links
        what, started = f"broadcast of the pictures of microbatch {index}", time.monotonic()
        with view.span(f"receive-pictures {index}"):
            prologue = Prologue.from_bytes(links.receive(PROLOGUE_BYTES, what, stop).numpy().tobytes())
            self._check(prologue, index)
            head = links.receive(prologue.header_bytes, what, stop).numpy().tobytes()
            if prologue.failed:
                raise_error(head, links.name(links.leader), "read", time.monotonic() - started)
            size = prologue.buffer_bytes
            buffer = links.receive(size, what, stop) if size else torch.empty(0, dtype=torch.uint8)
        return decode_pictures(head, parts, buffer)  # The header names the parts that were sent.

    def _receive(self, load: range, wanted: Sequence[str], stop: threading.Event) -> Callable[[], None]:
        """Receive a load (group of microbatches) from the leader. Returns the function that moves it to the device and
        caches its columns."""
        view, links = self._view, self._links
        what, started = f"broadcast of microbatch {_text(load)}", time.monotonic()
        with view.span(f"receive {_text(load)}"):
            head_bytes = links.receive(PROLOGUE_BYTES, what, stop)
            prologue = Prologue.from_bytes(head_bytes.numpy().tobytes())
            self._check(prologue, load.start)
            alone = links.on_device or prologue.failed
            begin = prologue.header_bytes if alone else aligned(prologue.header_bytes)
            behind = 0 if alone else prologue.buffer_bytes
            body = links.receive(begin + behind, what, stop, pinned=view.device.type == "cuda")
        head = body[: prologue.header_bytes].numpy().tobytes()
        if prologue.failed:
            raise_error(head, links.name(links.leader), "read", time.monotonic() - started)
        header = decode_header(head)
        missing = self._own.missing(load.start, wanted)
        if list(header.fields) != missing:
            raise PlanMismatch(
                f"{links.name(links.rank)}: got {list(header.fields)} of microbatch {_text(load)} from "
                f"{links.name(links.leader)}, expected {missing}"
            )
        sizes = self._sizes[load.start : load.stop]
        if header.facts is not None:
            self._facts.update(zip(load, header.facts.cut(sizes), strict=True))
        buffer = None if links.on_device else body[begin:]
        return lambda: self._land(load, header, prologue.buffer_bytes, buffer)

    def _check(self, prologue: Prologue, index: int) -> None:
        me, leader = self._links.name(self._links.rank), self._links.name(self._links.leader)
        if prologue.digest != self._digest:
            raise PlanMismatch(f"{me}: this rank has plan {self._digest}, but {leader} sent plan {prologue.digest}")
        if prologue.index != index:
            raise PlanMismatch(f"{me}: this rank is at microbatch {index}, but {leader} sent {prologue.index}")

    def _land(self, load: range, header: Header, nbytes: int, buffer: torch.Tensor | None) -> None:
        view = self._view
        if buffer is None:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=view.device)
            if nbytes:
                self._links.share(self._links.own, buffer)
        if header.fields:
            lengths = np.concatenate([self._facts[number].lengths for number in load])
            landed = view.landed(header, lengths, buffer)
            for number, part in zip(load, cut(landed, self._sizes[load.start : load.stop]), strict=True):
                self._own.add(number, part)

    def give_up(self, reason: str) -> None:
        """No-op: the leader finds out when its next broadcast is not received."""


def _nothing() -> None:
    """No-op: the load (group of microbatches sent together) that contains this microbatch has already been received."""


def _text(load: range) -> str:
    return str(load.start) if len(load) == 1 else f"{load.start} to {load.stop - 1}"


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
