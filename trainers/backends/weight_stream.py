"""Streams weights that are spread over ranks to rank 0, which assembles them one after the other.

    every rank     own pieces --send--> slot on rank 0 --> tensor --> consumer
                   meanwhile the next pieces arrive in the other slot

Rank 0 never holds the whole model; it has two receive buffers, called slots. Pieces are sent point to point in the
wanted dtype. Pieces that are rows of their tensor are received in their final positions. Other pieces (columns) are
received one after the other and then copied to their positions in the other slot.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...actors.weight_sync.plan.regions import Region, place
from ...codecs.integers import ALIGN, ceil_div, round_up
from ...codecs.weights.conversion import convert, converted

BATCH_BYTES = 32 << 20
"""Largest number of bytes of several weights that are sent together as a batch. If the largest single weight is smaller
than this, its size is the limit instead. Small weights are sent in batches because each message costs about 100 us."""

OwnPiece = Callable[["SpreadWeight"], torch.Tensor]
"""Function that returns this rank's piece of a weight, in any floating-point dtype, on any device, with any strides. On
rank 0 it may return the live weight."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part `index` of a dimension cut into `num` consecutive parts, all of one size but the last, as by torch.chunk."""

    dim: int
    num: int
    index: int


def cut_box(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[slice, ...]:
    """Return the slice of each dimension that remains of a tensor of `shape` after all `cuts`, in order."""
    starts, sizes = [0] * len(shape), list(shape)
    for cut in cuts:
        width = ceil_div(sizes[cut.dim], cut.num)
        start = min(cut.index * width, sizes[cut.dim])
        starts[cut.dim] += start
        sizes[cut.dim] = min(width, sizes[cut.dim] - start)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Piece:
    """The piece of a weight that one rank has."""

    rank: int
    cuts: tuple[Cut, ...] = ()
    """Cuts applied one after the other to the weight; () when the rank has the whole weight."""


@dataclass(frozen=True, slots=True)
class SpreadWeight:
    """One weight of the HF model, and which rank holds which piece of it."""

    name: str
    dtype: torch.dtype
    """Dtype to which the weight is converted for streaming."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Pieces that together cover each element of the weight once."""
    boxed: tuple[int, ...] = ()
    """Shape to which the weight is reshaped, as a view, before it is cut; () when it is cut in its own `shape`."""
    copies: tuple[int, ...] = (0,)
    """Offsets from the rank of a piece to all ranks that have the same piece, 0 among them."""
    exact: bool = False
    """True if engines keep the weight in float32, whatever the dtype of the others."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def is_local(self) -> bool:
        """True if rank 0 has the whole weight."""
        return self.pieces == (Piece(0),)

    def place(self, whole: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the part of `whole`, a tensor of this weight's shape, that `piece` fills, as a view. The view is empty
        for a piece without elements."""
        view = whole.view(self.boxed or self.shape)
        return view[cut_box(view.shape, piece.cuts)]

    @property
    def lands_in_place(self) -> bool:
        """True if every piece is contiguous in the whole weight, so that it can be received in its final position."""
        return all(cut.dim == 0 for piece in self.pieces for cut in piece.cuts)


def rank_regions(weights: Sequence[SpreadWeight], world: int) -> tuple[tuple[Region, ...], ...]:
    """Return the regions of the weights that each of `world` ranks has. The local tensor of a weight, under its name,
    is what `OwnPiece` returns."""
    found: list[list[Region]] = [[] for _ in range(world)]
    for weight in weights:
        for piece in weight.pieces:
            box = tuple((part.start, part.stop) for part in cut_box(weight.boxed or weight.shape, piece.cuts))
            if all(start < stop for start, stop in box):
                for offset in weight.copies:
                    found[piece.rank + offset] += _as_stacked(place(weight.name, box), weight)
    return tuple(map(tuple, found))


def _as_stacked(region: Region, weight: SpreadWeight) -> Iterator[Region]:
    """Yield a region in the `boxed` shape of a weight as regions in the weight's own shape.

    For example, the boxed shape is `[experts, 2, rows, columns]`, and its own shape `[experts, 2 * rows, columns]`.
    """
    if not weight.boxed:
        yield region
        return
    (first, (low, high), (start, stop), *rest), rows = region.box, weight.boxed[2]
    for number in range(low, high):
        box = (first, (number * rows + start, number * rows + stop), *rest)
        strides = (region.strides[0], *region.strides[2:])
        yield Region(weight.name, box, region.tensor, (number - low) * region.strides[1], strides)


def stream_weights(
    weights: Sequence[SpreadWeight], own: OwnPiece, rank: int, device: torch.device
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield (name, tensor) of all `weights` in their order. The tensors are whole on rank 0 and empty on the other
    ranks.

    Collective over the default process group, which is not needed when rank 0 has everything. Every rank must iterate
    to the end and send nothing else over that group meanwhile.

    Rank 0's tensors are contiguous, on `device`, and may be the live parameters. Each is valid until the next one is
    requested; on a GPU, work that was queued on the current stream by then may still use it. Rank 0 needs memory for at
    most twice the largest weight, plus the tensors that `own` allocates: when rank 0 has whole weights itself, up to
    two of these are alive, the current one and the one before. Other ranks hold their pieces of two batches.

    A generator that is closed early still streams to the end, because the other ranks would wait. A generator that was
    never started, or that an error ended, leaves the other ranks waiting until the process group's timeout.

    Raises RuntimeError naming the weights and the ranks when another rank has died or does not answer within the
    timeout.
    """
    if device.type == "cuda" and not all(weight.is_local for weight in weights):
        # An NCCL group cannot start with messages between only some of its ranks.
        dist.all_reduce(torch.zeros(1, device=device))
    stream = _receive(weights, own, device) if rank == 0 else _send(weights, own, rank, device)
    try:
        for item in stream:  # noqa: UP028 - `yield from` would close the stream, which has to continue
            yield item
    except GeneratorExit:
        for _ in stream:  # The other ranks do not know that the stream was closed, and would wait.
            pass
        raise


# ---------------- Small weights are sent together in batches.


@dataclass(frozen=True, slots=True)
class _Batch:
    """Weights whose pieces are sent together, because each message has a fixed cost."""

    weights: tuple[SpreadWeight, ...]
    in_place: bool
    """True if all pieces of the weights are received in their final positions."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that the batch occupies in one of rank 0's two receive buffers. Weights that rank 0 itself
        has whole are not received and need no space."""
        return sum(_room(weight) for weight in self.weights)


def _room(weight: SpreadWeight) -> int:
    return 0 if weight.is_local else round_up(weight.nbytes, ALIGN)


def _batches(weights: Sequence[SpreadWeight]) -> list[_Batch]:
    limit = min(BATCH_BYTES, max((_room(weight) for weight in weights), default=0))
    found: list[_Batch] = []
    members: list[SpreadWeight] = []
    room, in_place = 0, True
    for weight in weights:
        direct = weight.lands_in_place
        if members and (direct != in_place or room + _room(weight) > limit):
            found.append(_Batch(tuple(members), in_place))
            members, room = [], 0
        members.append(weight)
        room, in_place = room + _room(weight), direct
    return [*found, _Batch(tuple(members), in_place)] if members else found


def _slot_sizes(batches: Sequence[_Batch]) -> list[int]:
    """Return the number of bytes that each of rank 0's two receive buffers needs. The buffers are assigned to the
    batches in the same order as in `_receive`."""
    sizes, free = [0, 0], 0
    for batch in batches:
        sizes[free] = max(sizes[free], batch.nbytes)
        if not batch.in_place:
            sizes[1 - free] = max(sizes[1 - free], batch.nbytes)
        else:
            free = 1 - free
    return sizes


# ---------------- These functions send and receive one batch.


class _Transfer:
    """The send and receive operations of one batch of weights, started when the object is created. If one fails, a
    RuntimeError names the weights."""

    def __init__(self, batch: _Batch, messages: Sequence[dist.P2POp]) -> None:
        self._batch, self._messages = batch, messages  # Tensors must stay alive until they have arrived.
        self._start = time.monotonic()
        with self._named():
            self._works = dist.batch_isend_irecv(list(messages)) if messages else []

    def wait(self) -> None:
        """Wait until all messages have arrived. On a GPU, only make the current stream wait for them."""
        with self._named():
            for work in self._works:
                work.wait()
        self._messages = ()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            names = [weight.name for weight in self._batch.weights]
            peers = sorted({message.peer for message in self._messages})
            raise RuntimeError(
                f"weights: {names[0]} to {names[-1]} were not transferred between rank {dist.get_rank()} and ranks "
                f"{peers} in {time.monotonic() - self._start:.1f} s: {error}"
            ) from error


def _send(
    weights: Sequence[SpreadWeight], own: OwnPiece, rank: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    before: _Transfer | None = None
    for batch in _batches(weights):
        messages = []
        for weight in batch.weights:
            if any(piece.rank == rank for piece in weight.pieces):
                piece = converted(own(weight), weight.dtype, device).contiguous().view(-1)
                messages += [dist.P2POp(dist.isend, piece, 0)] if len(piece) else []
        transfer = _Transfer(batch, messages)
        if before is not None:
            before.wait()
        before = transfer
        for weight in batch.weights:
            yield weight.name, torch.empty(0, dtype=weight.dtype, device=device)
    if before is not None:
        before.wait()


def _receive(
    weights: Sequence[SpreadWeight], own: OwnPiece, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    batches = _batches(weights)
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for size in _slot_sizes(batches)]
    free = 0  # The next batch arrives in the slot `free`; the consumer has the other slot.
    coming = _begin(batches[0], slots[free]) if batches else None
    for batch, following in itertools.zip_longest(batches, batches[1:]):
        assert coming is not None
        coming.wait()
        arrived, other = slots[free], slots[1 - free]
        if batch.in_place:
            free = 1 - free
            ready = arrived
        else:
            _lay_out(batch, arrived, other)
            ready = other
        coming = _begin(following, slots[free]) if following is not None else None
        tensors = _tensors(batch, ready)
        for weight, tensor in tensors.items():
            for piece in weight.pieces:
                if piece.rank == 0:
                    place = weight.place(tensor, piece)
                    convert([place], [own(weight).reshape(place.shape)])
        for weight in batch.weights:
            if weight.is_local:
                whole = converted(own(weight), weight.dtype, device)
                yield weight.name, whole.reshape(weight.shape).contiguous()
            else:
                yield weight.name, tensors[weight]


def _begin(batch: _Batch, slot: torch.Tensor) -> _Transfer:
    """Start to receive the other ranks' pieces of `batch` in the receive buffer `slot` of rank 0."""
    messages = []
    for weight, tensor in _tensors(batch, slot).items():
        for piece, room in _arrivals(weight, tensor, batch.in_place):
            messages += [dist.P2POp(dist.irecv, room, piece.rank)] if len(room) else []
    return _Transfer(batch, messages)


def _tensors(batch: _Batch, slot: torch.Tensor) -> dict[SpreadWeight, torch.Tensor]:
    """Return a view of the buffer `slot` for each weight of the batch, except weights that rank 0 itself has whole."""
    found, offset = {}, 0
    for weight in batch.weights:
        if not weight.is_local:
            found[weight] = slot[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            offset += _room(weight)
    return found


def _arrivals(weight: SpreadWeight, tensor: torch.Tensor, in_place: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yield each piece that another rank sends, with the flat view of `tensor` that receives it.

    If `in_place` is true, this view is the piece's final position; otherwise the pieces are received one after the
    other.
    """
    offset = 0
    for piece in weight.pieces:
        if piece.rank != 0:
            place = weight.place(tensor, piece)
            yield piece, place.view(-1) if in_place else tensor.view(-1)[offset : offset + place.numel()]
            offset += place.numel()


def _lay_out(batch: _Batch, arrived: torch.Tensor, out: torch.Tensor) -> None:
    """Copy pieces that arrived one after the other in the buffer `arrived` to their final positions in `out`."""
    whole = _tensors(batch, out)
    for weight, tensor in _tensors(batch, arrived).items():
        for piece, values in _arrivals(weight, tensor, in_place=False):
            place = weight.place(whole[weight], piece)
            place.copy_(values.view_as(place))


class WeightSource(Protocol):
    """Interface for reading parts of a HF model's weights. Each part is returned in host memory, in the dtype of the
    model's files."""

    def empty_model(self, dtype: torch.dtype | None = None) -> Any:
        """Return the HF model on the meta device, without values of its weights."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """Return a context manager in which many reads are fast."""
        ...

    def pieces(self, name: str, ranges: tuple[slice, ...]) -> Iterable[tuple[tuple[slice, ...], torch.Tensor]]:
        """Return a part of the tensor `name` in pieces: the place of each in that part, and its values. `ranges` has
        one slice for each dimension."""
        ...
