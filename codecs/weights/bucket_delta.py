"""Encodes a weight bucket as its differences from an earlier version, when that takes fewer bytes.

A payload is little-endian: a header, the positions of the changed elements, padding to 8 bytes, and the new bits of the
changed elements in order. The positions take the shortest of several forms. One is a bitmap, with one bit per element.
The others give for each changed element the number of unchanged elements since the last changed one, as integers of 1,
2 or 4 bytes; the largest such integer, L, means "L unchanged elements, and no changed one yet".
"""

from __future__ import annotations

import struct

import numpy as np

from ..integers import ceil_div

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
        return None  # however positions are written
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

    payload: what `encode_sparse` returned; may be read-only. target: uint8 1-D, contiguous. Raises ValueError before
    anything is written when the payload is malformed or does not fit `target`.
    """
    if len(payload) < _HEADER.size:
        raise ValueError(f"bucket delta: got {len(payload)} bytes, expected a header of {_HEADER.size}")
    magic, element_bytes, width, num_elements, count, where_bytes = _HEADER.unpack(payload[: _HEADER.size].tobytes())
    if magic != _MAGIC or element_bytes not in _UNSIGNED or width not in (_BITMAP, *_POSITION_BYTES):
        raise ValueError("not a bucket delta (bad header)")
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
        raise ValueError(f"bucket delta: its positions do not fit its {count} values of {num_elements} elements")
    elements[changed] = values


def _changed(new: np.ndarray, base: np.ndarray, element_bytes: int) -> np.ndarray:
    """Return which elements differ, as ascending int64 positions if they are few, else as one bool per element."""
    dtype = _UNSIGNED[element_bytes]
    whole = len(new) // _WORD * _WORD
    new_words, base_words = new[:whole].view(_UNSIGNED[_WORD]), base[:whole].view(_UNSIGNED[_WORD])
    differ = new_words != base_words
    if np.count_nonzero(differ) * 8 >= len(differ):
        return new.view(dtype) != base.view(dtype)
    # In few words: only these are looked into, three times faster than all elements.
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
        raise ValueError(f"bucket delta: {len(where)} bytes are no positions of {width} bytes")
    steps = where.view(_UNSIGNED[width])
    chosen = steps != _longest(width)
    return np.cumsum(steps.astype(np.int64) + chosen)[chosen] - 1


def _read_bitmap(where: np.ndarray, num_elements: int) -> np.ndarray:
    """Decode a bitmap as one bool per element. Raises ValueError when `where` has the wrong size."""
    if len(where) != ceil_div(num_elements, 8):
        raise ValueError(f"bucket delta: {len(where)} bytes are no bitmap of {num_elements} elements")
    return np.unpackbits(where, count=num_elements, bitorder="little").view(bool)


def _longest(width: int) -> int:
    return (1 << 8 * width) - 1


def _expect_pair(new: np.ndarray, base: np.ndarray, element_bytes: int) -> None:
    if element_bytes not in _UNSIGNED or len(new) % element_bytes or len(new) != len(base):
        raise ValueError(
            f"bucket delta: got {len(new)} and {len(base)} bytes with elements of {element_bytes}, "
            "expected equal lengths, a multiple of 1, 2, 4 or 8"
        )
    if any(array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous for array in (new, base)):
        raise ValueError("bucket delta: got other arrays than contiguous uint8 [n]")
