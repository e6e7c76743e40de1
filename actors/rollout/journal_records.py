"""Encodes a finished group as one record of the journal, and reads records back from a segment file.

bytes 0-7    magic and format version
bytes 8-47   fingerprint, position, stamp, number of bytes in the body, xxh3 of the body
bytes 48-55  xxh3 of bytes 0-47
then         body: length of the contents (8 bytes), contents (`codecs/messages.py`), and the encoded columns of the
             rows (`codecs/blocks.py`)

With the two checksums, a reader can distinguish a record that was cut short by a kill from a record whose bytes have
changed. A record that was cut short may stand at the end of a file; a record with changed bytes must not be used.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ...codecs import messages
from ...codecs.batch import Batch
from ...codecs.blocks import BlockLayout, RowSource, assemble, encode_block, read_header
from ...codecs.gather import exclusive_cumsum
from ...dataplane.meta import POSITION
from .report import GroupFigures
from .rows import RolloutRows

MAGIC = b"hrjrnl01"
_HEAD = struct.Struct("<8sQqQQQ")
_DIGEST = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _DIGEST.size


class DamagedJournal(RuntimeError):
    """The bytes of a journal record are not those that were written. The message names the file and the byte at which
    the record begins."""


@dataclass(frozen=True, slots=True)
class JournaledGroup:
    """One finished group (all rows of a prompt), as the journal keeps it."""

    position: int
    """Position of the group's prompt in the run's prompt stream."""
    rows: RolloutRows
    figures: GroupFigures
    """Counts and sums of the group, which are added to the report of the rollout actor that writes the group to the
    data plane."""


@dataclass(frozen=True, slots=True)
class RecordHead:
    """Header of a journal record. It precedes the record's body."""

    fingerprint: int
    """Hash of the settings that the group was made with (`JournalConfig.fingerprint`)."""
    position: int
    """Position of the group's prompt in the run's prompt stream."""
    stamp: int
    """Number that increases from record to record. If several records have the same position, the one with the highest
    stamp is valid."""
    nbytes: int
    """Number of bytes of the body."""
    digest: int
    """xxh3 hash of the body."""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Part of a record's body that precedes the encoded columns of the rows. It has the rows' metadata, the group's
    counts and sums, and the layout of the columns."""

    keys: list[str]
    versions: np.ndarray
    tags: dict[str, np.ndarray]
    figures: GroupFigures
    layout: BlockLayout


def encode_record(group: JournaledGroup, fingerprint: int, stamp: int) -> bytes:
    """Return the group encoded as one record of the journal."""
    rows = group.rows
    one_group = np.zeros(rows.batch.num_rows, np.int64)
    block = encode_block(rows.batch, 0, rows.batch.num_rows, checksum=False, groups=one_group)
    contents = messages.encode(_Contents(rows.keys, rows.versions, dict(rows.tags), group.figures, block.layout))
    body = b"".join((_DIGEST.pack(len(contents)), contents, *(piece.data for part in block.pieces for piece in part)))
    head = _HEAD.pack(MAGIC, fingerprint, group.position, stamp, len(body), xxhash.xxh3_64_intdigest(body))
    return b"".join((head, _DIGEST.pack(xxhash.xxh3_64_intdigest(head)), body))


def read_heads(path: Path, start: int) -> tuple[list[tuple[int, RecordHead]], int]:
    """Return the offset and header of every complete record from byte `start` on, and the end of the last one. All
    offsets are in bytes.

    An incomplete record at the end of the file is left out, because its writer was killed while writing it or is still
    writing it. Bodies are not read. Raises DamagedJournal if a header is damaged, and FileNotFoundError if there is no
    such file.
    """
    found = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        while start + HEAD_BYTES <= size:
            head = _decode_head(os.pread(descriptor, HEAD_BYTES, start), path, start)
            if start + HEAD_BYTES + head.nbytes > size:
                break
            found.append((start, head))
            start += HEAD_BYTES + head.nbytes
    finally:
        os.close(descriptor)
    return found, start


def read_group(path: Path, offset: int) -> JournaledGroup:
    """Read the record that begins at byte `offset` and return its group, which does not share memory with the file.

    Raises DamagedJournal if the record is damaged, and FileNotFoundError if there is no such file.
    """
    with open(path, "rb") as file:
        file.seek(offset)
        head = _decode_head(file.read(HEAD_BYTES), path, offset)
        body = file.read(head.nbytes)
    if len(body) != head.nbytes:
        raise _damaged(path, offset, f"its body has {len(body)} bytes, but {head.nbytes} were written")
    found = xxhash.xxh3_64_intdigest(body)
    if found != head.digest:
        raise _damaged(path, offset, f"xxh3 of its body is {found:016x}, but {head.digest:016x} was written")
    end = _DIGEST.size + _DIGEST.unpack_from(body)[0]
    contents = messages.decode(memoryview(body)[_DIGEST.size : end], _Contents)
    batch = _decode_rows(np.frombuffer(body, dtype=np.uint8, offset=end), contents.layout)
    # Records of earlier versions have no tag for the position, which every record's head has.
    tags = {**contents.tags, POSITION: np.full(len(contents.keys), head.position)}
    rows = RolloutRows(contents.keys, contents.versions, tags, batch)
    return JournaledGroup(head.position, rows, contents.figures)


def _damaged(path: Path, offset: int, what: str) -> DamagedJournal:
    return DamagedJournal(
        f"journal: {path}, record at byte {offset}: {what}; remove the file to have its groups generated again"
    )


def _decode_head(data: bytes, path: Path, offset: int) -> RecordHead:
    if len(data) != HEAD_BYTES:
        raise _damaged(path, offset, f"its head has {len(data)} bytes, expected {HEAD_BYTES}")
    [written] = _DIGEST.unpack_from(data, _HEAD.size)
    found = xxhash.xxh3_64_intdigest(data[: _HEAD.size])
    if found != written:
        raise _damaged(path, offset, f"xxh3 of its head is {found:016x}, but {written:016x} was written")
    magic, *rest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _damaged(path, offset, f"it begins with {magic!r}, expected {MAGIC!r}")
    return RecordHead(*rest)


def _decode_rows(data: np.ndarray, layout: BlockLayout) -> Batch:
    """Decode all rows of an encoded batch. data: the encoded parts of the batch, one after another, uint8 1-D. layout:
    layout of these parts."""
    ends = np.cumsum(layout.part_bytes)
    parts = dict(enumerate(np.split(data, ends[:-1])))
    schema, num_rows, lengths = read_header(parts[0])
    tokens = np.zeros(num_rows, dtype=np.int64) if lengths is None else lengths.astype(np.int64)
    source = RowSource(
        tuple(schema), np.zeros(num_rows, dtype=np.int32), np.arange(num_rows, dtype=np.int32), exclusive_cumsum(tokens)
    )
    return assemble(schema, tokens, [source], [layout], [parts])
