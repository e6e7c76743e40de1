"""Encodes what a replica leader sends its siblings: a prologue of fixed size, a header, and one flat buffer.

The leader is the rank that reads for its replica, the siblings are the replica's other ranks. Header and buffer are one
message, except where NCCL broadcasts the buffer as a message of its own. The buffer holds the valid bytes of the
columns one after the other, each starting at a multiple of ALIGN; rows are not padded. Small values that are needed on
the host are in the header. When a read failed, the error is sent in place of the header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from ...codecs import messages
from ...codecs.batch import Batch, Column, Jagged, Ragged
from ...codecs.blobs import BlobRows, References
from ...codecs.integers import round_up
from ...codecs.memory import as_bytes
from ...codecs.schema import Kind, Schema
from ...dataplane.compact import pack_ints, unpack_ints
from ...dataplane.directory import requests
from ...dataplane.errors import DataPlaneError

ALIGN = 16
"""Each column starts at a multiple of this number of bytes in the buffer, so that it can be viewed as any dtype."""
_PROLOGUE = struct.Struct("<4s16sB3xIIQ")
PROLOGUE_BYTES = _PROLOGUE.size
_MAGIC = b"hrrp"
_OK, _ERROR = 0, 1
_Facts = tuple[bytes, np.ndarray, bytes, bytes | None, bytes | None, bytes | None]
_PicturesMessage = tuple[tuple[str, ...], np.ndarray, np.ndarray, bytes]
_HeaderMessage = tuple[_Facts | None, tuple[str, ...], tuple[int, ...], dict[str, np.ndarray]]


class ReplicaError(RuntimeError):
    """The ranks of a replica could not share their rows. The message names rank, operation and microbatch."""


class ReplicaLost(ReplicaError):
    """A rank of the replica died or was late.

    The message names the rank (pid, host), the operation, the microbatch and the elapsed time.
    """


class PlanMismatch(ReplicaError):
    """A rank has a different plan than its leader, or is at a different microbatch. The message names both ranks, with
    their plans or microbatches."""


class PrefetchStopped(Exception):
    """Raised in the background thread after a pass has ended early, to end the thread; `make` can raise it too."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """First message of a load (a group of microbatches sent together). It has a fixed size.

    A rank with a different plan raises an error here, before it takes part in a broadcast whose size it cannot know.
    """

    digest: str
    """Hash of the step's plan; at most 16 ASCII characters."""
    failed: bool
    """True if an error (`encode_error`) is sent in place of the header."""
    index: int
    """Index of the first microbatch of the load."""
    header_bytes: int
    """Size of the header in bytes."""
    buffer_bytes: int
    """Size of the buffer in bytes; 0 when there is no buffer."""

    def to_bytes(self) -> bytes:
        status = _ERROR if self.failed else _OK
        digest = self.digest.encode("ascii")
        assert len(digest) <= 16, self.digest
        return _PROLOGUE.pack(_MAGIC, digest, status, self.index, self.header_bytes, self.buffer_bytes)

    @staticmethod
    def from_bytes(data: bytes) -> Prologue:
        """Decode a prologue, the first message of a load. Raises ReplicaError if the bytes are not a prologue."""
        magic, digest, status, index, header_bytes, buffer_bytes = _PROLOGUE.unpack(data)
        if magic != _MAGIC or status not in (_OK, _ERROR):
            raise ReplicaError(f"replica prologue: {len(data)} bytes begin with {magic!r}, expected {_MAGIC!r}")
        return Prologue(digest.rstrip(b"\0").decode("ascii"), status == _ERROR, index, header_bytes, buffer_bytes)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Values per row, of one or more microbatches, that are needed on the host."""

    lengths: np.ndarray
    """Number of tokens of each row before it is sliced for context parallelism, int64 `[N]`."""
    advantages: np.ndarray
    """Advantage of each row, float32 `[N]`."""
    group_ids: np.ndarray
    """Id of each row's group (the samples of one prompt), int64 `[N]`."""
    group_tokens: np.ndarray | None
    """Number of tokens in each row's group, int64 `[N]`; None when the loss does not use it."""
    row_tokens: np.ndarray | None
    """Number of response tokens of each row that are trained on, int64 `[N]`; None when no loss needs it."""
    counted: np.ndarray | None = None
    """1 for each row that counts in means over rows, int64 `[N]`; None when those with trained tokens do."""

    def cut(self, sizes: Sequence[int]) -> list[RowFacts]:
        """Split into consecutive RowFacts that have the numbers of rows in `sizes`."""
        ends = np.cumsum(sizes)
        parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        counts = (self.group_tokens, self.row_tokens, self.counted)
        return [
            RowFacts(
                self.lengths[part],
                self.advantages[part],
                self.group_ids[part],
                *(None if count is None else count[part] for count in counts),
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Header:
    """Describes the columns in a buffer, and the rows that they belong to."""

    facts: RowFacts | None
    """Per-row values that are needed on the host; None in every pass after the first of a step, because the receiver
    already has them."""
    fields: tuple[str, ...]
    """Names of the columns in the order of the buffer. Columns that the receiver has from an earlier pass are left
    out."""
    part_bytes: tuple[int, ...]
    """Size of each column in bytes."""
    shapes: dict[str, np.ndarray]
    """Row shapes of the RAGGED columns: column name -> int64 `[N, ndim]`."""


def encode_header(header: Header) -> bytes:
    """Encode `header` as a message of 7 to 9 bytes per row."""
    facts, packed = header.facts, None
    if facts is not None:
        counts = (facts.group_tokens, facts.row_tokens, facts.counted)
        counts = [None if count is None else pack_ints(count) for count in counts]
        packed = (pack_ints(facts.lengths), facts.advantages, pack_ints(facts.group_ids), *counts)
    return messages.encode((packed, header.fields, header.part_bytes, header.shapes))


def decode_header(data: bytes) -> Header:
    """Decode a header that `encode_header` encoded. Raises ValueError when the bytes are not a valid header."""
    packed, fields, part_bytes, shapes = messages.decode(data, _HeaderMessage)
    if packed is None:
        return Header(None, fields, part_bytes, shapes)
    lengths, advantages, groups, *counts = packed
    unpacked = [None if count is None else unpack_ints(count) for count in counts]
    facts = RowFacts(unpack_ints(lengths), advantages, unpack_ints(groups), *unpacked)
    return Header(facts, fields, part_bytes, shapes)


def describe(batch: Batch, facts: RowFacts | None) -> Header:
    """Return the header of a buffer that holds `batch`. facts: per-row values, as in `Header`.

    Raises ValueError for an OBJECT column, because only tensors are broadcast.
    """
    part_bytes, shapes = [], {}
    for name, column in batch.items():
        if isinstance(column, list):
            raise ValueError(f"field {name!r}: got {Kind.OBJECT.value}, expected tensors, which can be broadcast")
        values = column if isinstance(column, torch.Tensor) else column.values
        part_bytes.append(values.numel() * values.element_size())
        if isinstance(column, Ragged):
            shapes[name] = column.shapes
    return Header(facts, tuple(batch), tuple(part_bytes), shapes)


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of ALIGN."""
    return round_up(nbytes, ALIGN)


def buffer_bytes(header: Header) -> int:
    """Return the size in bytes of the buffer that `header` describes."""
    return sum(map(aligned, header.part_bytes))


def fill_buffer(batch: Batch, header: Header, buffer: torch.Tensor) -> None:
    """Copy the columns of `batch` into `buffer`, uint8 `[buffer_bytes]` on the CPU."""
    target, begin = buffer.numpy(), 0
    for name, nbytes in zip(header.fields, header.part_bytes, strict=True):
        column = batch[name]
        assert not isinstance(column, list)
        values = column if isinstance(column, torch.Tensor) else column.values
        target[begin : begin + nbytes] = as_bytes(values)
        begin += aligned(nbytes)


def read_buffer(header: Header, schema: Schema, lengths: np.ndarray, buffer: torch.Tensor) -> Batch:
    """Return the columns in `buffer` (uint8, on any device) as views of it.

    lengths: number of tokens of each row in the buffer, int64 `[N]`. Raises ReplicaError when buffer and header do not
    agree.
    """
    columns: dict[str, Column] = {}
    begin = 0
    num_rows = len(lengths)
    for name, nbytes in zip(header.fields, header.part_bytes, strict=True):
        field = schema[name]
        assert field.dtype is not None
        count = _items(field.kind, lengths, num_rows, header.shapes.get(name))
        if nbytes != count * field.item_bytes or begin + nbytes > len(buffer):
            raise ReplicaError(
                f"field {name!r}: the leader sent {nbytes} bytes at byte {begin} of a buffer of {len(buffer)} bytes, "
                f"expected {count * field.item_bytes} bytes within it"
            )
        # An empty slice can start at an offset that is not aligned for a wider dtype.
        part = buffer[begin : begin + nbytes] if nbytes else buffer.new_empty(0)
        trailing = () if field.kind is Kind.RAGGED else field.trailing
        values = part.view(field.dtype).reshape(count, *trailing)
        if field.kind is Kind.PER_TOKEN:
            columns[name] = Jagged(values, lengths)
        elif field.kind is Kind.RAGGED:
            columns[name] = Ragged(values, header.shapes[name])
        else:
            columns[name] = values
        begin += aligned(nbytes)
    return Batch(schema.subset(header.fields), num_rows, columns)


def _items(kind: Kind, lengths: np.ndarray, num_rows: int, shapes: np.ndarray | None) -> int:
    if kind is Kind.PER_TOKEN:
        return int(lengths.sum())
    if kind is Kind.RAGGED:
        assert shapes is not None
        return int(shapes.prod(axis=1).sum())
    return num_rows


# ---------------- The pictures of a microbatch are a message of their own, after that of its columns.


def encode_pictures(pictures: BlobRows) -> tuple[bytes, torch.Tensor]:
    """Return the header of a microbatch's pictures, and their buffer, uint8 on the CPU.

    Raises ValueError for a part that is an OBJECT, because only tensors are broadcast.
    """
    header, references = describe(pictures.blobs, None), pictures.references
    buffer = torch.empty(buffer_bytes(header), dtype=torch.uint8)
    fill_buffer(pictures.blobs, header, buffer)
    message = (tuple(references.names), references.index, references.counts, encode_header(header))
    return messages.encode(message), buffer


def decode_pictures(head: bytes, schema: Schema, buffer: torch.Tensor) -> BlobRows:
    """Return the pictures that `encode_pictures` encoded, as views of the buffer. schema: the parts of a picture."""
    names, index, counts, header = messages.decode(head, _PicturesMessage)
    blobs = read_buffer(decode_header(header), schema, np.zeros(len(names), np.int64), buffer)
    return BlobRows(blobs, References(names, index, counts))


# ---------------- A leader that fails sends its error instead of rows.


def encode_error(error: BaseException) -> bytes:
    """Encode the error that a leader failed with. Data-plane errors and ValueErrors keep their class; others are sent
    as text."""
    if isinstance(error, DataPlaneError | ValueError):
        return b"d" + requests.reply_error(error)
    return b"r" + f"{type(error).__name__}: {error}".encode()


def raise_error(data: bytes, leader: str, op: str, elapsed_s: float) -> NoReturn:
    """Raise the error that `encode_error` encoded, with a note that names the leader. It has the same class and
    message; errors that were sent as text become a ReplicaError."""
    try:
        if data[:1] == b"d":
            requests.body_of(data[1:], op, elapsed_s)
        raise ReplicaError(f"{leader} failed: {data[1:].decode(errors='replace')}")
    except (DataPlaneError, ValueError, ReplicaError) as error:
        error.add_note(f"raised by {leader}, which reads for this rank")
        raise
