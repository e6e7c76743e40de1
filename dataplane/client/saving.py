"""Saves a partition into one file and loads it: its definition, its rows, and the directory's metadata of the rows.

A file begins with MAGIC, which names the version of the format. Records follow. The number of bytes of a record and
their xxh3 checksum stand before the record. The first record is the message `SavedPartition`. Two records follow for
each chunk of rows: the message `SavedChunk`, and the parts of a block (`codecs/blocks.py`) that holds the rows. Then
each blob to which rows refer follows in the same way. Nothing is pickled, so that reading a file runs no code.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash

from ...codecs import messages
from ...codecs.batch import Batch
from ...codecs.blobs import Blob, References
from ...codecs.blocks import BlockLayout, encode_block, read_header
from ...codecs.gather import RowSource, assemble
from ...codecs.jagged import unpack
from ..blobs.row_references import holder_of_blobs
from ..directory import requests
from ..directory.calls import Fence
from ..directory.partition import PartitionState
from ..errors import DataPlaneError
from ..meta import KVBatchMeta
from ..status import PartitionRows
from .arguments import checked
from .operations import ABORT_TIMEOUT_S, Operations, undo_s
from .steps import SHIELD, Ask, Moved, Steps, Work

T = TypeVar("T")

MAGIC = b"hrpart2\n"
_READABLE = (b"hrpart1\n", MAGIC)
"""Versions of the format that can be read. Files of the first version lack the notes of samplers."""
_RECORD = struct.Struct("<QQ")
"""Head of a record: the number of bytes of the record, and their xxh3."""


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """First record of a file."""

    partition: str
    """Name of the partition that was saved."""
    rows: bytes
    """All rows of the partition without their content, as `PartitionRows.to_bytes` encodes them."""
    state: bytes
    """Encoded state of the partition. Only the directory (the metadata service) interprets it."""
    num_chunks: int
    blobs: dict[str, list[str]] = field(default_factory=dict)
    """Digests of the blobs of each field with blobs, in the order of their chunks, which follow those of the rows."""


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """Description of one chunk of rows. All rows of a chunk have the same fields written."""

    fields: tuple[str, ...]
    """Names of all fields that are written in these rows."""
    start: int
    """Position of the first row among the rows with exactly these fields, in the order of `SavedPartition.rows`."""
    layout: BlockLayout


def rows_with(rows: PartitionRows, fields: Sequence[str]) -> np.ndarray:
    """Return the positions of the rows in which exactly `fields` are written, int64, ascending."""
    exactly = np.ones(len(rows), dtype=bool)
    for name, flags in rows.written.items():
        exactly &= flags == (name in fields)
    return np.flatnonzero(exactly)


class PartitionWriter:
    """Writes one file under a temporary name beside `path`, and renames it to `path` once it is complete."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._draft = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        self._file: BinaryIO | None = None

    def begin(self, saved: SavedPartition) -> None:
        """Create the file, with its first record. Raises OSError when the folder cannot be written to."""
        self._file = open(self._draft, "xb")
        self._file.write(MAGIC)
        self._record([messages.encode(saved)])

    def add(self, start: int, batch: Batch) -> None:
        """Append a chunk of rows. start: as in `SavedChunk`."""
        block = encode_block(batch, 0, batch.num_rows, checksum=False)
        self._record([messages.encode(SavedChunk(tuple(batch), start, block.layout))])
        pieces: list[bytes | memoryview] = []
        end = 0
        for offset, part in zip(block.layout.offsets, block.parts, strict=True):
            pieces += [bytes(offset - end), part.data]
            end = offset + part.nbytes
        self._record(pieces)

    def finish(self) -> None:
        """Flush the file to the disk and rename it to its path. This replaces an existing file of that name."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._draft, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove the file if it is not finished. An older file at the path remains unchanged."""
        if self._file is not None:
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._draft.unlink()

    def _record(self, pieces: Sequence[bytes | memoryview]) -> None:
        assert self._file is not None
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        self._file.write(_RECORD.pack(sum(map(len, pieces)), digest.intdigest()))
        self._file.writelines(pieces)


