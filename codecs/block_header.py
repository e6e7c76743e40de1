"""Encodes and decodes the header of a block (part 0), and computes and checks the checksums in it.

The header describes the block's other parts. It is enough to read a block without the schema of its partition. A
checksum is the xxh3 of CHECKSUM_ROWS rows of a field (a row block). It is computed and checked right after the copy of
its bytes, while they are in the CPU cache. Reading them from memory a second time would take longer than the xxh3
itself.
"""

from __future__ import annotations

import functools
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from .integers import distinct
from .schema import Schema

# ---------------- A header has these bytes.
#
# bytes 0-7    the magic bytes, which end in the version of the format
# bytes 8-15   xxh3 of all later bytes, seeded with a number that the reader must know (0 outside a data plane)
# bytes 16-23  number of bytes of the manifest
# then         manifest: msgpack [schema, rows, has lengths, checksums or None], padded with zeros to a multiple of 4
# then         int32 lengths `[N]` when a field is PER_TOKEN

MAGIC = b"hrblock1"
MAX_TOKENS = (1 << 31) - 1
"""Largest number of tokens of a row. A block stores the rows' lengths as int32."""
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
    checksums (see `Header`); they are zeros until `enter_checksums` sets them. None makes a block without checksums.
    seed: seed of the xxh3 that protects the header itself; a reader must pass the same seed to `decode_header`.
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
    """Write the checksums into a header. `encode_header` must have made it for this number of checksums and this
    seed."""
    end = _PREFIX.size + _PREFIX.unpack_from(header.data)[2]  # The checksums are the manifest's last value.
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


xxh3 = xxhash.xxh3_64_intdigest

COPY_BYTES = 2 << 20
"""Largest number of bytes that are copied before their checksums are computed, so that they are still in the CPU cache.
A copy of 1 MiB or more does not first read the memory that it overwrites, which made it up to 1.6 times as fast in a
measurement."""

CHECKSUM_ROWS = 256
"""Number of rows of a block that share one xxh3 checksum per field (a row block). A reader of a few rows verifies only
the row blocks that contain these rows. The number equals the default number of rows in a block. With a quarter of it,
the calls for each checksum took as long as the xxh3 itself."""


class ChecksumMismatch(ValueError):
    """Bytes of a block differ from those that were written. The message names the field, its rows, and the expected and
    found xxh3."""

    def __init__(self, message: str, block: int) -> None:
        """block: the caller's number for the block."""
        super().__init__(message)
        self.block = block


def mismatch(field: str, block: int, what: str, expected: int, found: int) -> ChecksumMismatch:
    """Return the error for a part of a field (`what`) when its xxh3 is not the expected one."""
    return ChecksumMismatch(
        f"field {field!r}, {what}: xxh3 of the bytes read is {found:016x}, but {expected:016x} was written", block
    )


def row_block_ends(ends: np.ndarray) -> list[int]:
    """Return the end offsets of every CHECKSUM_ROWS-th row and of the last row, given the end offsets of all rows."""
    return [*ends[CHECKSUM_ROWS - 1 : -1 : CHECKSUM_ROWS].tolist(), *ends[-1:].tolist()]


class RunningSums:
    """Computes the xxh3 of row blocks, or of other ranges of bytes that follow one another, from pieces of any size."""

    def __init__(self, ends: Sequence[int]) -> None:
        """ends: byte offset at which each range ends."""
        self.sums: list[int] = []
        """Checksums of the ranges that have been fed completely."""
        self._ends = ends
        self._fed_bytes = 0
        self._digest = xxhash.xxh3_64()

    def feed(self, data: memoryview) -> None:
        """Process the next bytes. They must follow the bytes of the previous call."""
        digest, base, begin = self._digest, self._fed_bytes, 0
        self._fed_bytes += len(data)
        for end in self._ends[len(self.sums) :]:
            if end > self._fed_bytes:
                break
            digest.update(data[begin : end - base])
            self.sums.append(digest.intdigest())
            digest.reset()
            begin = end - base
        digest.update(data[begin:])


class FieldSums:
    """Checks the row blocks of one field while a block is read. Each is checked when its first byte has been copied."""

    def __init__(
        self, field: str, block: int, num_rows: int, values: np.ndarray, ends: Sequence[int], sums: Sequence[int]
    ) -> None:
        """Raise ValueError if the row blocks do not cover exactly the values part.

        field: name, for error messages. block: the caller's number for the block. values: the values part, uint8 1-D.
        ends, sums: byte offset at which each row block ends, and its checksum.
        """
        self._bounds = [0, *ends]
        if self._bounds[-1] != len(values):
            raise ValueError(f"field {field!r}: got {len(values)} bytes, expected {self._bounds[-1]} for its rows")
        self._field = field
        self._block = block
        self._num_rows = num_rows
        self._values = values.data
        self._expected: list[int | None] = [*sums]
        """Checksum of each row block; None once it has been checked."""
        self._unchecked = len(self._expected)

    def copy(self, target: memoryview, begin: int, end: int) -> None:
        """Copy the bytes `begin:end` of the values part into `target`, and check the row blocks that contain them.
        Raises ChecksumMismatch."""
        if end - begin > COPY_BYTES:
            for start in range(begin, end, COPY_BYTES):
                stop = min(start + COPY_BYTES, end)
                self.copy(target[start - begin : stop - begin], start, stop)
            return
        target[:] = self._values[begin:end]
        if self._unchecked:
            number = bisect_right(self._bounds, begin) - 1
            while self._bounds[number] < end:
                self._check(number)
                number += 1

    def check_rows(self, rows: np.ndarray) -> None:
        """Check the row blocks that hold these rows. rows: positions of rows in the block, `[N]`. Raises
        ChecksumMismatch."""
        for number in distinct(rows // CHECKSUM_ROWS).tolist():
            self._check(number)

    def _check(self, number: int) -> None:
        expected = self._expected[number]
        if expected is None:
            return
        self._expected[number] = None
        self._unchecked -= 1
        found = xxh3(self._values[self._bounds[number] : self._bounds[number + 1]])
        if found != expected:
            first, behind = number * CHECKSUM_ROWS, min((number + 1) * CHECKSUM_ROWS, self._num_rows)
            raise mismatch(self._field, self._block, f"rows {first} to {behind - 1}", expected, found)


Sums = Mapping[int, FieldSums]
"""Checksums of the field that is being read, by block number."""
