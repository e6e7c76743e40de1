"""Encodes metadata messages between processes (dataclasses, enums and numpy arrays) as msgpack.

Such messages are directory calls, receipts and manifests: small, typed, and decoded into the same types that were
encoded. Tensors are refused; the data of rows travels as blocks (`codecs/blocks.py`).
"""

from __future__ import annotations

import functools
import struct
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np

from .objects import is_text, pack_texts, unpack_texts
from .schema import Schema

T = TypeVar("T")

_ARRAY = 1
"""Code of the msgpack extension for a numpy array. Its data: 1 byte length of the dtype's name, 1 byte number of
dimensions (255 for 1-D without a shape), the dtype's name, the int64 shape unless 1-D, the values."""

_TEXTS = 2
"""Code of the msgpack extension for a 1-D numpy array of dtype object that holds only str. Its data is the result of
`pack_texts`."""

_INTS = 3
"""Code of the msgpack extension for a 1-D numpy array of int64, such as a column of lengths or versions. Its data is
the result of `_narrowed`."""

_INTS_HEAD = struct.Struct("<Bq")
_FEW = 32
"""Largest number of integers that are narrowed without numpy, which takes longer for so few."""

_KINDS = "biufUS"
"""Kinds of numpy dtype that can be encoded: bool, integers, floats, fixed-width strings."""


def encode(obj: Any) -> bytes:
    """Encode `obj` as one message.

    Takes (nested) dataclasses, enums, numpy arrays and scalars, `Schema`, str, bytes, None, bool, int, float, lists,
    tuples, sets and dicts. A numpy array of dtype object must have one dimension and hold only str. Raises TypeError
    naming any other type.
    """
    return _ENCODER.encode(obj)


def decode(data: bytes | bytearray | memoryview, type: type[T]) -> T:  # noqa: A002
    """Decode an object of `type` (any annotation, such as `list[Receipt]`) that `encode` wrote. Arrays in the result
    own their memory.

    Raises ValueError when `data` is not such a message.
    """
    try:
        return _decoder(type).decode(data)
    except (msgspec.DecodeError, IndexError) as error:
        raise ValueError(f"message: {len(data)} bytes are not a {getattr(type, '__name__', type)}: {error}") from error


@functools.cache
def _decoder(of: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(of, ext_hook=_ext_hook, dec_hook=_dec_hook)


def _enc_hook(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        if is_text(obj):
            return msgspec.msgpack.Ext(_TEXTS, pack_texts(obj))
        if obj.ndim == 1 and obj.dtype == np.int64:
            return msgspec.msgpack.Ext(_INTS, _narrowed(obj))
        return msgspec.msgpack.Ext(_ARRAY, _array_bytes(obj))
    if isinstance(obj, np.generic):
        return obj.item()
    if isinstance(obj, Schema):
        return obj.to_list()
    if isinstance(obj, MappingProxyType):
        return dict(obj)
    raise TypeError(f"message: cannot encode {type(obj).__module__}.{type(obj).__qualname__}")


def _dec_hook(of: Any, obj: Any) -> Any:
    if of is Schema:
        try:
            return Schema.from_list(obj)
        except (LookupError, AttributeError) as error:  # msgspec itself converts ValueError and TypeError.
            raise msgspec.ValidationError(f"damaged schema: {error!r}") from error
    if not isinstance(obj, of):
        raise msgspec.ValidationError(f"got {type(obj).__name__}, expected {of.__name__}")
    return obj


def _narrowed(array: np.ndarray) -> bytes:
    """Encode int64 `[N]` as 1 byte width, the smallest value, and the differences from it in `width` bytes each. Values
    that need 8 bytes are kept as they are, with 0 as the smallest."""
    few = array.tolist() if len(array) <= _FEW else (int(array.min()), int(array.max()))
    low = min(few, default=0)
    spread = max(few, default=0) - low
    if spread < 1 << 8 and len(array) <= _FEW:
        return _INTS_HEAD.pack(1, low) + bytes([value - low for value in few])
    for width in (1, 2, 4):
        if spread < 1 << (8 * width):
            return _INTS_HEAD.pack(width, low) + (array - low).astype(f"<u{width}").tobytes()
    return _INTS_HEAD.pack(8, 0) + array.tobytes()


def _widened(data: memoryview) -> np.ndarray:
    """Decode the result of `_narrowed`. Raises ValueError for other bytes."""
    if len(data) < _INTS_HEAD.size:
        raise ValueError(f"{len(data)} bytes are not integers")
    width, low = _INTS_HEAD.unpack_from(data)
    if width not in (1, 2, 4, 8):
        raise ValueError(f"got integers of {width} bytes, expected 1, 2, 4 or 8")
    values = np.frombuffer(data[_INTS_HEAD.size :], _OF_WIDTH[width])
    return values.astype(np.int64) + low if low else values.astype(np.int64)


_OF_WIDTH = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<i8")}


def _array_bytes(array: np.ndarray) -> bytes:
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"message: cannot encode a numpy array of dtype {array.dtype}")
    dtype = array.dtype.str.encode("ascii")
    # The length of a 1-D array follows from its bytes, unless its items have 0 bytes (dtype "<U0").
    implied = array.ndim == 1 and array.itemsize > 0
    shape = b"" if implied else np.asarray(array.shape, dtype="<i8").tobytes()
    return bytes((len(dtype), 255 if implied else array.ndim)) + dtype + shape + array.tobytes()


def _ext_hook(code: int, data: memoryview) -> np.ndarray:
    if code == _TEXTS:
        try:
            return unpack_texts(data)
        except (TypeError, ValueError) as error:
            raise msgspec.ValidationError(f"damaged column of text: {error}") from error
    if code == _INTS:
        try:
            return _widened(data)
        except ValueError as error:
            raise msgspec.ValidationError(f"damaged integers: {error}") from error
    if code != _ARRAY or len(data) < 2:
        raise msgspec.ValidationError(f"msgpack extension {code} of {len(data)} bytes is not a numpy array")
    dtype_end, ndim = 2 + data[0], data[1]
    try:
        dtype = np.dtype(bytes(data[2:dtype_end]).decode("ascii"))
        if dtype.kind not in _KINDS:
            raise ValueError(f"got dtype {dtype}, expected bool, integers, floats or fixed-width strings")
        if ndim == 255:
            return np.frombuffer(data[dtype_end:], dtype).copy()
        body = dtype_end + 8 * ndim
        shape = tuple(np.frombuffer(data[dtype_end:body], "<i8").tolist())
        return np.ndarray(shape, dtype, bytes(data[body:])).copy()
    except (TypeError, ValueError, SyntaxError) as error:
        raise msgspec.ValidationError(f"damaged numpy array: {error}") from error


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc_hook)