class PartitionReader:
    """Reads one file. The file is opened for each read, so that nothing has to be closed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the file once from beginning to end, and check every record.

        Raises ValueError when it is not a saved partition, or is truncated or damaged, and OSError when it cannot be
        read.
        """
        self._path = Path(path)
        self._offsets: list[int] = []
        """Offset of each chunk in the file."""
        with open(self._path, "rb") as file:
            if (magic := file.read(len(MAGIC))) not in _READABLE:
                raise ValueError(
                    f"{self._path}: not a saved partition that this version can read: it begins with {magic!r}, "
                    f"expected one of {', '.join(map(repr, _READABLE))}"
                )
            self.saved = self._decoded(self._next(file), SavedPartition)
            self.rows = PartitionRows.from_bytes(self.saved.rows)
            for _ in range(self.saved.num_chunks + sum(map(len, self.saved.blobs.values()))):
                self._offsets.append(file.tell())
                self._next(file)
                self._next(file)
            if file.read(1):
                raise ValueError(f"{self._path}: damaged: unexpected bytes after its {self.saved.num_chunks} chunks")
        self._matching: dict[tuple[str, ...], np.ndarray] = {}
        names = [(name, blob) for name, blobs in self.saved.blobs.items() for blob in blobs]
        self._blobs = {named: self.saved.num_chunks + place for place, named in enumerate(names)}
        """Number of the chunk of each blob, by its field and its digest."""

    def chunk(self, number: int) -> tuple[np.ndarray, Batch]:
        """Return (positions of the rows in `rows`, their fields) of one chunk, from 0 to `num_chunks` - 1. Raises
        ValueError when the file has changed since it was opened."""
        chunk, batch = self._batch(number)
        if chunk.fields not in self._matching:
            self._matching[chunk.fields] = rows_with(self.rows, chunk.fields)
        return self._matching[chunk.fields][chunk.start : chunk.start + batch.num_rows], batch

    def fields(self, batch: Batch) -> dict[str, Any]:
        """Return the fields of a chunk, with the blobs to which its rows refer in place of their digests."""
        found: dict[str, Any] = dict(batch)
        for name in self.saved.blobs.keys() & found.keys():
            references = References.read(batch.ragged(name))
            blobs = [
                Blob(batch.schema[name], _only_row(self._batch(self._blobs[name, blob])[1]))
                for blob in references.names
            ]
            ends = np.cumsum(references.counts)
            found[name] = [[blobs[i] for i in part] for part in np.split(references.index, ends)[:-1]]
        return found

    def _batch(self, number: int) -> tuple[SavedChunk, Batch]:
        with open(self._path, "rb") as file:
            file.seek(self._offsets[number])
            chunk = self._decoded(self._next(file), SavedChunk)
            data = self._next(file)
        layout = chunk.layout
        views = dict(enumerate(data[at : at + n] for at, n in zip(layout.offsets, layout.part_bytes, strict=True)))
        schema, num_rows, found = read_header(views[0])
        lengths = np.zeros(num_rows, np.int64) if found is None else found.astype(np.int64)
        places = np.arange(num_rows, dtype=np.int32)
        source = RowSource(chunk.fields, np.zeros_like(places), places, np.cumsum(lengths) - lengths)
        return chunk, assemble(schema.subset(chunk.fields), lengths, [source], [layout], [views])

    def _next(self, file: BinaryIO) -> np.ndarray:
        """Read the record at the file's position and check it. Returns its bytes, uint8 1-D."""
        offset = file.tell()
        head = file.read(_RECORD.size)
        nbytes, written = _RECORD.unpack(head) if len(head) == _RECORD.size else (-1, 0)
        if not 0 <= nbytes <= os.fstat(file.fileno()).st_size - file.tell():
            raise ValueError(f"{self._path}: truncated, or damaged: the record at byte {offset} is incomplete")
        data = np.fromfile(file, np.uint8, nbytes)
        if xxhash.xxh3_64_intdigest(data.data) != written:
            raise ValueError(f"{self._path}: damaged: the checksum of the record at byte {offset} does not match")
        return data

    def _decoded(self, data: np.ndarray, of: type[T]) -> T:
        try:
            return messages.decode(data.tobytes(), of)
        except ValueError as error:
            raise ValueError(f"{self._path}: not a partition that this version can read: {error}") from None


def _only_row(batch: Batch) -> dict[str, Any]:
    """Return the values of a batch of one row, by field."""
    return {name: values[0] for name, values in unpack(batch).items()}


_logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Number of bytes of rows that are read or put at a time, unless a single row has more."""
CHUNK_ROWS = 1 << 16


@checked
def save(
    operations: Operations, partition: str, path: str | os.PathLike[str], timeout_s: float | None
) -> Steps[Moved[int]]:
    """Save a partition; see `DataPlaneClient.save`."""
    bound, operations = operations.timeout(timeout_s), operations.of(partition)
    reply = yield Ask(operations.link, "export", requests.encode(requests.OnePartition(partition)), bound)
    exported = messages.decode(reply, requests.Exported)
    rows = PartitionRows.from_bytes(exported.rows)
    chunks = [
        (meta, start, stop) for meta in map(KVBatchMeta.from_bytes, exported.receipts) for start, stop in _chunks(meta)
    ]
    state = messages.encode(exported.state)
    blobs: dict[str, list[str]] = {}
    for name, declared in exported.state.schema.items():
        if declared.parts:
            listed = yield from operations.rows(holder_of_blobs(partition, name), None, timeout_s)
            blobs[name] = listed.keys.tolist()
    saved = SavedPartition(partition, exported.rows, state, len(chunks), blobs)
    writer = PartitionWriter(path)
    nbytes = 0
    yield SHIELD
    try:
        yield Work("save", functools.partial(writer.begin, saved), time.monotonic() + bound)
        for meta, start, stop in chunks:
            moved = yield from operations.get(meta.select(np.arange(start, stop)), None, timeout_s)
            nbytes += moved.nbytes
            yield Work("save", functools.partial(writer.add, start, moved.result), time.monotonic() + bound)
        for name, blob in ((name, blob) for name, found in blobs.items() for blob in found):
            parts = tuple(part.name for part in exported.state.schema[name].parts)
            moved = yield from operations.get_keys(holder_of_blobs(partition, name), [blob], parts, timeout_s)
            nbytes += moved.nbytes
            yield Work("save", functools.partial(writer.add, 0, moved.result), time.monotonic() + bound)
        yield Work("save", writer.finish, time.monotonic() + bound)
    except BaseException:
        writer.discard()
        raise
    return Moved(len(rows), nbytes)


def _chunks(meta: KVBatchMeta) -> Iterator[tuple[int, int]]:
    """Divide a receipt's rows into chunks of about CHUNK_BYTES, and yield (start, stop) of each. A receipt has rows'
    keys and locations. Sizes of rows are estimated from the sizes of their blocks."""
    sizes = np.array([ref.layout.nbytes / max(1, ref.layout.num_rows) for ref in meta.blocks])
    ends = np.cumsum(sum((sizes[source.block] for source in meta.sources), np.zeros(len(meta))))
    start = 0
    while start < len(meta):
        before = ends[start - 1] if start else 0.0
        stop = int(np.searchsorted(ends, before + CHUNK_BYTES, "right"))
        stop = min(max(stop, start + 1), start + CHUNK_ROWS, len(meta))
        yield start, stop
        start = stop


@checked
def load(
    operations: Operations, path: str | os.PathLike[str], partition: str | None, timeout_s: float | None
) -> Steps[Moved[str]]:
    """Load a saved partition; see `DataPlaneClient.load`."""
    bound = operations.timeout(timeout_s)
    reader = yield Work("load", functools.partial(PartitionReader, path), time.monotonic() + bound)
    saved, rows = reader.saved, reader.rows
    name = saved.partition if partition is None else partition
    drop = requests.encode(requests.OnePartition(name))
    restore = requests.Restore(name, messages.decode(saved.state, PartitionState), saved.rows)
    yield SHIELD
    operations = operations.of(name)
    yield Ask(operations.link, "restore", requests.encode(restore), bound, lambda _: ("unregister", drop))
    operations.forget(name)
    nbytes = 0
    try:
        for number in range(saved.num_chunks):
            chunk = functools.partial(reader.chunk, number)
            places, batch = yield Work("load", chunk, time.monotonic() + bound)
            fields = yield Work("load", functools.partial(reader.fields, batch), time.monotonic() + bound)
            keys, groups = rows.keys[places].tolist(), rows.group_names[places].tolist()
            put = operations.fenced_put(name, keys, fields, None, groups, None, False, timeout_s, (Fence(None),))
            moved = yield from put
            nbytes += moved.nbytes
    except BaseException as error:
        yield from _remove(operations, name, undo_s(error))
        raise
    return Moved(name, nbytes, functools.partial(_remove, operations, name))


def _remove(operations: Operations, partition: str, timeout_s: float = ABORT_TIMEOUT_S) -> Steps[None]:
    """Unregister a partition whose `load` failed or was interrupted."""
    request = requests.encode(requests.OnePartition(partition))
    try:
        yield Ask(operations.link, "unregister", request, timeout_s, undoes=True)
    except (DataPlaneError, ValueError) as error:
        _logger.warning("partition %r, which was loaded in part, could not be removed: %s", partition, error)
