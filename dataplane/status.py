"""Defines the status of a run's data plane: the rows, leases and bytes that the directory counts at one moment."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from ..codecs import messages


@dataclass(frozen=True, slots=True)
class DataPlaneStatus:
    """Snapshot of the data plane: rows and leases of one partition or of all, and bytes of the whole run."""

    partitions: dict[str, int]
    """Number of rows of each partition, by name. Holds all partitions, or only the one that was asked for."""
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
    bytes_credit: int = 0
    """Number of bytes granted to writers ahead of their next puts; any put that needs this space gets it."""
    waiting_claims: int = 0
    waiting_puts: int = 0
    """Number of puts that wait for space."""
    stale_rows: int = 0
    """Number of rows that are ready, but whose version is below the `min_version` of their task's latest claim, and
    that wait to be cleared."""
    store_kind: str = ""
    store_bytes: int = 0
    """Number of bytes that the store reports as held, without `bytes_credit`."""
    bytes_unfreed: int = 0
    """Number of bytes of cleared blocks that the store still holds, because one of its processes has not answered or a
    writer still uses them; 0 unless something is stuck or very slow."""

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
    """Number of rows that are free and have all of the fields asked about. A claim may still have to wait, for the
    other rows of a group or for its sampler."""
    leased: int
    done: int
    """Number of rows that the task has finished."""
    not_ready: int
    """Number of rows that are free but lack one of the fields asked about."""
    next_prompt: int | None
    """Lowest position in the prompt stream that is not settled, which means that no claim took its prompt yet; None for
    a task whose sampler does not follow the prompts."""
    settled_ahead: int
    """Number of settled positions after `next_prompt`; 0 for a task whose sampler does not follow the prompts."""


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
