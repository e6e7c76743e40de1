"""Defines the requests to the directory and its replies, as they travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...codecs import messages
from ...codecs.schema import Schema
from .. import errors
from ..block_store import ANY_HOLDER
from .calls import ClaimRows, Committed, Outcome, PutRows
from .partition import PartitionState
from .samplers import TaskConfig


class Register(msgspec.Struct, frozen=True, array_like=True):
    """Request to declare a partition. The reply is whether it is new, or replaces one with other arguments."""

    partition: str
    schema: Schema
    tasks: tuple[TaskConfig, ...]
    group_size: int
    redefine: bool = False
    """Whether to replace a partition that is registered with other arguments, and to forget its rows. False refuses the
    request."""


class AddTasks(msgspec.Struct, frozen=True, array_like=True):
    """Request to add tasks to a partition that is registered."""

    partition: str
    tasks: tuple[TaskConfig, ...]


class OnePartition(msgspec.Struct, frozen=True, array_like=True):
    """Request about a partition as a whole. `leases` returns its leases, and `export` an `Exported`, from which it can
    be saved. `unregister` forgets the partition and returns the number of its rows."""

    partition: str


class AddFields(msgspec.Struct, frozen=True, array_like=True):
    """Request to extend a partition's schema. The reply is the extended `Schema`."""

    partition: str
    fields: Schema
    """Fields to add. Fields that the partition already has are ignored."""


class Reserve(msgspec.Struct, frozen=True, array_like=True):
    """Request to check rows and to reserve space for them, waiting at most `timeout_s` for space. The reply is a
    `Space`."""

    put: PutRows
    timeout_s: float
    given_back: tuple[int, ...]
    """Ids of spaces from earlier replies that the writer does not need and gives back."""


class Space(msgspec.Struct, frozen=True, array_like=True):
    """Names the space in the store to which one put can write. The put must commit within `reserve_s`."""

    space_id: int
    first_block_id: int
    num_blocks: int
    """Number of block ids that the put may use, consecutive from `first_block_id`."""
    nbytes: int
    location: bytes
    """Location of the space in the store, where the put's blocks are laid end to end; b"" for a store that locates each
    block only when it is written."""
    holder: int = ANY_HOLDER
    """Number of a process of the store on the host with the space; ANY_HOLDER if the store has only one host."""


class Describe(msgspec.Struct, frozen=True, array_like=True):
    """Request of a writer for what it needs before its first put to a partition. The reply is a `Described`."""

    partition: str
    writer: str
    near: int = ANY_HOLDER
    """Number of a process of the store on the writer's host; ANY_HOLDER if there is none."""


class Described(msgspec.Struct, frozen=True, array_like=True):
    """Reply that describes a partition to a writer."""

    schema: bytes
    """The partition's schema, as `pack_schema` encodes it."""
    next_space: Space | None
    """Space granted in advance for a put as large as the last one of the partition, as in `Written`."""


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """Request to make written rows readable. The reply is `Written`, or REVOKED when the space was credit (granted in
    advance) and the directory has taken it back."""

    space_id: int
    credit: bool
    """True if the space was granted in advance (as credit), with the reply to an earlier put."""
    put: PutRows
    locations: tuple[bytes, ...] | None
    """Location of each block, as the store returned it when the block was written; None when the space itself has a
    location."""
    next_bytes: int
    """Number of bytes to reserve in advance for the writer's next put, if there is room."""
    next_blocks: int


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Reply that confirms a put."""

    committed: Committed
    next_space: Space | None
    """Space granted in advance for the writer's next put (credit), which is revoked if another writer needs it first;
    None when nothing was granted."""


class Abort(msgspec.Struct, frozen=True, array_like=True):
    space_ids: tuple[int, ...]


class Withdraw(msgspec.Struct, frozen=True, array_like=True):
    """Request to undo a put that was interrupted, whether or not it had been committed."""

    partition: str
    keys: bytes
    first_block_id: int
    num_blocks: int
    space_id: int


class Tag(msgspec.Struct, frozen=True, array_like=True):
    """Request to set tags of existing rows."""

    partition: str
    keys: bytes
    tags: Mapping[str, np.ndarray]
    """Values of each tag, one for each key: tag name -> `[N]`."""


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Request for a receipt (the keys and locations) of the rows with given keys. `fields` None stands for all fields
    that are written for every row."""

    partition: str
    keys: bytes
    fields: tuple[str, ...] | None
    wait_s: float | None = None
    """Maximum number of seconds to wait for rows and fields that are missing; None refuses the request instead."""


