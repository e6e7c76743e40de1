"""Defines the requests to the directory and its replies, as they travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ...codecs import messages
from ...codecs.schema import Schema
from .. import errors
from .directory import Outcome
from .partition import ClaimRows, Committed, PutRows
from .samplers import TaskConfig


@dataclass(frozen=True, slots=True)
class Register:
    partition: str
    schema: Schema
    tasks: tuple[TaskConfig, ...]
    group_size: int


@dataclass(frozen=True, slots=True)
class Unregister:
    """Forgets a partition. Answered by the number of rows that it had."""

    partition: str


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks for a partition's `Schema`."""

    partition: str


@dataclass(frozen=True, slots=True)
class Reserve:
    """Checks rows and waits for space for at most `timeout_s`. Answered by `Space`."""

    put: PutRows
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
    put: PutRows
    locations: tuple[bytes, ...] | None
    """Location of each block; None when the space has a location."""
    next_bytes: int
    """Number of bytes that the writer would like for its next put."""
    next_blocks: int


@dataclass(frozen=True, slots=True)
class Written:
    """Confirms a put."""

    committed: Committed
    next_space: Space | None
    """Credit for the next put, unless another writer needs the space before."""


@dataclass(frozen=True, slots=True)
class Abort:
    space_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Takes back a put whose writer was cut off, whether it was committed or not."""

    partition: str
    keys: bytes
    first_block_id: int
    num_blocks: int
    space_id: int


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
class Renew:
    """Makes leases last for another `lease_s`. Answered by the ids of those that have not ended."""

    lease_ids: tuple[int, ...]


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
CANCELLED = b"\2"
"""Reply to a request that was cancelled before it took effect."""
WAITING_OPS = frozenset(("claim", "reserve"))
"""Requests that wait, and that can be cancelled while they do."""
TAKE_EFFECT = frozenset(("register", "unregister", "claim", "release", "clear", "clear_stale"))
"""Requests after which something is different for good, so that it matters whether one whose answer is lost was carried
out. A put that is cut off is taken back by a request of its own."""
TAKE_BACK = frozenset(("abort", "withdraw"))
"""Requests that are carried out even if nobody waits for their answer."""
REVOKED = b""
"""Body of the reply to a Commit whose credit was revoked: nothing was written, and the put must reserve space."""

_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.DataPlaneError)
}


def reply(body: bytes) -> bytes:
    return _OK + body


def is_done(data: bytes) -> bool:
    """Return whether a reply says that the request was carried out."""
    return data[:1] == _OK


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
