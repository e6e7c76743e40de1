"""Packs named weight tensors into byte buffers of bounded size (buckets), in full or as differences.

Tensors follow one another in the order given, each at a multiple of ALIGN bytes. A tensor that does not fit into the
rest of a bucket continues in the next one. Every bucket but the last is therefore full (except for alignment). Laid end
to end, each rounded up to ALIGN bytes, the buckets hold every tensor in one piece.

The differences of a bucket from an earlier version are sent when they take fewer bytes than the bucket. Such a payload
is little-endian: a header, the positions of the changed elements, padding to 8 bytes, and the new bits of the changed
elements in order. The positions take the shortest of several forms. One is a bitmap, with one bit per element. The
others give for each changed element the number of unchanged elements since the last changed one, as integers of 1, 2 or
4 bytes; the largest such integer, L, means "L unchanged elements, and no changed one yet".
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import struct
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from .. import messages
from ..integers import ALIGN, ceil_div, round_up
from ..memory import flat_bytes, fresh
from ..schema import DTYPES
from .gpu_scatter import device_digest

CHUNK_BYTES = 512 << 10
"""Number of bytes copied and hashed at a time, so that they are still in the CPU cache when they are hashed."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """Location of a tensor in a bucket (a byte buffer), or of one piece of a tensor that spans several buckets."""

    name: str
    dtype: str
    """Name of the dtype as encoded in messages, such as `"bfloat16"`, from `schema.DTYPES`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """First byte of the piece within the tensor; 0 for a whole tensor."""
    bucket: int
    offset: int
    """First byte of the piece within the bucket."""
    nbytes: int
    """Number of bytes of the piece; 0 for a tensor without elements."""


@dataclass(frozen=True)
class BucketPlan:
    """Location of every tensor in the buckets of a weight update; sender and receiver use the same plan.

    `messages` can encode it. The encoded form is cached (`message`), because most updates have the same plan as the
    previous update, and encoding, decoding or comparing 300 entries takes a millisecond.
    """

    entries: tuple[BucketEntry, ...]
    """Entries in the order of the tensors. This is also the order by bucket, then by offset."""
    sizes: tuple[int, ...]
    """Number of bytes of each bucket."""

    @functools.cached_property
    def message(self) -> bytes:
        """The plan encoded as bytes; `read_plan` decodes them."""
        return messages.encode(self)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(dict.fromkeys(entry.name for entry in self.entries))

    @functools.cached_property
    def weights(self) -> tuple[tuple[str, tuple[BucketEntry, ...]], ...]:
        """Name and entries of each tensor, in the order of the tensors."""
        by_name = itertools.groupby(self.entries, lambda entry: entry.name)
        return tuple((name, tuple(entries)) for name, entries in by_name)

    @functools.cached_property
    def pieces(self) -> Mapping[int, int]:
        """Number of entries in each bucket: bucket number -> count."""
        return Counter(entry.bucket for entry in self.entries)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all buckets together."""
        return sum(self.sizes)

    def in_bucket(self, bucket: int) -> tuple[BucketEntry, ...]:
        """Return the bucket's entries in order. Raises ValueError when there is no such bucket."""
        if not 0 <= bucket < len(self.sizes):
            raise ValueError(f"bucket {bucket} is not in the plan, which has {len(self.sizes)} buckets")
        first = bisect.bisect_left(self.entries, bucket, key=_bucket_of)
        return self.entries[first : bisect.bisect_right(self.entries, bucket, lo=first, key=_bucket_of)]


@functools.lru_cache(maxsize=4)
def read_plan(message: bytes) -> BucketPlan:
    """Decode a plan from `BucketPlan.message`. The last few plans are cached, so the same bytes then give the same
    object. Raises ValueError for bytes that are not a plan."""
    return messages.decode(message, BucketPlan)


