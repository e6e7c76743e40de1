"""Encodes and decodes the header of a block (part 0), which describes the block's other parts and has their checksums.

It is enough to read a block without the schema of its partition.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from .schema import Schema

# ---------------- The bytes of a header.
#
# bytes 0-7    magic and format version
# bytes 8-15   xxh3 of everything behind them, seeded with a number that the reader knows, too (0 outside a data plane)
# bytes 16-23  bytes of the manifest
# then         manifest: msgpack [schema, rows, has lengths, checksums or None], padded with zeros to 4
# then         int32 lengths `[N]` when a field is PER_TOKEN

MAGIC = b"hrblock1"
MAX_TOKENS = (1 << 31) - 1
"""Largest number of tokens that a row may have, because a block stores the rows' lengths as int32."""
_PREFIX = struct.Struct("<8sQQ")
_HASHED_FROM = 16
_MANIFEST = msgspec.msgpack.Decoder(tuple[bytes, int, bool, bytes | None])


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of a block's header (part 0)."""

    schema: Schema
    """Fields of the block in the order of their parts."""
    num_rows: int
    lengths: np.ndarray | None
    """Number of tokens of each row, int32 `[N]`; None when no field is PER_TOKEN."""
    checksums: np.ndarray | None
    """Checksums (xxh3, uint64), field by field: one for each row block (CHECKSUM_ROWS rows) of the values part, then
    one for the index part of a field that has one. None when the block was written without checksums."""


def encode_header(
    schema: Schema, num_rows: int, lengths: np.ndarray | None, num_checksums: int | None, seed: int = 0
) -> np.ndarray:
    """Encode a block's header (part 0) as uint8 1-D. Raises ValueError when a row has more than MAX_TOKENS tokens.

    lengths: number of tokens of each row, int `[N]`; None when no field is PER_TOKEN. num_checksums: number of
    checksums (see `Header`), which are zeros until `enter_checksums`; None for a block without checksums. seed: seed of
    the xxh3 that protects the header itself; a reader must pass the same seed to `decode_header`.
    """
    if lengths is not None and len(lengths) and lengths.max() > MAX_TOKENS:
        longest = int(lengths.argmax())
        raise ValueError(f"block: row {longest} has {lengths[longest]} tokens, expected at most {MAX_TOKENS}")
    sums = None if num_checksums is None else bytes(8 * num_checksums)
    manifest = msgspec.msgpack.encode((_schema_bytes(schema), num_rows, lengths is not None, sums))
    tail = b"" if lengths is None else lengths.astype("<i4").tobytes()
    hashed = struct.pack("<Q", len(manifest)) + manifest + bytes(-len(manifest) % 4) + tail
    digest = xxhash.xxh3_64_intdigest(hashed, seed)
    return np.frombuffer(bytearray(MAGIC + struct.pack("<Q", digest) + hashed), dtype=np.uint8)


def enter_checksums(header: np.ndarray, checksums: Sequence[int], seed: int) -> None:
    """Enter the checksums into a header that `encode_header` has made for as many of them, with the same seed."""
    end = _PREFIX.size + _PREFIX.unpack_from(header.data)[2]  # the lengths are the last value of the manifest
    header[end - 8 * len(checksums) : end] = np.array(checksums, dtype="<u8").view(np.uint8)
    struct.pack_into("<Q", header.data, 8, xxhash.xxh3_64_intdigest(header[_HASHED_FROM:].data, seed))


def decode_header(part: np.ndarray, seed: int = 0) -> Header:
    """Decode a header that `encode_header` wrote with the same seed. Raises ValueError when `part` is not a header, was
    written with another seed, or has changed since."""
    data = np.ascontiguousarray(part).tobytes()
    if len(data) < _PREFIX.size or data[:8] != MAGIC:
        raise ValueError(f"block header: {len(data)} bytes do not begin with {MAGIC!r}")
    _, written, manifest_bytes = _PREFIX.unpack_from(data)
    found = xxhash.xxh3_64_intdigest(data[_HASHED_FROM:], seed)
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