class SomeRows(msgspec.Struct, frozen=True, array_like=True):
    """Request about the rows with given keys, or about all rows of the partition (None). `rows` returns their
    `PartitionRows`. `clear` forgets them and returns their number. `absent` returns the keys that do not exist, as
    `pack_keys` encodes them."""

    partition: str
    keys: bytes | None


@dataclass(frozen=True, slots=True)
class Exported:
    """Reply that describes a partition at one moment."""

    state: PartitionState
    rows: bytes
    """All rows in order of arrival, as `PartitionRows.to_bytes` encodes them."""
    receipts: tuple[bytes, ...]
    """Receipts (keys and locations), one for each set of fields. Each covers the rows with exactly these fields
    written."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Request to register a saved partition under a name, with its rows. Puts must follow to write their fields."""

    partition: str
    state: PartitionState
    rows: bytes
    """All rows in order of arrival, as `PartitionRows.to_bytes` encodes them."""


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """Request to lease rows to a task, waiting at most `timeout_s` for them. The reply is a receipt (their keys and
    locations)."""

    rows: ClaimRows
    timeout_s: float
    holder: str = ""
    """Name of the client, for the list of leases."""


class ClearStale(msgspec.Struct, frozen=True, array_like=True):
    """Request to clear the rows that the claim `rows` would skip because their policy version is too old. The reply is
    the keys of the cleared rows, as `pack_keys` encodes them."""

    rows: ClaimRows


class Renew(msgspec.Struct, frozen=True, array_like=True):
    """Request to extend leases, so that they expire `lease_s` seconds from now. The reply is the ids of the leases that
    still exist."""

    lease_ids: tuple[int, ...]


class RenewRows(msgspec.Struct, frozen=True, array_like=True):
    """Request to extend the lease of a receipt's rows to `lease_s` seconds from now. The lease must still hold all of
    them."""

    partition: str
    lease_id: int
    keys: bytes


class Release(msgspec.Struct, frozen=True, array_like=True):
    partition: str
    task: str
    lease_id: int
    keys: bytes
    outcome: Outcome


class Revoke(msgspec.Struct, frozen=True, array_like=True):
    """Request to end the leases of a task that were granted at least `older_than_s` seconds ago. The reply is the
    number of rows that they held."""

    partition: str
    task: str
    older_than_s: float


class Skip(msgspec.Struct, frozen=True, array_like=True):
    """Request to settle positions of the prompt stream whose prompts will not be put. A task then does not wait for
    them."""

    partition: str
    task: str
    positions: np.ndarray
    """Positions in the prompt stream, int64 `[N]`."""


class Reset(msgspec.Struct, frozen=True, array_like=True):
    """Request to make finished rows of a task claimable again (`keys` None: all rows of the partition). The reply is a
    `TaskReset`."""

    partition: str
    task: str
    keys: bytes | None


class StatusOfTask(msgspec.Struct, frozen=True, array_like=True):
    """Request for the `TaskStatus` of a task. `fields` None stands for all fields of the partition."""

    partition: str
    task: str
    fields: tuple[str, ...] | None


class FreeRows(msgspec.Struct, frozen=True, array_like=True):
    """Request to drop the values of all fields of rows, and to keep the rows. The reply is the number of rows."""

    partition: str
    keys: bytes


class Status(msgspec.Struct, frozen=True, array_like=True):
    """Request for the `DataPlaneStatus` of one partition, or of all partitions (None)."""

    partition: str | None


class ForgetUnits(msgspec.Struct, frozen=True, array_like=True):
    """Request to clear all rows of which dead storage units held a field, with the other rows of their groups. The
    reply is their keys by partition, as `pack_keys` encodes them."""

    units: tuple[str, ...]
    """Names of units, or Ray's ids of their nodes, that count as dead from now on. The directory looks for other dead
    units, too."""


class Plane(msgspec.Struct, frozen=True, array_like=True):
    """Reply to the request `plane`, which has no arguments. A client needs it besides the directory's address and the
    run's key."""

    config: str
    """The data plane's configuration as JSON."""
    store_kind: str
    store_run_id: str
    store_address: dict[str, Any]
    plane_id: int


# ---------------- A reply is one byte followed by the body.

