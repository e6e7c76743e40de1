"""Weight buckets: named tensors as a few byte buffers of bounded size, with a plan that says what lies where.

Tensors follow one another in the order given, each at a multiple of ALIGN bytes. One that does not fit what is left of
a bucket goes on in the next, so every bucket but the last is full (but for ALIGN) and none is larger than asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from .memory import fresh
from .runs import as_bytes
from .schema import DTYPES

ALIGN = 64
"""Pieces start at multiples of this, within a bucket and within their tensor."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A tensor, or the piece of one that lies in one bucket."""

    name: str
    dtype: str
    """Wire name (`"bfloat16"`), of `schema.DTYPES`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    begin: int
    """First byte of the piece within the tensor; 0 for a whole one."""
    bucket: int
    offset: int
    """First byte of the piece within the bucket."""
    nbytes: int
    """0 for a tensor without elements."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """What lies where. Plain data for `messages.encode`; sender and receiver use the same one."""

    entries: tuple[BucketEntry, ...]
    """By bucket, then offset."""
    sizes: tuple[int, ...]
    """Bytes of each bucket."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))


def plan_buckets(named: Mapping[str, tuple[torch.dtype, Sequence[int]]], bucket_bytes: int) -> BucketPlan:
    """Lay the tensors (name -> dtype, shape) out in buckets of at most `bucket_bytes` (a multiple of ALIGN).

    The same mapping in the same order gives the same plan. Raises ValueError for a dtype that does not travel.
    """
    if bucket_bytes < ALIGN or bucket_bytes % ALIGN:
        raise ValueError(f"bucket_bytes: got {bucket_bytes}, expected a positive multiple of {ALIGN}")
    entries: list[BucketEntry] = []
    bucket, offset = 0, 0
    for name, (dtype, shape) in named.items():
        dtype_name = _dtype_name(name, dtype)
        nbytes, begin = math.prod(shape) * dtype.itemsize, 0
        while True:
            if offset == bucket_bytes and begin < nbytes:
                bucket, offset = bucket + 1, 0
            piece = min(nbytes - begin, bucket_bytes - offset)
            entries.append(BucketEntry(name, dtype_name, tuple(shape), begin, bucket, offset, piece))
            begin += piece
            offset += -(-piece // ALIGN) * ALIGN
            if begin == nbytes:
                break
    sizes = [0] * (entries[-1].bucket + 1 if entries else 0)
    for entry in entries:
        sizes[entry.bucket] = entry.offset + entry.nbytes
    return BucketPlan(tuple(entries), tuple(sizes))


def fill_bucket(plan: BucketPlan, bucket: int, named: Mapping[str, torch.Tensor], out: np.ndarray) -> int:
    """Copy the bucket's pieces of `named` into `out`; returns the xxh3 of its `plan.sizes[bucket]` bytes.

    out: writable uint8 1-D, at least that long. Tensors may be on any device, strided, and require grad.
    Raises ValueError naming a tensor that is missing or is not as planned.
    """
    _expect_bucket(plan, bucket, out)
    end = 0
    for entry in _entries(plan, bucket):
        tensor = _as_planned(entry, named)
        out[end : entry.offset] = 0  # the gap before it: what was there must not change the checksum
        end = entry.offset + entry.nbytes
        if not entry.nbytes:
            continue
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(out[entry.offset : end]).copy_(flat[entry.begin : entry.begin + entry.nbytes])
    return xxhash.xxh3_64_intdigest(out[: plan.sizes[bucket]].data)


def read_bucket(
    plan: BucketPlan, bucket: int, buffer: np.ndarray, into: dict[str, torch.Tensor], *, checksum: int
) -> None:
    """Verify the bucket's bytes and copy its pieces into the tensors of `into`, which is given those it lacks.

    buffer: uint8 1-D, at least `plan.sizes[bucket]` long, may be read-only. checksum: what `fill_bucket` returned.
    Tensors of `into` are contiguous CPU tensors. A tensor is whole once all its buckets were read (`expect_all`).
    Raises ValueError before anything is copied when bytes or tensors are not as planned.
    """
    _expect_bucket(plan, bucket, buffer)
    found = xxhash.xxh3_64_intdigest(np.ascontiguousarray(buffer[: plan.sizes[bucket]]).data)
    if found != checksum:
        raise ValueError(f"bucket {bucket}: xxh3 of the bytes read is {found:016x}, but {checksum:016x} was written")
    entries = _entries(plan, bucket)
    for entry in entries:
        if entry.name not in into:
            into[entry.name] = fresh(DTYPES[entry.dtype], entry.shape)
        if not _as_planned(entry, into).is_contiguous():
            raise ValueError(f"weight {entry.name!r}: the tensor to read into is not contiguous")
    for entry in entries:
        target = as_bytes(into[entry.name].detach())
        target[entry.begin : entry.begin + entry.nbytes] = buffer[entry.offset : entry.offset + entry.nbytes]


def expect_all(plan: BucketPlan, read: Collection[int]) -> None:
    """Raises ValueError naming the buckets of `plan` that are not among `read`, and a tensor they hold."""
    missing = sorted(set(range(len(plan.sizes))) - set(read))
    if missing:
        names = list(dict.fromkeys(entry.name for entry in plan.entries if entry.bucket in missing))
        raise ValueError(
            f"buckets {missing[:5]} of {len(plan.sizes)} are missing; they hold {names[0]!r}"
            + (f" and {len(names) - 1} more weights" if len(names) > 1 else "")
        )


def _entries(plan: BucketPlan, bucket: int) -> list[BucketEntry]:
    return [entry for entry in plan.entries if entry.bucket == bucket]


def _as_planned(entry: BucketEntry, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if entry.name not in named:
        raise ValueError(f"weight {entry.name!r}: missing, expected {entry.dtype} {list(entry.shape)} as planned")
    tensor = named[entry.name]
    if tensor.dtype != DTYPES.get(entry.dtype) or tuple(tensor.shape) != entry.shape:
        raise ValueError(
            f"weight {entry.name!r}: got {tensor.dtype} {list(tensor.shape)}, "
            f"expected {entry.dtype} {list(entry.shape)} as planned"
        )
    return tensor


def _expect_bucket(plan: BucketPlan, bucket: int, buffer: np.ndarray) -> None:
    if not 0 <= bucket < len(plan.sizes):
        raise ValueError(f"bucket {bucket}: the plan has {len(plan.sizes)} buckets")
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or len(buffer) < plan.sizes[bucket]:
        raise ValueError(
            f"bucket {bucket}: got a buffer of {buffer.dtype} {list(buffer.shape)}, "
            f"expected uint8 [{plan.sizes[bucket]}] or longer"
        )


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    wire = str(dtype).removeprefix("torch.")
    if wire not in DTYPES:
        raise ValueError(f"weight {name!r}: got dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return wire
