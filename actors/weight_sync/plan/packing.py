"""Copies the parts of a bucket from local tensors into its bytes, and from its bytes into local tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ....codecs.weights.conversion import convert
from .transfer_plan import Bucket, Move


def pack(bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Write a sender's parts into the bucket's bytes, converted to the dtype on the wire, and zero the gaps.

    tensors: the sender's local tensors by name, each contiguous. out: uint8 `[bucket.nbytes]`, on the same device; on a
    GPU the copies are only queued. No whole weight is made.
    """
    for before, after in zip(bucket.moves, bucket.moves[1:], strict=False):
        if before.end < after.at:
            out[before.end : after.at] = 0  # Old bytes would make two equal buckets differ.
    _copy(bucket, out, tensors, into_bucket=True)


def unpack(bucket: Bucket, payload: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the parts of a verified bucket that a receiver needs into its local tensors.

    payload: uint8 `[bucket.nbytes]`. tensors: the receiver's local tensors by name, each contiguous. Raises ValueError
    for a tensor in another dtype than that on the wire.
    """
    for move in bucket.moves:
        if tensors[move.tensor].dtype != move.dtype:
            raise ValueError(f"weight {move.tensor!r}: got {tensors[move.tensor].dtype}, expected {move.dtype} as sent")
    _copy(bucket, payload, tensors, into_bucket=False)


def _copy(bucket: Bucket, payload: torch.Tensor, tensors: Mapping[str, torch.Tensor], *, into_bucket: bool) -> None:
    inside = [payload[move.at : move.end].view(move.dtype).view(move.shape) for move in bucket.moves]
    local = [_part(move, tensors[move.tensor]) for move in bucket.moves]
    convert(*((inside, local) if into_bucket else (local, inside)))


def _part(move: Move, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(move.shape, move.strides, tensor.storage_offset() + move.offset)
