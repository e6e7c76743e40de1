"""Packs the columns of receipts and requests (integers, row keys, locations in blocks) into a few bytes per row."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ..codecs.gather import RowSource
from ..codecs.integers import FEW
from ..codecs.objects import pack_texts, unpack_texts

_WIDTHS = (np.uint8, np.uint16, np.uint32)
_RUN_GAIN = 4
"""Smallest average run length (number of successive equal values) at which integers are encoded as runs."""
MOST_ROWS = 1 << 28
"""Largest number of values of one column. With this limit a damaged message cannot make its reader allocate more."""
MOST_KEY_BYTES = 1 << 32
"""Largest number of bytes of the keys of one message, before they are compressed."""
_ZIP_BYTES = 256
"""Number of bytes below which keys are not compressed, because setting up a compressor costs more than it saves."""


def pack_ints(values: np.ndarray) -> bytes:
    """Encode an integer array `[N]` as the message of its `int_parts`. `unpack_ints` decodes it."""
    return msgspec.msgpack.encode(int_parts(values))


def int_parts(values: np.ndarray) -> list:
    """Encode an integer array `[N]` as plain values for a message. `ints_of` decodes them.

    Few runs of equal values are encoded as runs, other integers as offsets from the minimum. Raises ValueError for
    another shape or a non-integer dtype.
    """
    values = np.asarray(values)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"pack_ints: got {values.dtype} {list(values.shape)}, expected one dimension of integers")
    if len(values) <= FEW:
        return _few_parts(values.tolist())
    values = values.astype(np.int64, copy=False)
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    if len(values) >= _RUN_GAIN and (len(starts) + 1) * _RUN_GAIN <= len(values):
        counts = np.diff(starts, prepend=0, append=len(values))
        heads = values[np.concatenate(([0], starts))]
        return [*_narrow(heads), *_narrow(counts)]
    return _narrow(values)


def _few_parts(values: list[int]) -> list:
    """Encode a few integers as `int_parts` does. Plain Python takes a fifth of the time of numpy for them."""
    count = len(values)
    if count >= _RUN_GAIN and (sum(map(operator.ne, values[1:], values)) + 1) * _RUN_GAIN <= count:
        starts = [0, *(at for at in range(1, count) if values[at] != values[at - 1])]
        counts = [end - start for start, end in zip(starts, [*starts[1:], count], strict=True)]
        return [*_narrow_few([values[at] for at in starts]), *_narrow_few(counts)]
    return _narrow_few(values)


def _narrow_few(values: list[int]) -> list:
    low, high = min(values, default=0), max(values, default=0)
    if high - low <= 255:
        return [low, 1, bytes([value - low for value in values])]
    return _narrow(np.array(values, dtype=np.int64))


def unpack_ints(data: bytes) -> np.ndarray:
    """Decode the result of `pack_ints` to int64 `[N]`. Raises the errors of `ints_of`."""
    return ints_of(msgspec.msgpack.decode(data))


def ints_of(parts: list) -> np.ndarray:
    """Decode the result of `int_parts` to int64 `[N]`. Raises ValueError for runs of more than MOST_ROWS values."""
    values = _widen(*parts[:3])
    if len(parts) == 3:
        return values
    counts = _widen(*parts[3:])
    if len(counts) and (counts.min() < 0 or counts.max() > MOST_ROWS or counts.sum() > MOST_ROWS):
        raise ValueError(f"integers: runs of {counts.min()} to {counts.max()} values, expected at most {MOST_ROWS}")
    return np.repeat(values, counts)


def _narrow(values: np.ndarray) -> list:
    """Encode integers as [minimum, number of bytes per value, differences from the minimum in that many bytes each].
    Values that need 8 bytes are kept as they are, with 0 as the minimum."""
    if not len(values):
        return [0, 1, b""]
    low, high = int(values.min()), int(values.max())
    for width in _WIDTHS:
        if high - low <= np.iinfo(width).max:
            return [low, np.dtype(width).itemsize, (values - low).astype(width).tobytes()]
    return [0, 8, values.tobytes()]


def _widen(base: int, width: int, data: bytes) -> np.ndarray:
    if width == 8:
        return np.frombuffer(data, np.int64)
    return np.frombuffer(data, f"u{width}").astype(np.int64) + base


def pack_keys(keys: Sequence[str], *, squeeze: bool = False) -> bytes:
    """Encode row keys, with what all of them begin with only once. `unpack_keys` decodes them. Keys must not be empty
    or contain NUL (see `check_keys`).

    squeeze: whether to compress the keys if there are many; a key then takes about 3 bytes, because neighbouring keys
    share prefixes.
    """
    if not keys:
        return b""
    start = os.path.commonprefix(keys)
    if len(start) > 1:
        size = len(start)
        body = b"p" + "\0".join([start, *[key[size:] for key in keys]]).encode()
    else:
        body = b"t" + "\0".join(keys).encode()
    return b"z" + zlib.compress(body, 1) if squeeze and len(body) > _ZIP_BYTES else body


def unpack_keys(data: bytes) -> list[str]:
    if not data:
        return []
    body = _decompressed(data[1:]) if data[:1] == b"z" else data
    keys = body[1:].decode().split("\0")
    if body[:1] == b"p":
        start = keys.pop(0)
        return [start + rest for rest in keys]
    return keys


def _decompressed(data: bytes) -> bytes:
    """Decompress keys. Raises ValueError for other bytes, and for more than MOST_KEY_BYTES bytes of keys."""
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, MOST_KEY_BYTES)
    except zlib.error as error:
        raise ValueError(f"keys: {len(data)} bytes cannot be decompressed: {error}") from None
    if not stream.eof:
        raise ValueError(f"keys: {len(data)} bytes are cut off, or become more than {MOST_KEY_BYTES}")
    return text


def check_keys(keys: Sequence[str] | np.ndarray, argument: str = "keys") -> list[str]:
    """Return `keys` as a list of str. Strings of numpy, and arrays `[N]` of strings (dtype U or object), are converted.
    Raises ValueError naming the argument unless each key is a non-empty str without NUL that UTF-8 can encode."""
    if isinstance(keys, str):
        raise ValueError(f"{argument}: got the string {keys!r}, expected a sequence of strings")
    if isinstance(keys, np.ndarray) and keys.ndim != 1:
        raise ValueError(f"{argument}: got an array of shape {list(keys.shape)}, expected one dimension of strings")
    checked = plain_strings(keys)
    if set(map(type, checked)) - {str} or "" in checked or not _is_plain("".join(checked)):
        bad = next(key for key in checked if type(key) is not str or not key or not _is_plain(key))
        raise ValueError(f"{argument}: got {bad!r}, expected non-empty strings of valid Unicode without NUL")
    return checked


def plain_strings(values: Sequence[Any] | np.ndarray) -> list[Any]:
    """Return `values` as a list in which each string of numpy (`np.str_`) is a plain str. Other items are kept as they
    are."""
    items = values.tolist() if isinstance(values, np.ndarray) else list(values)
    if np.str_ in set(map(type, items)):
        items = [str(item) if isinstance(item, np.str_) else item for item in items]
    return items


def _is_plain(text: str) -> bool:
    """Return whether `text` has no NUL and no lone surrogate."""
    if "\0" in text:
        return False
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def pack_tag(values: np.ndarray) -> bytes:
    """Encode a tag's values `[N]` compactly. Integers go through `pack_ints`, texts (dtype object) through
    `pack_texts`, other values are stored as their plain bytes."""
    if values.dtype.kind == "O":
        return pack_texts(values)
    return pack_ints(values) if values.dtype.kind in "iu" else values.tobytes()


def unpack_tag(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Decode the result of `pack_tag` for values of this dtype."""
    if dtype.kind == "O":
        return unpack_texts(data)
    return unpack_ints(data).astype(dtype) if dtype.kind in "iu" else np.frombuffer(data, dtype)


