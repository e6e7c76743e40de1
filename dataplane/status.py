"""Defines snapshots of a data plane: counts of its rows, leases and bytes, and the list of a partition's rows."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ..codecs import messages
from .compact import pack_ints, pack_keys, pack_tag, unpack_ints, unpack_keys, unpack_tag


@dataclass(frozen=True, slots=True)
class DataPlaneStatus:
    """Snapshot of the data plane: rows and leases of one partition or of all, and bytes of the whole run."""

    partitions: dict[str, int]
    """Number of rows of each partition, by name. The dict has all partitions, or only the requested one."""
    rows: int
    ready: dict[str, int]
    """Number of rows in which a field is written, by field name, summed over `partitions`."""
    leases: int
    """Number of leases, which are claims whose rows have not all been released."""
    leased_rows: int
    oldest_lease_s: float
    """Age of the oldest lease in seconds; 0.0 without leases."""
    blocks: int
    bytes_used: int
    """Number of bytes of committed blocks, whose rows can be read."""
    bytes_reserved: int
    """Number of bytes reserved by puts in progress."""
    bytes_capacity: int
    """Number of bytes that blocks may take, on all hosts together."""
    bytes_credit: int = 0
    """Number of bytes granted to writers ahead of their next puts; any put that needs this space gets it."""
    waiting_claims: int = 0
    waiting_puts: int = 0
    """Number of puts that wait for space."""
    stale_rows: int = 0
    """Number of ready rows that are too old: their version is below the `min_version` of their task's latest claim.
    They wait to be cleared."""
    store_kind: str = ""
    store_bytes: int = 0
    """Number of bytes that the store reports as held, without `bytes_credit`."""
    bytes_unfreed: int = 0
    """Number of bytes of cleared blocks that the store still holds, because one of its processes has not answered or a
    writer still uses them; 0 unless a process is stuck or very slow."""
    lost_rows: int = 0
    """Number of rows, of `partitions`, that have lost a field because the process of the store that held it has died.
    Claims pass over them. They stay until they are cleared or their fields are put again."""
    oldest_lease: str = ""
    """Description of the oldest lease: its task, partition and holder; "" without leases."""
    bytes_by_host: dict[str, int] = field(default_factory=dict)
    """Number of bytes of committed blocks on each host with a living storage unit, by the host's name; empty for other
    stores than `tcp`."""
    puts_elsewhere: int = 0
    """Number of puts so far whose rows are on another host than their writer, because the writer's host had no room.
    Writers on a host without a storage unit are not counted."""
    directory_cpu_s: float = 0.0
    """CPU time in seconds that the directory's process has used so far."""

    def plus(self, other: DataPlaneStatus) -> DataPlaneStatus:
        """Return the sum of two snapshots, of partitions that two directories serve. Bytes and rows are added; the
        oldest lease is that of both."""
        older = max(self, other, key=lambda status: status.oldest_lease_s)
        total: dict[str, Any] = {"oldest_lease_s": older.oldest_lease_s, "oldest_lease": older.oldest_lease}
        for one in dataclasses.fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, dict):
                total[one.name] = {name: mine.get(name, 0) + theirs.get(name, 0) for name in mine | theirs}
            elif one.name not in total and isinstance(mine, int | float):
                total[one.name] = mine + theirs
        return dataclasses.replace(self, **total)

    def to_bytes(self) -> bytes:
        """Encode the values by position, without the fields' names. The message is kept small, because the driver asks
        for it at every step."""
        return messages.encode([getattr(self, field.name) for field in dataclasses.fields(self)])

    @staticmethod
    def from_bytes(data: bytes) -> DataPlaneStatus:
        """Decode what `to_bytes` encoded. Raises ValueError for other bytes."""
        return DataPlaneStatus(*messages.decode(data, _positional()))


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """Snapshot of one task's progress in its partition. Each row is counted in exactly one of `ready`, `leased`, `done`
    and `not_ready`."""

    rows: int
    """Number of rows in the partition."""
    ready: int
    """Number of free rows that have all requested fields. A claim may still have to wait for the other rows of a group
    or for its sampler."""
    leased: int
    done: int
    """Number of rows that the task has finished."""
    not_ready: int
    """Number of free rows that lack one of the requested fields."""
    next_prompt: int | None
    """Lowest position in the prompt stream that is not settled, so that its prompt is still awaited. None for a task
    whose sampler does not follow the prompts."""
    settled_ahead: int
    """Number of settled positions after `next_prompt`; 0 for a task whose sampler does not follow the prompts."""


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """Snapshot of one lease: which rows a claim holds, and for how long."""

    lease_id: int
    task: str
    holder: str
    """Name and process of the client that claimed the rows."""
    keys: tuple[str, ...]
    """Keys of the rows that the lease still holds."""
    held_s: float
    """Seconds since the claim."""
    expires_s: float
    """Seconds until the lease ends unless it is renewed."""


