"""Weights that are spread over ranks, put together on rank 0 one after the other: a stream, never the whole model.

    every rank     own pieces --send--> slot on rank 0 --> tensor --> consumer
                   the next ones are under way meanwhile, into the other slot

Pieces travel point to point, in the dtype wanted, from where they are to where they belong. Pieces that are rows of
their tensor land in their place; others (columns) arrive one behind the other and are laid out in the other slot.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...codecs.integers import ceil_div, round_up
from ...codecs.memory import ALIGN

BATCH_BYTES = 32 << 20
"""Small weights travel together up to this much, but never more than the largest weight: each message costs some 100
us."""

OwnPiece = Callable[["SpreadWeight"], torch.Tensor]
"""This rank's piece of a weight, of any floating dtype, on any device, strided; rank 0 may return the live weight."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One of `num` consecutive parts along a dimension, all of the same size but for the last: as torch.chunk."""

    dim: int
    num: int
    index: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank gives to a weight."""

    rank: int
    cuts: tuple[Cut, ...] = ()
    """One after the other; none: it has the whole."""


@dataclass(frozen=True, slots=True)
class SpreadWeight:
    """One weight of the HF model, and who has which piece of it."""

    name: str
    dtype: torch.dtype
    """As it is streamed."""
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """They cover the weight, each element once."""
    boxed: tuple[int, ...] = ()
    """The shape in which cuts count dimensions, when that is another view of the weight; (): `shape`."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    @property
    def is_local(self) -> bool:
        """Whether rank 0 has the whole."""
        return self.pieces == (Piece(0),)

    def place(self, whole: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The view of `whole`, of this weight's shape, that `piece` fills; without elements when there is none left."""
        view = whole.view(self.boxed or self.shape)
        for cut in piece.cuts:
            size = view.shape[cut.dim]
            width = ceil_div(size, cut.num)
            start = min(cut.index * width, size)
            view = view.narrow(cut.dim, start, min(width, size - start))
        return view

    @property
    def lands_in_place(self) -> bool:
        """Whether each piece is contiguous in the whole."""
        return all(cut.dim == 0 for piece in self.pieces for cut in piece.cuts)


def stream_weights(
    weights: Sequence[SpreadWeight], own: OwnPiece, rank: int, device: torch.device
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """(name, tensor) of all `weights` in their order: whole on rank 0, empty elsewhere. Collective over the default
    process group (none is needed when rank 0 has everything): every rank iterates to the end, and sends nothing else
    over that group meanwhile.

    Rank 0's tensors are contiguous, on `device`, and valid until the next is asked for, on a GPU for work that its
    current stream was given by then; they may be the live parameters. It holds at most twice the largest weight, and
    what `own` makes (of weights that it has whole: this one and the one before); other ranks hold their pieces of two
    batches. A generator that is closed early takes part to the end; one that was never begun, or ended by an error,
    leaves the others waiting until the process group's timeout.

    Raises RuntimeError naming the weights and the ranks when a peer is gone or late.
    """
    if device.type == "cuda" and not all(weight.is_local for weight in weights):
        dist.all_reduce(torch.zeros(1, device=device))  # NCCL: no group starts with messages between some of its ranks
    stream = _receive(weights, own, device) if rank == 0 else _send(weights, own, rank, device)
    try:
        for item in stream:  # noqa: UP028 - `yield from` would close the stream, which has to go on
            yield item
    except GeneratorExit:
        for _ in stream:  # the other ranks do not know, and would wait
            pass
        raise


# ---------------------------------------------------------------- batches


@dataclass(frozen=True, slots=True)
class _Batch:
    """Weights that travel together."""

    weights: tuple[SpreadWeight, ...]
    in_place: bool
    """Whether all their pieces land where they belong."""

    @property
    def nbytes(self) -> int:
        """Of slot memory; weights that rank 0 has anyway take none."""
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
    """Bytes of the two slots, from who uses which: see `_receive`."""
    sizes, free = [0, 0], 0
    for batch in batches:
        sizes[free] = max(sizes[free], batch.nbytes)
        if not batch.in_place:
            sizes[1 - free] = max(sizes[1 - free], batch.nbytes)
        else:
            free = 1 - free
    return sizes


# ---------------------------------------------------------------- the two ends


class _Transfer:
    """Messages of one batch that are under way. Both calls raise RuntimeError naming what does not get through."""

    def __init__(self, batch: _Batch, messages: Sequence[dist.P2POp]) -> None:
        self._batch, self._messages = batch, messages  # tensors must live until they have arrived
        self._start = time.monotonic()
        with self._named():
            self._works = dist.batch_isend_irecv(list(messages)) if messages else []

    def wait(self) -> None:
        """Until all have arrived; on a GPU, until its current stream waits for them."""
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
                f"weights: {names[0]} to {names[-1]} did not get through between rank {dist.get_rank()} and ranks "
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
                piece = own(weight).to(device, weight.dtype).contiguous().view(-1)
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
    free = 0  # the slot that the next batch arrives in; the consumer has the other
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
                    place.copy_(own(weight).reshape(place.shape))
        for weight in batch.weights:
            if weight.is_local:
                yield weight.name, own(weight).to(device, weight.dtype).reshape(weight.shape).contiguous()
            else:
                yield weight.name, tensors[weight]


def _begin(batch: _Batch, slot: torch.Tensor) -> _Transfer:
    """Let what other ranks have of `batch` arrive in `slot`."""
    messages = []
    for weight, tensor in _tensors(batch, slot).items():
        for piece, room in _arrivals(weight, tensor, batch.in_place):
            messages += [dist.P2POp(dist.irecv, room, piece.rank)] if len(room) else []
    return _Transfer(batch, messages)


def _tensors(batch: _Batch, slot: torch.Tensor) -> dict[SpreadWeight, torch.Tensor]:
    """Where in `slot` each weight is that rank 0 does not have anyway."""
    found, offset = {}, 0
    for weight in batch.weights:
        if not weight.is_local:
            found[weight] = slot[offset : offset + weight.nbytes].view(weight.dtype).view(weight.shape)
            offset += _room(weight)
    return found


def _arrivals(weight: SpreadWeight, tensor: torch.Tensor, in_place: bool) -> Iterator[tuple[Piece, torch.Tensor]]:
    """(piece, flat room for it in `tensor`) of other ranks' pieces; those not `in_place` one behind the other."""
    offset = 0
    for piece in weight.pieces:
        if piece.rank != 0:
            place = weight.place(tensor, piece)
            yield piece, place.view(-1) if in_place else tensor.view(-1)[offset : offset + place.numel()]
            offset += place.numel()


def _lay_out(batch: _Batch, arrived: torch.Tensor, out: torch.Tensor) -> None:
    """Copy pieces that have arrived one behind the other to their places in `out`."""
    whole = _tensors(batch, out)
    for weight, tensor in _tensors(batch, arrived).items():
        for piece, values in _arrivals(weight, tensor, in_place=False):
            place = weight.place(whole[weight], piece)
            place.copy_(values.view_as(place))
