"""Defines the requests to the directory and its replies, as they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...codecs import messages
from ...codecs.blocks import BlockLayout
from ...codecs.schema import Schema
from .. import errors
from ..compact import pack_ints, pack_keys, unpack_ints, unpack_keys
from .directory import Outcome
from .partition import ClaimRows, Committed, Grouping, PutRows
from .samplers import TaskConfig


@dataclass(frozen=True, slots=True)
class Register:
    partition: str
    schema: Schema
    tasks: tuple[TaskConfig, ...]
    group_size: int


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for a partition's `Schema`."""

    partition: str


@dataclass(frozen=True, slots=True)
class Rows:
    """Packs `PutRows` into few bytes."""

    partition: str
    keys: bytes
    fields: tuple[str, ...]
    lengths: bytes | None
    versions: bytes | None
    group_names: bytes | None
    """Names of the groups, packed; None when each key is a group of its own, named after it."""
    group_index: bytes
    groups_given: bool
    tags: dict[str, np.ndarray]
    block_fields: tuple[str, ...]
    blocks: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Numbers of rows and tokens, and the bytes of each part, of each block."""
    replace: bool
    writer: str

    @staticmethod
    def of(put: PutRows) -> Rows:
        derived = not put.groups.given and len(put.groups.names) == len(put.keys)
        return Rows(
            put.partition,
            pack_keys(put.keys),
            put.fields,
            None if put.lengths is None else pack_ints(put.lengths),
            None if put.versions is None else pack_ints(put.versions),
            None if derived else pack_keys(put.groups.names),
            b"" if derived else pack_ints(put.groups.index),
            put.groups.given,
            dict(put.tags),
            put.layouts[0].fields,
            tuple((at.num_rows, at.num_tokens, at.part_bytes) for at in put.layouts),
            put.replace,
            put.writer,
        )

    def put(self) -> PutRows:
        keys = unpack_keys(self.keys)
        if self.group_names is None:
            groups = Grouping.of(keys, None)
        else:
            groups = Grouping(unpack_keys(self.group_names), unpack_ints(self.group_index), self.groups_given)
        return PutRows(
            self.partition,
            keys,
            self.fields,
            None if self.lengths is None else unpack_ints(self.lengths),
            None if self.versions is None else unpack_ints(self.versions),
            groups,
            self.tags,
            tuple(BlockLayout(self.block_fields, *block) for block in self.blocks),
            self.replace,
            self.writer,
        )


@dataclass(frozen=True, slots=True)
class Reserve:
    """Checks rows and waits for space for at most `timeout_s`. Answered by `Space`."""

    rows: Rows
    timeout_s: float
    given_back: tuple[int, ...]
    """Ids of spaces that the writer does not need."""


@dataclass(frozen=True, slots=True)
class Space:
    """Names the space to which one put may write, if it commits within `reserve_s`."""

    space_id: int
    first_block_id: int
    num_blocks: int
    """Number of blocks that fit; their ids are consecutive."""
    nbytes: int
    location: bytes
    """Location of the space, for blocks laid end to end; b"" when blocks are located as they are written."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Makes written rows readable. Answered by `Written`, or by REVOKED when the directory has taken the credit
    back."""

    space_id: int
    credit: bool
    """Whether the space was granted with the reply to an earlier put."""
    rows: Rows
    locations: tuple[bytes, ...] | None
    """Location of each block; None when the space has a location."""
    next_bytes: int
    """Number of bytes that the writer would like for its next put."""
    next_blocks: int


@dataclass(frozen=True, slots=True)
class Written:
    """Packs those parts of `Committed` that the writer does not know."""

    first_block_id: int
    locations: tuple[bytes, ...] | None
    lengths: bytes | None
    versions: bytes | None
    groups: bytes
    tags: dict[str, np.ndarray]
    next_space: Space | None
    """Credit for the next put, unless another writer needs the space before."""

    @staticmethod
    def of(committed: Committed, request: Commit, next_space: Space | None) -> Written:
        return Written(
            committed.first_block_id,
            None if request.locations is not None else committed.locations,
            None if request.rows.lengths is not None else pack_ints(committed.lengths),
            None if request.rows.versions is not None else pack_ints(committed.versions),
            pack_ints(committed.groups),
            committed.tags,
            next_space,
        )

    def committed(self, put: PutRows, locations: tuple[bytes, ...] | None) -> Committed:
        """Unpack. `locations` are those that the writer knows."""
        found = self.locations if locations is None else locations
        lengths = put.lengths if self.lengths is None else unpack_ints(self.lengths)
        versions = put.versions if self.versions is None else unpack_ints(self.versions)
        assert found is not None and lengths is not None and versions is not None
        return Committed(self.first_block_id, found, lengths, versions, unpack_ints(self.groups), self.tags)


@dataclass(frozen=True, slots=True)
class Abort:
    space_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Asks for a receipt."""

    partition: str
    keys: bytes
    fields: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Claim:
    """Waits for rows for at most `timeout_s`. Answered by a receipt."""

    rows: ClaimRows
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ClearStale:
    """Clears the rows that such a claim passes over as too old. Answered by their keys, packed."""

    rows: ClaimRows


@dataclass(frozen=True, slots=True)
class Release:
    partition: str
    task: str
    lease_id: int
    keys: bytes
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Clear:
    """Forgets rows. Answered by the number of rows cleared."""

    partition: str
    keys: bytes | None


@dataclass(frozen=True, slots=True)
class Status:
    """Asks for the `DataPlaneStatus`."""

    partition: str | None


# ------------------------------------------------------------------ replies: one byte, then the body

_OK, _ERROR = b"\0", b"\1"
REVOKED = b""
"""Body of the reply to a Commit whose credit was revoked: nothing was written, and the put must reserve space."""

_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.DataPlaneError)
}


def reply(body: bytes) -> bytes:
    return _OK + body


def reply_error(error: errors.DataPlaneError | ValueError) -> bytes:
    """Encode an error by class, message and context. ValueErrors of other classes travel as ValueError."""
    if isinstance(error, errors.DataPlaneError):
        return _ERROR + msgspec.msgpack.encode([type(error).__name__, error.message, error.fields()])
    return _ERROR + msgspec.msgpack.encode(["ValueError", str(error), {}])


def body_of(data: bytes, op: str, elapsed_s: float) -> bytes:
    """Return a reply's body, or raise the error that it carries, as its own class, with op and elapsed time filled
    in."""
    if data[:1] == _OK:
        return data[1:]
    name, message, fields = msgspec.msgpack.decode(data[1:])
    if name == "ValueError":
        raise ValueError(message)
    fields = {**fields, "op": fields["op"] or op, "elapsed_s": fields["elapsed_s"] or elapsed_s}
    raise _ERRORS[name](message, **fields)


def encode(request: Any) -> bytes:
    return messages.encode(request)
