"""Requests to the directory and its replies, as they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ..codecs import messages
from ..codecs.blocks import BlockLayout
from ..codecs.schema import Schema
from . import errors
from .compact import pack_ints, pack_keys, unpack_ints, unpack_keys
from .directory import ClaimRows, Outcome
from .partition import PutRows


@dataclass(frozen=True, slots=True)
class Register:
    partition: str
    schema: Schema
    tasks: tuple[str, ...]
    group_size: int


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for a partition's `Schema`."""

    partition: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """`PutRows` packed; waits for room for `timeout_s` at most. Answered by `Reserved`."""

    partition: str
    keys: bytes
    fields: tuple[str, ...]
    lengths: bytes | None
    versions: bytes | None
    groups: bytes | None
    tags: dict[str, np.ndarray]
    layouts: tuple[BlockLayout, ...]
    replace: bool
    writer: str
    timeout_s: float

    @staticmethod
    def of(put: PutRows, timeout_s: float) -> Reserve:
        return Reserve(
            put.partition,
            pack_keys(put.keys),
            put.fields,
            None if put.lengths is None else pack_ints(put.lengths),
            None if put.versions is None else pack_ints(put.versions),
            None if put.groups is None else pack_keys(put.groups),
            dict(put.tags),
            put.layouts,
            put.replace,
            put.writer,
            timeout_s,
        )

    def rows(self) -> PutRows:
        return PutRows(
            self.partition,
            unpack_keys(self.keys),
            self.fields,
            None if self.lengths is None else unpack_ints(self.lengths),
            None if self.versions is None else unpack_ints(self.versions),
            None if self.groups is None else unpack_keys(self.groups),
            self.tags,
            self.layouts,
            self.replace,
            self.writer,
        )


@dataclass(frozen=True, slots=True)
class Reserved:
    reservation_id: int
    first_block_id: int
    """The blocks have consecutive ids."""
    locations: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """Answered by a receipt (`KVBatchMeta.to_bytes`)."""

    reservation_id: int
    locations: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    reservation_id: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Answered by a receipt."""

    partition: str
    keys: bytes
    fields: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Waits for rows for `timeout_s` at most. Answered by a receipt."""

    rows: ClaimRows
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Release:
    partition: str
    task: str
    lease_id: int
    keys: bytes
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Clear:
    """Answered by the number of rows cleared."""

    partition: str
    keys: bytes | None


@dataclass(frozen=True, slots=True)
class Status:
    """Answered by `DataPlaneStatus`."""

    partition: str | None


# ------------------------------------------------------------------ replies: one byte, then the body

_OK, _ERROR = b"\0", b"\1"

_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.DataPlaneError)
}


def reply(body: bytes) -> bytes:
    return _OK + body


def reply_error(error: errors.DataPlaneError | ValueError) -> bytes:
    """An error as data: class, message and context. ValueErrors of other classes travel as ValueError."""
    if isinstance(error, errors.DataPlaneError):
        return _ERROR + msgspec.msgpack.encode([type(error).__name__, error.message, error.fields()])
    return _ERROR + msgspec.msgpack.encode(["ValueError", str(error), {}])


def body_of(data: bytes, op: str, elapsed_s: float) -> bytes:
    """A reply's body, or the error it carries raised as the class it was, with op and elapsed time filled in."""
    if data[:1] == _OK:
        return data[1:]
    name, message, fields = msgspec.msgpack.decode(data[1:])
    if name == "ValueError":
        raise ValueError(message)
    fields = {**fields, "op": fields["op"] or op, "elapsed_s": fields["elapsed_s"] or elapsed_s}
    raise _ERRORS[name](message, **fields)


def encode(request: Any) -> bytes:
    return messages.encode(request)
