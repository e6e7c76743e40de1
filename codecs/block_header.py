"""A block's part 0: magic, own xxh3, and a manifest that describes the other parts without the partition's schema.

bytes 0-7    magic and format version
bytes 8-15   xxh3 of everything behind them
bytes 16-23  bytes of the manifest
then         manifest: msgpack [schema, rows, has lengths, checksums or None], padded with zeros to 4
then         int32 lengths `[N]` when a field is PER_TOKEN
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from .schema import Schema

MAGIC = b"hrblock1"
_PREFIX = struct.Struct("<8sQQ")
_HASHED_FROM = 16
_MANIFEST = msgspec.msgpack.Decoder(tuple[bytes, int, bool, bytes | None])


@dataclass(frozen=True, slots=True)
class Header:
    """What part 0 says."""

    schema: Schema
    """The block's fields in the order of their parts."""
    num_rows: int
    lengths: np.ndarray | None
    """int32 `[N]`; None when no field is PER_TOKEN."""
    checksums: np.ndarray | None
    """uint64: per field one for each row block of its values, then one for its index part if it has one.
    None when the block was written without."""


def encode_header(schema: Schema, num_rows: int, lengths: np.ndarray | None, checksums: list[int] | None) -> np.ndarray:
    """Part 0 as uint8 1-D. `lengths`: `[N]`, each below 2**31."""
    sums = None if checksums is None else np.array(checksums, dtype="<u8").tobytes()
    manifest = msgspec.msgpack.encode((_schema_bytes(schema), num_rows, lengths is not None, sums))
    tail = b"" if lengths is None else lengths.astype("<i4").tobytes()
    hashed = struct.pack("<Q", len(manifest)) + manifest + bytes(-len(manifest) % 4) + tail
    return np.frombuffer(MAGIC + struct.pack("<Q", xxhash.xxh3_64_intdigest(hashed)) + hashed, dtype=np.uint8)


def decode_header(part: np.ndarray) -> Header:
    """Inverse of `encode_header`. Raises ValueError when `part` is no header or was changed since."""
    data = np.ascontiguousarray(part).tobytes()
    if len(data) < _PREFIX.size or data[:8] != MAGIC:
        raise ValueError(f"block header: {len(data)} bytes do not begin with {MAGIC!r}")
    _, written, manifest_bytes = _PREFIX.unpack_from(data)
    found = xxhash.xxh3_64_intdigest(data[_HASHED_FROM:])
    if found != written:
        raise ValueError(f"block header: xxh3 is {found:016x}, but {written:016x} was written")
    manifest_end = _PREFIX.size + manifest_bytes
    schema_bytes, num_rows, has_lengths, sums = _MANIFEST.decode(data[_PREFIX.size : manifest_end])
    lengths = np.frombuffer(data, "<i4", num_rows, manifest_end + -manifest_bytes % 4) if has_lengths else None
    checksums = None if sums is None else np.frombuffer(sums, dtype="<u8")
    return Header(_schema(schema_bytes), num_rows, lengths, checksums)


@functools.lru_cache(maxsize=256)
def _schema_bytes(schema: Schema) -> bytes:
    return msgspec.msgpack.encode(schema.to_list())


@functools.lru_cache(maxsize=256)
def _schema(data: bytes) -> Schema:
    return Schema.from_list(msgspec.msgpack.decode(data))
