"""What the directory knows about a run's data plane at one moment."""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from ..codecs import messages


@dataclass(frozen=True, slots=True)
class DataPlaneStatus:
    """Rows and leases of one partition, or of all; bytes of the run."""

    partitions: dict[str, int]
    """Rows by partition: all of them, or the one asked for."""
    rows: int
    ready: dict[str, int]
    """Rows in which a field is written, by field (summed over `partitions`)."""
    leases: int
    """Claims that have not been released in full."""
    leased_rows: int
    oldest_lease_s: float
    """Age of the oldest lease; 0.0 without leases."""
    blocks: int
    bytes_used: int
    """Bytes of committed blocks."""
    bytes_reserved: int
    """Bytes promised to puts under way."""
    bytes_capacity: int
    bytes_credit: int = 0
    """Bytes set aside for writers' next puts; any put that needs the room gets it."""
    waiting_claims: int = 0
    waiting_puts: int = 0
    """Puts that wait for room."""
    stale_rows: int = 0
    """Rows that are ready but too old for their task's latest claim (its `min_version`): they wait to be cleared."""
    store_kind: str = ""
    store_bytes: int = 0
    """Bytes the store holds, by its own count; without credit."""

    def to_bytes(self) -> bytes:
        """By position, without the fields' names: a driver asks for it every step, and its bytes are counted."""
        return messages.encode([getattr(self, field.name) for field in dataclasses.fields(self)])

    @staticmethod
    def from_bytes(data: bytes) -> DataPlaneStatus:
        """Raises ValueError when `data` is none."""
        return DataPlaneStatus(*messages.decode(data, _positional()))


@functools.cache
def _positional() -> Any:
    """The type of `to_bytes`' message: a tuple of the fields' types."""
    types = typing.get_type_hints(DataPlaneStatus)
    return tuple[tuple(types[field.name] for field in dataclasses.fields(DataPlaneStatus))]