def plan_buckets(named: Mapping[str, tuple[torch.dtype, Sequence[int]]], bucket_bytes: int) -> BucketPlan:
    """Plan the location of every tensor in buckets of at most `bucket_bytes` bytes.

    named: name -> (dtype, shape). bucket_bytes: a multiple of ALIGN. The same mapping in the same order gives the same
    plan. Raises ValueError for a dtype that cannot be sent, and for a `bucket_bytes` that is not a positive multiple of
    ALIGN.
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
            offset += round_up(piece, ALIGN)
            if begin == nbytes:
                break
    sizes = [0] * (entries[-1].bucket + 1 if entries else 0)
    for entry in entries:
        sizes[entry.bucket] = entry.offset + entry.nbytes
    return BucketPlan(tuple(entries), tuple(sizes))


def write_piece(
    entry: BucketEntry, tensor: torch.Tensor, out: torch.Tensor, digest: xxhash.xxh3_64 | None = None
) -> None:
    """Copy the piece of `tensor` that `entry` describes into its bucket `out`, and zero the padding after it.

    tensor: the whole tensor, on any device; can be strided and require grad. out: uint8 `[plan.sizes[bucket]]`, on any
    device; on a GPU the copy is only queued. digest (CPU buckets only): hash to update with the written bytes. Once all
    entries of the bucket have been written in order, it is the bucket's `checksum`. Raises ValueError when the tensor
    or `out` does not match the plan.
    """
    check_planned(entry, tensor)
    end = entry.offset + entry.nbytes
    if out.dtype != torch.uint8 or out.ndim != 1 or len(out) < end:
        raise ValueError(
            f"bucket {entry.bucket}: got a buffer of {out.dtype} {list(out.shape)}, expected uint8 [{end}] or longer"
        )
    gap = min(-end % ALIGN, len(out) - end)
    if gap:
        out[end : end + gap] = 0  # Old bytes must not change the checksum.
    if entry.nbytes:
        flat = flat_bytes(tensor.contiguous())
        copy_bytes(flat[entry.begin : entry.begin + entry.nbytes], out[entry.offset : end], digest)
    if digest is not None and gap:
        digest.update(out[end : end + gap].numpy().data)


def queue_whole(entry: BucketEntry, tensor: torch.Tensor, out: torch.Tensor, place: torch.Tensor) -> None:
    """Queue the copy of a tensor that lies entirely in one GPU bucket, and zero the padding after it. It is a faster
    form of `write_piece`. place: destination of the tensor, a view of the bucket `out` with the tensor's dtype and
    shape. The copy is a single torch call, so that all weights of a model (about 300) can be queued within 10 ms.
    """
    end = entry.offset + entry.nbytes
    if end % ALIGN and end < len(out):
        out[end : end + min(-end % ALIGN, len(out) - end)] = 0
    place.copy_(tensor.detach() if tensor.requires_grad else tensor)


def read_bucket(plan: BucketPlan, bucket: int, payload: torch.Tensor, into: dict[str, torch.Tensor]) -> None:
    """Copy all pieces in a bucket into the tensors of `into` (name -> tensor), adding tensors that are missing there.

    payload: the whole bucket, already verified: uint8 1-D, at least `plan.sizes[bucket]` long, on any device; new
    tensors are made on that device. Tensors of `into` must be contiguous. A tensor is complete once all buckets that
    contain pieces of it have been read (`expect_all` checks this). Raises ValueError before anything is copied when the
    payload or a tensor does not match the plan.
    """
    entries = plan.in_bucket(bucket)
    if payload.dtype != torch.uint8 or payload.ndim != 1 or len(payload) < plan.sizes[bucket]:
        raise ValueError(
            f"bucket {bucket}: got a payload of {payload.dtype} {list(payload.shape)}, "
            f"expected uint8 [{plan.sizes[bucket]}] or longer"
        )
    for entry in entries:
        if entry.name not in into:
            into[entry.name] = _empty(entry, payload.device)
        check_planned(entry, into[entry.name])
        if not into[entry.name].is_contiguous():
            raise ValueError(f"weight {entry.name!r}: the tensor to read into is not contiguous")
    for entry in entries:
        if entry.nbytes:
            target = flat_bytes(into[entry.name])
            piece = payload[entry.offset : entry.offset + entry.nbytes]
            target[entry.begin : entry.begin + entry.nbytes].copy_(piece)


def expect_all(plan: BucketPlan, read: Collection[int]) -> None:
    """Raise ValueError unless `read`, the numbers of the buckets that were read, includes every bucket of `plan`. The
    message names the missing buckets and one tensor stored in them."""
    missing = set(range(len(plan.sizes))) - set(read)
    if missing:
        names = list(dict.fromkeys(entry.name for entry in plan.entries if entry.bucket in missing))
        raise ValueError(
            f"buckets {sorted(missing)[:5]} of {len(plan.sizes)} are missing; they hold {names[0]!r}"
            + (f" and {len(names) - 1} more weights" if len(names) > 1 else "")
        )


def check_planned(entry: BucketEntry, tensor: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` has the dtype and shape that `entry` plans. The message gives both dtypes and
    shapes."""
    if tensor.dtype != DTYPES.get(entry.dtype) or tuple(tensor.shape) != entry.shape:
        raise ValueError(
            f"weight {entry.name!r}: got {tensor.dtype} {list(tensor.shape)}, "
            f"expected {entry.dtype} {list(entry.shape)} as planned"
        )


