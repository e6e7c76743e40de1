"""Encodes columns of Python values (strings, numbers, lists, dicts) as msgpack, and columns of strings compactly.

Decoding gives back exactly the same objects. Pickle is not used, so that decoding never runs code. Types that msgpack
would silently convert to another type (tuples into lists, numpy scalars into numbers, enums into their values) are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np


class UnstorableObject(ValueError):
    """An object of an OBJECT column cannot be encoded. The message names the field and the row."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


MAX_DEPTH = 200
"""Largest nesting depth of lists and dicts. The limit also catches an object that contains itself."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder()
_SCALARS = frozenset((str, bytes, type(None), bool, float))


def encode(obj: Any) -> bytes:
    """Encode `obj` as msgpack: str, bytes, None, bool, int (64 bit), float, list, or dict with str or int keys.

    Raises TypeError naming any other type and the path to it, and ValueError for an int beyond 64 bit, text that is not
    valid Unicode, and nesting deeper than MAX_DEPTH.
    """
    _check(obj, "", 0)
    try:
        return _ENCODER.encode(obj)
    except UnicodeEncodeError as error:
        raise ValueError(f"object: a string holds {error.object[error.start]!r}, expected valid Unicode text") from None


def decode(data: bytes | memoryview) -> Any:
    """Decode an object that `encode` encoded. Raises ValueError when `data` is not exactly one complete msgpack
    object."""
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"object: {len(data)} bytes are not one msgpack object: {error}") from error


def encode_column(name: str, rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Encode all rows of an OBJECT column. Returns their bytes one after another, uint8 1-D, and the offset at which
    each row ends, int64 `[N]`. Raises UnstorableObject where `encode` raises an error."""
    parts = []
    for index, obj in enumerate(rows):
        try:
            parts.append(encode(obj))
        except (TypeError, ValueError) as error:
            raise UnstorableObject(f"field {name!r}, row {index}: {error}", index) from None
    ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), dtype=np.int64)
    return np.frombuffer(b"".join(parts), dtype=np.uint8), ends


def _check(obj: Any, path: str, depth: int) -> None:
    kind = type(obj)
    if kind in _SCALARS:
        return
    if kind is int:
        if not -(1 << 63) <= obj < 1 << 64:
            raise ValueError(f"object{path}: {obj} does not fit 64 bits, expected -2**63 <= int < 2**64")
        return
    if depth >= MAX_DEPTH:
        raise ValueError(f"object: lists and dicts are nested deeper than {MAX_DEPTH} levels")
    if kind is list:
        for index, item in enumerate(obj):
            if type(item) not in _SCALARS:
                _check(item, f"{path}[{index}]", depth + 1)
    elif kind is dict:
        for key, item in obj.items():
            if type(key) is int:
                _check(key, path, depth + 1)
            elif type(key) is not str:
                raise TypeError(f"object{path}: key {key!r} is {_name(type(key))}, expected str or int")
            if type(item) not in _SCALARS:
                _check(item, f"{path}[{key!r}]", depth + 1)
    else:
        raise TypeError(
            f"object{path}: cannot store {_name(kind)}, expected str, bytes, None, bool, int, float, list or dict"
        )


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_WIDTHS = (1, 2, 4)
_PACKED = msgspec.msgpack.Decoder(tuple[list[str], int, bytes])


def is_text(column: np.ndarray) -> bool:
    """Return whether `column` is an array `[N]` of dtype object that holds only str."""
    return column.dtype.kind == "O" and column.ndim == 1 and set(map(type, column.tolist())) <= {str}


def pack_texts(column: np.ndarray) -> bytes:
    """Encode an array `[N]` of dtype object that holds only str. `unpack_texts` decodes the result. If strings repeat,
    each row takes 1 to 4 bytes, and each distinct string is stored once."""
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(text, len(numbers)) for text in column.tolist()]
    width = next(width for width in _WIDTHS if len(numbers) <= 1 << (8 * width))
    repeats = len(numbers) < len(rows)
    return msgspec.msgpack.encode((list(numbers), width, np.array(rows, f"<u{width}").tobytes() if repeats else b""))


def unpack_texts(data: bytes | memoryview) -> np.ndarray:
    """Decode the result of `pack_texts` to an array `[N]` of dtype object. Raises ValueError, TypeError or IndexError
    for other bytes."""
    texts, width, rows = _PACKED.decode(data)
    column = np.array(texts, dtype=object)
    return column[np.frombuffer(rows, f"<u{width}")] if rows else column
