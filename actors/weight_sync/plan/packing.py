"""Copies the parts of a bucket from local tensors into its bytes, and from its bytes into local tensors."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch

from ....codecs.memory import flat_bytes
from ....codecs.weights.conversion import convert
from ....codecs.weights.gpu_scatter import TARGET, WORD, Scatter, device_digest, scatter_kernel
from .transfer_plan import Bucket, Move


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Write a sender's parts into the bucket's bytes, converted to the dtype on the wire, and zero the gaps.

    tensors: the sender's local tensors by name, each contiguous. out: uint8 `[bucket.nbytes]`, on the same device; on a
    GPU the copies are only queued. No whole weight is made.
    """
    for before, after in zip(bucket.moves, bucket.moves[1:], strict=False):
        if before.end < after.at:
            out[before.end : after.at] = 0  # Old bytes would make two equal buckets differ.
    _copy(bucket.moves, out, tensors, into_bucket=True)


def unpack(bucket: Bucket, payload: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the parts of a verified bucket that a receiver needs into its local tensors.

    payload: uint8 `[bucket.nbytes]`. tensors: the receiver's local tensors by name, each contiguous. Raises ValueError
    for a tensor in another dtype than that on the wire.
    """
    _unpack(bucket.moves, payload, tensors)


class Unpacker:
    """Unpacks buckets and computes their digests.

    On a GPU this takes one pass over parts of tensors that stay where they are from update to update."""

    def __init__(self) -> None:
        self._key = ""
        self._kept: dict[int, _Kept] = {}

    def take(
        self,
        key: str,
        bucket: Bucket,
        payload: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        staying: Container[str],
    ) -> torch.Tensor:
        """Do what `unpack` does, and return the payload's `device_digest`; both are queued. key: `TransferPlan.key` of
        the bucket's plan. staying: names of the tensors that stay where they are."""
        if self._key != key:
            self._key, self._kept = key, {}
        there = [move for move in bucket.moves if move.tensor in staying]
        if not there:
            digest = device_digest(payload)
            _unpack(bucket.moves, payload, tensors)
            return digest
        places = [tensors[move.tensor].data_ptr() for move in there]
        kept = self._kept.get(bucket.number)
        if kept is None or kept.places != places:
            kept = self._kept[bucket.number] = _kept(bucket, there, places, tensors, payload.device)
        digest = kept.scatter(payload)
        _unpack(kept.rest, payload, tensors)
        return digest

    def clear(self) -> None:
        """Forget the places, so that their memory can be freed."""
        self._kept = {}


@dataclass(frozen=True, slots=True)
class _Kept:
    """The parts of one bucket and their places, kept from update to update."""

    places: Sequence[int]
    """Addresses of the tensors that stay."""
    scatter: Scatter
    rest: Sequence[Move]
    """Parts that `scatter` does not copy."""


def _kept(
    bucket: Bucket, staying: Sequence[Move], places: Sequence[int], tensors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> _Kept:  # fmt: skip
    """Prepare one pass for the parts that are contiguous in tensors that stay."""
    _expect_dtypes(staying, tensors)
    pieces: dict[int, torch.Tensor] = {}
    names = {move.tensor for move in staying}
    rest = [move for move in bucket.moves if move.tensor not in names]
    for move in staying:
        part = _part(move, tensors[move.tensor])
        # A tied weight has two places.
        if move.at in pieces or not _is_contiguous(move) or part.nbytes % WORD or part.data_ptr() % TARGET:
            rest.append(move)
        else:
            pieces[move.at] = flat_bytes(part)
    return _Kept(places, Scatter(bucket.nbytes, sorted(pieces.items()), device, scatter_kernel(device)), rest)


def _is_contiguous(move: Move) -> bool:
    """Return whether a part is one run of bytes in its tensor."""
    axes = enumerate(zip(move.shape, move.strides, strict=True), 1)
    return all(size == 1 or stride == math.prod(move.shape[after:]) for after, (size, stride) in axes)


def _unpack(moves: Sequence[Move], payload: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    _expect_dtypes(moves, tensors)
    _copy(moves, payload, tensors, into_bucket=False)


def _expect_dtypes(moves: Sequence[Move], tensors: Mapping[str, torch.Tensor]) -> None:
    for move in moves:
        if tensors[move.tensor].dtype != move.dtype:
            raise ValueError(f"weight {move.tensor!r}: got {tensors[move.tensor].dtype}, expected {move.dtype} as sent")


def _copy(
    moves: Sequence[Move], payload: torch.Tensor, tensors: Mapping[str, torch.Tensor], *, into_bucket: bool
) -> None:
    inside = [payload[move.at : move.end].view(move.dtype).view(move.shape) for move in moves]
    local = [_part(move, tensors[move.tensor]) for move in moves]
    convert(*((inside, local) if into_bucket else (local, inside)))


def _part(move: Move, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(move.shape, move.strides, tensor.storage_offset() + move.offset)
