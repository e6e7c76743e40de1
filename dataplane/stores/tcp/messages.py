"""Defines the requests to a storage unit, its replies, and its address."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ...errors import SHOWN_KEYS
from ...owned_folder import SHARED_MEMORY

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnitAddress:
    """Address of one storage unit, and what a process needs to use its memory directly if it is on the same host."""

    name: str
    pid: int
    host: str
    """IP address at which the unit listens."""
    port: int
    memory: str
    """Identity of the shared memory (of the host, or of the container) that the unit's pool is in, as `memory_id`
    returns it."""
    folder: str
    """Folder of the unit's pool in that shared memory."""

    @property
    def peer(self) -> str:
        """Name of the unit in error messages, with its pid and address."""
        return f"storage unit {self.name} pid={self.pid} {self.host}:{self.port}"


def memory_id() -> str:
    """Return the identity of this process's shared memory: boot of the host, mount of /dev/shm, and namespace of pids.
    Processes with equal identities can share a pool, and see whether each other's writers are alive."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat(SHARED_MEMORY).st_dev} {os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(frozen=True, slots=True)
class Put:
    """Request (op `put`) to write consecutive blocks, whose bytes follow end to end. The reply is their locations."""

    first_block_id: int
    sizes: tuple[int, ...]
    """Number of bytes of each block, multiples of `codecs.memory.ALIGN`."""
    wait_s: float
    """Seconds for which the unit may wait for room."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request (op `reserve`) for room in which a writer on the unit's host writes consecutive blocks by itself. The
    reply is the room's location in the pool."""

    first_block_id: int
    nbytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Request (op `cut`) to make blocks of what a writer has written into reserved room. The reply is the blocks'
    locations."""

    first_block_id: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Request (op `get`) to read R ranges of bytes of B blocks. The reply is the bytes of the ranges, end to end, and
    one byte more that is 1 if no block was freed meanwhile, else 0."""

    block_ids: bytes
    """Ids of the blocks, `column` of `[B]`. A block without ranges is only checked for whether it is still there."""
    block: bytes
    """Position of each range's block in `block_ids`, `column` of `[R]`."""
    start: bytes
    """First byte of each range within its block, `column` of `[R]`."""
    nbytes: bytes
    """Number of bytes of each range, `column` of `[R]`."""


@dataclass(frozen=True, slots=True)
class Free:
    """Request (op `free`) to delete blocks, and to refuse those of them that are yet to come."""

    block_ids: bytes
    """Ids of the blocks, as `column` returns them."""


DONE, FREED, FULL, REFUSED = "done", "freed", "full", "refused"
"""Ops of replies: the request was carried out; a block was freed; the pool has no room; the request is not valid. The
head of the last three is a text."""


def column(numbers: Sequence[int] | np.ndarray) -> bytes:
    """Encode integers as little-endian int64."""
    return np.asarray(numbers, dtype="<i8").tobytes()


def integers(data: bytes) -> np.ndarray:
    """Decode what `column` returned, int64. Raises ValueError for other bytes."""
    return np.frombuffer(data, dtype="<i8")


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a message of the type `kind`. Raises ValueError for other bytes."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes are not a {kind}: {error}") from error


def locations(head: bytes) -> tuple[bytes, ...]:
    """Decode the locations in the reply to a `Put` or `Cut`. Raises ValueError for other bytes."""
    return decode(head, tuple[bytes, ...])


def shown_ids(block_ids: Sequence[int]) -> str:
    """Return a text with the first few of these integers."""
    more = len(block_ids) - SHOWN_KEYS
    return ", ".join(map(str, block_ids[:SHOWN_KEYS])) + (f" and {more} more" if more > 0 else "")
