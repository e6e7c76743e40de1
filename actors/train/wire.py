"""What a leader sends its siblings of a load of microbatches: a prologue of fixed size, a header, one flat buffer.

On the CPU header and buffer are one message; to GPUs the buffer goes on its own. The buffer holds the columns' valid
bytes one after the other, each at a multiple of ALIGN; nothing is padded. What is small and wanted on the host is in
the header. A failed read travels as the header in place of a microbatch's.
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
from ...codecs.gather import as_bytes
from ...codecs.schema import Kind, Schema
from ...dataplane.compact import pack_ints, unpack_ints
from ...dataplane.directory import requests
from ...dataplane.errors import DataPlaneError

ALIGN = 16
"""Columns start at multiples of this, so that views of any dtype are aligned."""
_PROLOGUE = struct.Struct("<4s16sB3xIIQ")
PROLOGUE_BYTES = _PROLOGUE.size
_MAGIC = b"hrrp"
_OK, _ERROR = 0, 1


class ReplicaError(RuntimeError):
    """A replica's ranks could not share their rows; names rank, operation and microbatch."""


class ReplicaLost(ReplicaError):
    """A rank of the replica died or was late; names it (pid, host), the operation, microbatch and elapsed time."""


class PlanMismatch(ReplicaError):
    """A rank holds another plan, or stands at another microbatch, than its leader; names both."""


@dataclass(frozen=True, slots=True)
class Prologue:
    """What comes first, so that a rank of another plan refuses before it takes part in anything whose size it may not
    know."""

    digest: str
    """The plan's; at most 16 ASCII characters."""
    failed: bool
    """The header is an error (`encode_error`)."""
    index: int
    """Of the load's first microbatch."""
    header_bytes: int
    buffer_bytes: int
    """0: there is none."""

    def to_bytes(self) -> bytes:
        status = _ERROR if self.failed else _OK
        digest = self.digest.encode("ascii")
        assert len(digest) <= 16, self.digest
        return _PROLOGUE.pack(_MAGIC, digest, status, self.index, self.header_bytes, self.buffer_bytes)

    @staticmethod
    def from_bytes(data: bytes) -> Prologue:
        """Raises ReplicaError for foreign bytes."""
        magic, digest, status, index, header_bytes, buffer_bytes = _PROLOGUE.unpack(data)
        if magic != _MAGIC or status not in (_OK, _ERROR):
            raise ReplicaError(f"replica prologue: {len(data)} bytes begin with {magic!r}, expected {_MAGIC!r}")
        return Prologue(digest.rstrip(b"\0").decode("ascii"), status == _ERROR, index, header_bytes, buffer_bytes)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a microbatch says of its rows besides their columns."""

    lengths: np.ndarray
    """int64 `[N]`: tokens of each whole row."""
    advantages: np.ndarray
    """float32 `[N]`."""
    group_ids: np.ndarray
    """int64 `[N]`."""
    group_tokens: np.ndarray | None
    """int64 `[N]`, or None."""

    def cut(self, sizes: Sequence[int]) -> list[RowFacts]:
        """Of consecutive rows."""
        ends = np.cumsum(sizes)
        parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        tokens = self.group_tokens
        return [
            RowFacts(
                self.lengths[part],
                self.advantages[part],
                self.group_ids[part],
                None if tokens is None else tokens[part],
            )
            for part in parts
        ]


@dataclass(frozen=True, slots=True)
class Header:
    """What the buffer holds, and of which rows."""

    facts: RowFacts | None
    """None in the passes after a step's first: the receiver has them."""
    fields: tuple[str, ...]
    """Columns in the order of the buffer; those that the receiver has from an earlier pass are not among them."""
    part_bytes: tuple[int, ...]
    """Of each column."""
    shapes: dict[str, np.ndarray]
    """int64 `[N, ndim]` of each RAGGED column."""


_Facts = tuple[bytes, np.ndarray, bytes, bytes | None]
_HeaderMessage = tuple[_Facts | None, tuple[str, ...], tuple[int, ...], dict[str, np.ndarray]]


def encode_header(header: Header) -> bytes:
    """`header` as a message: 7 to 9 bytes a row."""
    facts, packed = header.facts, None
    if facts is not None:
        tokens = None if facts.group_tokens is None else pack_ints(facts.group_tokens)
        packed = (pack_ints(facts.lengths), facts.advantages, pack_ints(facts.group_ids), tokens)
    return messages.encode((packed, header.fields, header.part_bytes, header.shapes))


def decode_header(data: bytes) -> Header:
    """Inverse of `encode_header`. Raises ValueError for foreign bytes."""
    packed, fields, part_bytes, shapes = messages.decode(data, _HeaderMessage)
    if packed is None:
        return Header(None, fields, part_bytes, shapes)
    lengths, advantages, groups, tokens = packed
    group_tokens = None if tokens is None else unpack_ints(tokens)
    facts = RowFacts(unpack_ints(lengths), advantages, unpack_ints(groups), group_tokens)
    return Header(facts, fields, part_bytes, shapes)


def describe(batch: Batch, facts: RowFacts | None) -> Header:
    """The header of a buffer with `batch`. facts: as in `Header`.

    Raises ValueError for an OBJECT column, which has no place in a buffer.
    """
    part_bytes, shapes = [], {}
    for name, column in batch.items():
        if isinstance(column, list):
            raise ValueError(f"field {name!r}: is {Kind.OBJECT.value}, expected tensors, as only those are broadcast")
        values = column if isinstance(column, torch.Tensor) else column.values
        part_bytes.append(values.numel() * values.element_size())
        if isinstance(column, Ragged):
            shapes[name] = column.shapes
    return Header(facts, tuple(batch), tuple(part_bytes), shapes)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next thing may start."""
    return -(-nbytes // ALIGN) * ALIGN


def buffer_bytes(header: Header) -> int:
    """Bytes of the buffer that `header` describes."""
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
    """The columns in `buffer`, uint8 on any device, as views of it. lengths: int64 `[N]`, tokens sent of each row.

    Raises ReplicaError when the buffer does not hold what the header says.
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
                f"field {name!r}: the leader sent {nbytes} bytes of {len(buffer)}, expected {count * field.item_bytes}"
            )
        # An empty slice may start where no view of a wider dtype can.
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


# ---------------------------------------------------------------- errors


def encode_error(error: BaseException) -> bytes:
    """What a leader's failure travels as: the data plane's errors and ValueErrors as themselves, others by their
    text."""
    if isinstance(error, DataPlaneError | ValueError):
        return b"d" + requests.reply_error(error)
    return b"r" + f"{type(error).__name__}: {error}".encode()


def raise_error(data: bytes, leader: str, op: str, elapsed_s: float) -> NoReturn:
    """Raise what `encode_error` told: the same class with the same text, with a note of whose failure it is."""
    try:
        if data[:1] == b"d":
            requests.body_of(data[1:], op, elapsed_s)
        raise ReplicaError(f"{leader} failed: {data[1:].decode(errors='replace')}")
    except (DataPlaneError, ValueError, ReplicaError) as error:
        error.add_note(f"raised by {leader}, which reads for this rank")
        raise