def pack_source(source: RowSource, lengths: np.ndarray, numbers: Mapping[str, int]) -> list:
    """Encode where rows lie in blocks, as runs of rows that follow one another in a block. lengths: number of tokens of
    each row, int64 `[N]`. numbers: number of each field, which stands for its name."""
    block, row, start = source.block, source.row, source.start
    tokens = np.count_nonzero(start) > 0
    if len(block) <= FEW:
        heads = _few_heads(block.tolist(), row.tolist(), start.tolist() if tokens else None, lengths.tolist())
        ends = [*heads[1:], len(block)] if heads else []
        counts = np.array([end - head for head, end in zip(heads, ends, strict=True)], dtype=np.int64)
    else:
        breaks = (block[1:] != block[:-1]) | (row[1:] != row[:-1] + 1)
        if tokens:
            breaks |= start[1:] != start[:-1] + lengths[:-1]
        heads = np.concatenate(((0,), breaks.nonzero()[0] + 1))
        counts = np.diff(heads, append=len(block))
    columns = (block[heads], row[heads], counts, start[heads]) if tokens else (block[heads], row[heads], counts)
    return [[numbers[name] for name in source.fields], *map(int_parts, columns)]


def _few_heads(block: list[int], row: list[int], start: list[int] | None, lengths: list[int]) -> list[int]:
    """Return the positions at which the runs of `pack_source` begin. start: None for rows without tokens."""
    heads = [0] if block else []
    for at in range(1, len(block)):
        follows = block[at] == block[at - 1] and row[at] == row[at - 1] + 1
        if not follows or start is not None and start[at] != start[at - 1] + lengths[at - 1]:
            heads.append(at)
    return heads


def unpack_source(parts: list, lengths: np.ndarray, names: tuple[str, ...]) -> RowSource:
    """Decode the result of `pack_source`, given the same lengths. names: names of the fields, by number."""
    fields = tuple(names[number] for number in parts[0])
    block, row, counts, *start = map(ints_of, parts[1:])
    run = np.repeat(np.arange(len(counts)), counts)
    first = (np.cumsum(counts) - counts)[run]
    place = np.arange(len(run)) - first
    rows = (row[run] + place).astype(np.int32)
    if not start:
        return RowSource(fields, block[run].astype(np.int32), rows, np.zeros(len(run), np.int64))
    before = np.cumsum(lengths) - lengths
    return RowSource(fields, block[run].astype(np.int32), rows, start[0][run] + before - before[first])
