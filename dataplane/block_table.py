"""Which blocks exist, how many (row, field) references hold each of them, and the bytes they take or are promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .meta import BlockRef
from .rows import ROW_BITS, UNWRITTEN


@dataclass(frozen=True, slots=True)
class FreedBlock:
    """A block that nobody refers to any more: its bytes can go."""

    block_id: int
    location: bytes


@dataclass(slots=True)
class Reservation:
    """Room promised to one put that has not been committed yet."""

    reservation_id: int
    writer: str
    block_ids: range
    sizes: tuple[int, ...]
    """Bytes of each block."""
    locations: list[bytes]
    """Filled in by whoever allocates; a block without one may not exist in the store."""
    deadline: float

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(slots=True)
class _Entry:
    ref: BlockRef
    row_starts: np.ndarray | None
    nbytes: int
    live: int
    """(row, field) pairs that point into it."""


class BlockTable:
    """Blocks by id, reservations by id, byte accounting. Ids are never reused."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.reserved_bytes = 0
        self.reservations: dict[int, Reservation] = {}
        self._entries: dict[int, _Entry] = {}
        self._next_block = 1
        self._next_reservation = 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.reserved_bytes

    def reserve(self, writer: str, sizes: Sequence[int], deadline: float) -> Reservation | None:
        """Room for new blocks of `sizes` bytes, or None when there is none just now."""
        if sum(sizes) > self.free_bytes:
            return None
        ids = range(self._next_block, self._next_block + len(sizes))
        reservation = Reservation(self._next_reservation, writer, ids, tuple(sizes), [], deadline)
        self._next_block = ids.stop
        self._next_reservation += 1
        self.reservations[reservation.reservation_id] = reservation
        self.reserved_bytes += reservation.nbytes
        return reservation

    def cancel(self, reservation_id: int) -> list[FreedBlock]:
        """Give a reservation back; [] when there is none of that id (any more)."""
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is None:
            return []
        self.reserved_bytes -= reservation.nbytes
        locations = [*reservation.locations, *[b""] * len(reservation.block_ids)]
        return [FreedBlock(*pair) for pair in zip(reservation.block_ids, locations, strict=False)]

    def settle(
        self,
        reservation: Reservation,
        refs: Sequence[BlockRef],
        starts: Sequence[np.ndarray | None],
        live: Sequence[int],
    ) -> None:
        """A reservation's blocks exist from now on, `live` references each."""
        del self.reservations[reservation.reservation_id]
        self.reserved_bytes -= reservation.nbytes
        self.used_bytes += reservation.nbytes
        for ref, row_starts, nbytes, count in zip(refs, starts, reservation.sizes, live, strict=True):
            self._entries[ref.block_id] = _Entry(ref, row_starts, nbytes, count)

    def unlink(self, slots: np.ndarray) -> list[FreedBlock]:
        """Drop the references in `slots` (any shape; UNWRITTEN: none). Returns the blocks that lost their last one."""
        slots = slots[slots != UNWRITTEN]
        freed = []
        for block_id, count in zip(*np.unique(slots >> ROW_BITS, return_counts=True), strict=True):
            entry = self._entries[int(block_id)]
            entry.live -= int(count)
            assert entry.live >= 0, block_id
            if entry.live == 0:
                del self._entries[entry.ref.block_id]
                self.used_bytes -= entry.nbytes
                freed.append(FreedBlock(entry.ref.block_id, entry.ref.location))
        return freed

    def refs(self, block_ids: np.ndarray) -> tuple[BlockRef, ...]:
        return tuple(self._entries[block_id].ref for block_id in block_ids.tolist())

    def token_starts(self, block_ids: np.ndarray, block: np.ndarray, row: np.ndarray) -> np.ndarray:
        """int64 `[N]`: first token of row `row[i]` within its block `block_ids[block[i]]`; all of them have tokens."""
        used, block = np.unique(block, return_inverse=True)
        starts = [self._entries[block_id].row_starts for block_id in block_ids[used].tolist()]
        if not starts:
            return np.empty(0, dtype=np.int64)
        sizes = [len(part) for part in starts if part is not None]
        assert len(sizes) == len(starts), "a block without tokens stands for a PER_TOKEN field"
        base = np.cumsum(sizes, dtype=np.int64) - sizes
        tokens = np.concatenate([part for part in starts if part is not None])
        return tokens[base[block] + row]