def checksum(payload: torch.Tensor) -> int:
    """Return a 64-bit checksum of `payload` (uint8 `[n]`, contiguous). With it a receiver checks that the payload
    arrived intact. Sender and receiver must hold the payload on the same kind of device. On the CPU the checksum is
    xxh3_64 of the bytes; on a GPU it is `gpu_scatter.device_digest`, and this call waits for it. Raises ValueError for
    a tensor of another dtype or shape, and for one that is not contiguous.
    """
    if payload.dtype != torch.uint8 or payload.ndim != 1 or not payload.is_contiguous():
        raise ValueError(f"checksum: got {payload.dtype} {list(payload.shape)}, expected contiguous uint8 [n]")
    if payload.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(payload.numpy().data)
    return int(device_digest(payload)) & (1 << 64) - 1


def copy_bytes(source: torch.Tensor, out: torch.Tensor, digest: xxhash.xxh3_64 | None = None) -> None:
    """Copy `source` to `out` (both uint8 `[n]`, on any devices). digest: hash to update with the bytes; only for an
    `out` on the CPU."""
    if digest is None or source.device.type != "cpu":
        out.copy_(source)
        if digest is not None:
            digest.update(out.numpy().data)
        return
    target = out.numpy()
    for start in range(0, len(target), CHUNK_BYTES):
        # The source is not viewed by numpy, because torch would then never let the trainer free its storage to offload
        # it.
        out[start : start + CHUNK_BYTES].copy_(source[start : start + CHUNK_BYTES])
        digest.update(target[start : start + CHUNK_BYTES].data)


def _empty(entry: BucketEntry, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return fresh(DTYPES[entry.dtype], entry.shape)
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device)