@dataclass(frozen=True, slots=True)
class TaskReset:
    """Result of making finished rows claimable again."""

    reset: int
    """Number of finished rows that can be claimed again."""
    leased: int
    """Number of rows that were left alone, because a consumer holds them."""


@functools.cache
def _positional() -> Any:
    """Return the type of `to_bytes`' message: a tuple of the fields' types."""
    types = typing.get_type_hints(DataPlaneStatus)
    return tuple[tuple(types[field.name] for field in dataclasses.fields(DataPlaneStatus))]


_FORMAT = "rows1"


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRows:
    """List of N rows of a partition at one moment, as columns `[N]`, without the content of their fields. Frozen;
    returned by `rows`."""

    partition: str
    keys: np.ndarray
    """Ids of the rows, dtype object (str) `[N]`. `keys[rows.tags["source"] == "math"]` can be given to `lookup`
    directly."""
    lengths: np.ndarray
    """Number of tokens of each row, int64 `[N]`; 0 for rows without PER_TOKEN fields."""
    versions: np.ndarray
    """Policy version that produced each row, int64 `[N]`; -1 when the producer named none."""
    groups: np.ndarray
    """Number of each row's group, int64 `[N]`, unique in the data plane; equal to `groups` in a receipt."""
    group_names: np.ndarray
    """Name of each row's group, dtype object (str) `[N]`."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows: name -> array `[N]` of numbers, bools or texts (dtype object). A tag is included when at least
    one row was given it; the other rows have 0, False or "" there."""
    tagged: Mapping[str, np.ndarray]
    """Rows that were given each tag: name -> bool `[N]`."""
    written: Mapping[str, np.ndarray]
    """Rows in which each field of the schema is written: name -> bool `[N]`."""
    lost: np.ndarray
    """Rows that have lost a field with the process of the store that held it, bool `[N]`.
    `client.clear(partition, rows.keys[rows.lost])` removes them."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.keys)

    def to_bytes(self) -> bytes:
        """Encode the rows as msgpack with packed columns."""
        numbers, first, index = np.unique(self.groups, return_index=True, return_inverse=True)
        return msgspec.msgpack.encode(
            [
                _FORMAT,
                self.partition,
                pack_keys(self.keys.tolist(), squeeze=True),
                [pack_ints(column) for column in (self.lengths, self.versions, numbers, index)],
                pack_keys(self.group_names[first].tolist(), squeeze=True),
                [[name, values.dtype.str, pack_tag(values)] for name, values in self.tags.items()],
                [[name, _pack_flags(flags)] for name, flags in self.tagged.items()],
                [[name, _pack_flags(flags)] for name, flags in self.written.items()],
                _pack_flags(self.lost),
            ]
        )

    @staticmethod
    def from_bytes(data: bytes) -> PartitionRows:
        """Decode what `to_bytes` encoded. Raises ValueError for other bytes."""
        try:
            return _from_bytes(data)
        except (ValueError, TypeError, LookupError, AttributeError, msgspec.MsgspecError) as error:
            raise ValueError(f"these {len(data)} bytes are not a list of rows: {error}") from error


def _from_bytes(data: bytes) -> PartitionRows:
    """Decode the bytes of a list of rows. Other bytes may raise any exception."""
    mark, partition, keys, columns, names, tags, tagged, written, *lost = msgspec.msgpack.decode(data)
    if mark != _FORMAT:
        raise ValueError(f"their format is {mark!r}, expected {_FORMAT!r}")
    lengths, versions, numbers, index = map(unpack_ints, columns)
    rows = PartitionRows(
        partition,
        _texts(unpack_keys(keys)),
        lengths,
        versions,
        numbers[index],
        _texts(unpack_keys(names))[index],
        {name: unpack_tag(values, np.dtype(dtype)) for name, dtype, values in tags},
        {name: _unpack_flags(flags, len(index)) for name, flags in tagged},
        {name: _unpack_flags(flags, len(index)) for name, flags in written},
        _unpack_flags(lost[0] if lost else b"0", len(index)),  # Files of earlier versions have no such column.
    )
    every = (rows.keys, lengths, versions, rows.groups, *rows.tags.values())
    if {len(column) for column in every} != {len(rows)} or set(rows.tags) != set(rows.tagged):
        raise ValueError(f"columns of {[len(column) for column in every]} rows, expected equal numbers")
    return rows


def _texts(items: list[str]) -> np.ndarray:
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def _pack_flags(flags: np.ndarray) -> bytes:
    """Encode a bool array `[N]`: as one value if all items are equal, else as one bit per item."""
    if len(flags) and (flags == flags[0]).all():
        return b"1" if flags[0] else b"0"
    return b"b" + np.packbits(flags).tobytes()


def _unpack_flags(data: bytes, count: int) -> np.ndarray:
    """Decode what `_pack_flags` encoded from `count` bools."""
    if data[:1] != b"b":
        return np.full(count, data == b"1")
    return np.unpackbits(np.frombuffer(data, np.uint8, offset=1), count=count).astype(bool)
