"""Copies the parts of a bucket from local tensors into its bytes, and from its bytes into local tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .transfer_plan import Bucket, Move

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


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

    payload: uint8 `[bucket.nbytes]`. tensors: the receiver's local tensors by name, each contiguous.
    """
    _copy(bucket, payload, tensors, into_bucket=False)


def _copy(bucket: Bucket, payload: torch.Tensor, tensors: Mapping[str, torch.Tensor], *, into_bucket: bool) -> None:
    inside = [payload[move.at : move.end].view(move.dtype).view(move.shape) for move in bucket.moves]
    local = [_part(move, tensors[move.tensor]) for move in bucket.moves]
    if inside:
        with torch.no_grad():
            _copy_all(*((inside, local) if into_bucket else (local, inside)))


def _part(move: Move, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(move.shape, move.strides, tensor.storage_offset() + move.offset)