def _bucket_of(entry: BucketEntry) -> int:
    return entry.bucket


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    wire = str(dtype).removeprefix("torch.")
    if wire not in DTYPES:
        raise ValueError(f"weight {name!r}: got dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return wire


_HEADER = struct.Struct("<4sBBxxQQQ")
"""Header of a payload: magic, bytes of an element, bytes of a position (0 for a bitmap), number of elements of the
bucket, number of changed elements, number of bytes of all positions."""
_MAGIC = b"hrd1"
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_WORD = 8
_BITMAP = 0
_POSITION_BYTES = (1, 2, 4)


def encode_sparse(new: np.ndarray, base: np.ndarray, element_bytes: int) -> np.ndarray | None:
    """Encode the differences that turn `base` into `new`, as uint8 `[n]`; None if that is not shorter than `new`.

    new, base: uint8 1-D of one length, a multiple of `element_bytes` (1, 2, 4 or 8). Elements are compared as bits, so
    -0.0 differs from 0.0, and NaNs of the same bits are equal. Uses about 5 bytes of memory per element besides the
    payload. Raises ValueError if an array does not meet these conditions.
    """
    _expect_pair(new, base, element_bytes)
    values = new.view(_UNSIGNED[element_bytes])
    bitmap_bytes = ceil_div(len(values), 8)
    changed = _changed(new, base, element_bytes)
    count = len(changed) if changed.dtype != bool else int(np.count_nonzero(changed))
    if _HEADER.size + min(count, bitmap_bytes) + count * element_bytes >= len(new):
        return None  # No form of the positions makes the payload shorter.
    width, where = _write_where(changed, count, len(values))
    start = _HEADER.size + len(where)
    start += -start % 8
    if start + count * element_bytes >= len(new):
        return None
    payload = np.zeros(start + count * element_bytes, dtype=np.uint8)
    header = _HEADER.pack(_MAGIC, element_bytes, width, len(values), count, len(where))
    payload[: _HEADER.size] = np.frombuffer(header, dtype=np.uint8)
    payload[_HEADER.size : _HEADER.size + len(where)] = where
    payload[start:].view(values.dtype)[:] = values[changed]
    return payload


def apply_sparse(payload: np.ndarray, target: np.ndarray) -> None:
    """Apply a payload to `target`, which holds the bytes of the base and becomes the new version in place.

    payload: the result of `encode_sparse`; it can be read-only. target: uint8 1-D, contiguous. Raises ValueError before
    anything is written when the payload is malformed or does not fit `target`.
    """
    if len(payload) < _HEADER.size:
        raise ValueError(f"bucket delta: got {len(payload)} bytes, expected a header of {_HEADER.size}")
    magic, element_bytes, width, num_elements, count, where_bytes = _HEADER.unpack(payload[: _HEADER.size].tobytes())
    if magic != _MAGIC or element_bytes not in _UNSIGNED or width not in (_BITMAP, *_POSITION_BYTES):
        raise ValueError("bucket delta: the payload has an invalid header")
    if len(target) != num_elements * element_bytes:
        raise ValueError(f"bucket delta: got a bucket of {len(target)} bytes, expected {num_elements * element_bytes}")
    start = _HEADER.size + where_bytes
    start += -start % 8
    if len(payload) != start + count * element_bytes:
        raise ValueError(f"bucket delta: got {len(payload)} bytes, expected {start + count * element_bytes}")
    where = payload[_HEADER.size : _HEADER.size + where_bytes]
    elements = target.view(_UNSIGNED[element_bytes])
    values = payload[start:].view(_UNSIGNED[element_bytes])
    if width == _BITMAP:
        changed = _read_bitmap(where, num_elements)
        found = int(np.count_nonzero(changed))
    else:
        changed = _read_gaps(where, width)
        found = len(changed) if not len(changed) or changed[-1] < num_elements else -1
    if found != count:
        raise ValueError(f"bucket delta: the positions do not match its {count} values of {num_elements} elements")
    elements[changed] = values


def _changed(new: np.ndarray, base: np.ndarray, element_bytes: int) -> np.ndarray:
    """Return which elements differ, as ascending int64 positions if they are few, else as one bool per element."""
    dtype = _UNSIGNED[element_bytes]
    whole = len(new) // _WORD * _WORD
    new_words, base_words = new[:whole].view(_UNSIGNED[_WORD]), base[:whole].view(_UNSIGNED[_WORD])
    differ = new_words != base_words
    if np.count_nonzero(differ) * 8 >= len(differ):
        return new.view(dtype) != base.view(dtype)
    # Few words differ, so only their elements are compared. This is three times as fast as comparing all elements.
    words, each = np.flatnonzero(differ), _WORD // element_bytes
    inner = np.flatnonzero(new_words[words].view(dtype) != base_words[words].view(dtype))
    tail = np.flatnonzero(new[whole:].view(dtype) != base[whole:].view(dtype)) + whole // element_bytes
    return np.concatenate([words[inner // each] * each + inner % each, tail])


def _write_where(changed: np.ndarray, count: int, num_elements: int) -> tuple[int, np.ndarray]:
    """Encode the positions of the `count` changed elements in the shortest form. Returns the number of bytes of a
    position (or _BITMAP), and the encoded positions, uint8 1-D."""
    bitmap_bytes = ceil_div(num_elements, 8)
    if count < bitmap_bytes:
        positions = np.flatnonzero(changed) if changed.dtype == bool else changed
        gaps = np.diff(positions, prepend=-1) - 1
        shortest, width = min((_gap_bytes(gaps, width), width) for width in _POSITION_BYTES)
        if shortest < bitmap_bytes:
            return width, _write_gaps(gaps, width)
    if changed.dtype != bool:
        bits = np.zeros(num_elements, dtype=bool)
        bits[changed] = True
        changed = bits
    return _BITMAP, np.packbits(changed, bitorder="little")


def _gap_bytes(gaps: np.ndarray, width: int) -> int:
    return (len(gaps) + int(np.sum(gaps // _longest(width)))) * width


def _write_gaps(gaps: np.ndarray, width: int) -> np.ndarray:
    longest = _longest(width)
    ends = np.cumsum(gaps // longest + 1)
    steps = np.full(int(ends[-1]) if len(ends) else 0, longest, dtype=_UNSIGNED[width])
    steps[ends - 1] = gaps % longest
    return steps.view(np.uint8)


def _read_gaps(where: np.ndarray, width: int) -> np.ndarray:
    """Decode the positions that `_write_gaps` encoded, as ascending int64. Raises ValueError when the number of bytes
    in `where` is not a multiple of `width`."""
    if len(where) % width:
        raise ValueError(f"bucket delta: got {len(where)} bytes of positions, expected a multiple of {width}")
    steps = where.view(_UNSIGNED[width])
    chosen = steps != _longest(width)
    return np.cumsum(steps.astype(np.int64) + chosen)[chosen] - 1


def _read_bitmap(where: np.ndarray, num_elements: int) -> np.ndarray:
    """Decode a bitmap as one bool per element. Raises ValueError when `where` has the wrong size."""
    if len(where) != ceil_div(num_elements, 8):
        raise ValueError(f"bucket delta: got a bitmap of {len(where)} bytes, expected {num_elements} bits")
    return np.unpackbits(where, count=num_elements, bitorder="little").view(bool)


def _longest(width: int) -> int:
    return (1 << 8 * width) - 1


def _expect_pair(new: np.ndarray, base: np.ndarray, element_bytes: int) -> None:
    if element_bytes not in _UNSIGNED or len(new) % element_bytes or len(new) != len(base):
        raise ValueError(
            f"bucket delta: got {len(new)} and {len(base)} bytes with elements of {element_bytes}, "
            "expected equal lengths, a multiple of the size of an element, which is 1, 2, 4 or 8"
        )
    if any(array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous for array in (new, base)):
        raise ValueError("bucket delta: got arrays of another form, expected contiguous uint8 [n]")