_OK, _ERROR = b"\0", b"\1"
CANCELLED = b"\2"
"""Reply to a request that was cancelled before it took effect."""
UNKNOWN = b"\3"
"""Reply to a repeated request if it is not known whether the request took effect the first time."""
WAITING_OPS = frozenset(("claim", "reserve", "lookup"))
"""Names of the requests that may have to wait. They can be cancelled while they wait."""
TAKE_EFFECT = frozenset(
    (
        "register",
        "add_tasks",
        "add_fields",
        "unregister",
        "restore",
        "claim",
        "renew_rows",
        "release",
        "revoke",
        "skip",
        "reset",
        "tag",
        "free",
        "clear",
        "clear_stale",
        "forget_unit",
    )
)
"""Names of the requests with a lasting effect. If the reply to such a request is lost, the error says that it is not
known whether the request took effect. Puts are not listed, because a separate request undoes an interrupted put."""
AGAIN = "again"
"""Name of the request that repeats another one, whose reply was lost with its connection; see `repeated`."""
ID_BYTES = 12
"""Number of bytes of the identity of a request: of its connection's token, and of its number."""
TAKE_BACK = frozenset(("abort", "withdraw"))
"""Names of the requests that undo something. They are carried out even if no client waits for the reply."""
REVOKED = b""
"""Body of the reply to a Commit if its space had been granted in advance and was revoked. Nothing became readable, and
the put must reserve space."""

_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.DataPlaneError)
}


def repeated(request: bytes, op: str, payload: bytes, waited_s: float) -> tuple[str, bytes]:
    """Return the (op, payload) that repeats a request, which may be a repetition itself. request: its identity.
    waited_s: seconds since it was sent first, which count towards its time limit.

    The directory gives its first reply if the request had effects then, and carries it out otherwise."""
    if op == AGAIN:
        request, op, payload, _ = read_repeated(payload)
    return AGAIN, request + msgspec.msgpack.encode((op, payload, waited_s))


def read_repeated(payload: bytes) -> tuple[bytes, str, bytes, float]:
    """Return what `repeated` was called with first, and `waited_s` of its last call. Raises ValueError for anything
    else."""
    return payload[:ID_BYTES], *msgspec.msgpack.decode(payload[ID_BYTES:], type=tuple[str, bytes, float])


def after(request: Any, waited_s: float) -> Any:
    """Return a request whose time limit, if it has one, is shorter by the seconds that it has waited already."""
    name = "wait_s" if isinstance(request, Lookup) else "timeout_s"
    left_s = getattr(request, name, None)
    return request if left_s is None else msgspec.structs.replace(request, **{name: max(0.0, left_s - waited_s)})


def reply(body: bytes) -> bytes:
    return _OK + body


def is_done(data: bytes) -> bool:
    """Return whether a reply says that the request was carried out."""
    return data[:1] == _OK


def reply_error(error: errors.DataPlaneError | ValueError) -> bytes:
    """Encode an error as a reply, with its class name, message and context. A ValueError that is not a DataPlaneError
    is sent as a plain ValueError. In the message of a user's error, what UTF-8 cannot encode becomes a question
    mark."""
    known = isinstance(error, errors.DataPlaneError)
    text = (error.message if known else str(error)).encode(errors="replace").decode()
    if known:
        return _ERROR + msgspec.msgpack.encode([type(error).__name__, text, error.fields()])
    return _ERROR + msgspec.msgpack.encode(["ValueError", text, {}])


def body_of(data: bytes, op: str, elapsed_s: float) -> bytes:
    """Return the body of a successful reply, or raise the error that the reply carries. A ValueError is raised as
    InvalidArgument; any other error has its original class, and `op` and `elapsed_s` are filled in where it lacks
    them."""
    if data[:1] == _OK:
        return data[1:]
    name, message, fields = msgspec.msgpack.decode(data[1:])
    if name == "ValueError":
        raise errors.InvalidArgument(message, op=op)
    fields = {**fields, "op": fields["op"] or op, "elapsed_s": fields["elapsed_s"] or elapsed_s}
    raise _ERRORS[name](message, **fields)


def encode(request: Any) -> bytes:
    """Encode a request. Raises ValueError for values that cannot be sent, such as an integer of more than 64 bits."""
    try:
        return messages.encode(request)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(request).__name__}: a value cannot be sent: {error}") from None
