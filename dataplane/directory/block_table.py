"""Counts the values still in use in each block of the store, and the bytes used and reserved.

A block holds values that one put wrote. Every value in it (one field of one row) is a reference to the block, and a
block without references can be freed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from ...codecs.integers import distinct_counts
from ..block_store import ANY_HOLDER, HasRooms, holder_of
from ..meta import BlockRef
from .rows import ROW_BITS

SPARE_PART = 8
"""Divisor of the capacity: one eighth of it is spare (`BlockTable.spare_bytes`)."""


@dataclass(frozen=True, slots=True)
class FreedBlock:
    """Names a block to which no row refers any more, so that its bytes can be freed."""

    block_id: int
    location: bytes


@dataclass(slots=True)
class Reservation:
    """Holds the space reserved for one put until the put is committed."""

    reservation_id: int
    writer: str
    block_ids: range
    """Ids for the put's blocks. A put with fewer blocks uses the first ids."""
    nbytes: int
    """Maximum total size of the put's blocks in bytes."""
    deadline: float
    credit: bool
    """True if the space was granted in advance for the writer's next put. Such space is revoked if another writer needs
    it."""
    room: int = 0
    """Number of the host on which the space is; see `HasRooms`."""
    location: bytes | None = None
    """Address of the space in the store; None until the store has allocated it."""


@dataclass(slots=True)
class Room:
    """Counts the bytes of the blocks on one host. A store without hosts has a single room."""

    used_bytes: int = 0
    reserved_bytes: int = 0
    """Number of bytes reserved by puts in progress. Credit (space granted in advance) is not included."""
    credit_bytes: int = 0
    """Number of bytes granted in advance for future puts (credit)."""


class OneRoom:
    """The hosts of a store whose capacity is not divided by host; see `HasRooms`."""

    rooms: Mapping[int, str] = MappingProxyType({0: ""})

    def room_of(self, holder: int) -> int:
        """Return the number of the only room."""
        return 0

    def holder_in(self, room: int) -> int:
        """Return ANY_HOLDER."""
        return ANY_HOLDER


@dataclass(slots=True)
class Entry:
    ref: BlockRef
    row_starts: np.ndarray | None
    nbytes: int
    room: Room
    live: int
    """Number of (row, field) pairs whose values are in the block."""


class BlockTable:
    """Holds the blocks and the reservations by id, and counts the bytes in use and reserved. Ids are never reused."""

    def __init__(self, capacity_bytes: int, rooms: HasRooms | None = None) -> None:
        """capacity_bytes: capacity of each room. rooms: the rooms; None for a single one."""
        self.capacity_bytes = capacity_bytes
        self.rooms: HasRooms = rooms or OneRoom()
        self._rooms: dict[int, Room] = defaultdict(Room)
        self.reservations: dict[int, Reservation] = {}
        """Reservations by id, in the order of their deadlines."""
        self.entries: dict[int, Entry] = {}
        self.next_block = 1
        self.next_reservation = 1

    def add(self, ref: BlockRef, row_starts: np.ndarray | None, nbytes: int, live: int) -> None:
        """Add a block that is written; the arguments are those of `settle`."""
        room = self._rooms[self.rooms.room_of(holder_of(ref.location))]
        room.used_bytes += nbytes
        self.entries[ref.block_id] = Entry(ref, row_starts, nbytes, room, live)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def total(self) -> Room:
        """Sum of the bytes of all rooms."""
        held = self._rooms.values()
        return Room(
            sum(room.used_bytes for room in held),
            sum(room.reserved_bytes for room in held),
            sum(room.credit_bytes for room in held),
        )

    def used_by_room(self) -> dict[int, int]:
        """Return the bytes of the blocks in each room with a living process of the store."""
        return {number: self._rooms[number].used_bytes for number in self.rooms.rooms}

    def free_bytes(self, room: int = 0) -> int:
        """Return the number of bytes that are free in a room."""
        held = self._rooms[room]
        return self.capacity_bytes - held.used_bytes - held.reserved_bytes - held.credit_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of a room that stay free when space is granted in advance (credit) or to writers of other hosts.

        Without them, the grant would make other writers wait.
        """
        return self.capacity_bytes // SPARE_PART

    def rooms_for(self, near: int) -> list[int]:
        """Return the numbers of the hosts on which a put may be stored, the best first.

        That of its writer, with the process `near` of the store, comes first, then those with the most free bytes. On
        hosts of other writers, `spare_bytes` are left to these.
        """
        own = self.near_room(near)
        return sorted(self.rooms.rooms, key=lambda room: (room != own, -self.free_bytes(room)))

    def near_room(self, near: int) -> int | None:
        """Return the number of a writer's host, which is that of the process `near` of the store, or of the only host.
        None if the store has several hosts, and no living process on the writer's."""
        rooms = self.rooms
        if len(rooms.rooms) == 1:
            return next(iter(rooms.rooms))
        room = None if near == ANY_HOLDER else rooms.room_of(near)
        return room if room in rooms.rooms else None

    def has_room(self, nbytes: int, near: int) -> bool:
        """Return whether the directory's count leaves `nbytes` of the capacity free for a put. If so, a put that must
        still wait waits only for room in the store itself."""
        return any(nbytes <= self.free_bytes(room) for room in self.rooms_for(near))

    def described_room(self, near: int) -> str:
        """Return the use of the capacity, for the error of a put that finds no room."""
        rooms, total = self.rooms.rooms, self.total
        text = f"{total.used_bytes} in use and {total.reserved_bytes} reserved of {self.capacity_bytes * len(rooms)}"
        if len(rooms) == 1:
            return text
        free = ", ".join(f"{self.free_bytes(room)} on {rooms[room]}" for room in self.rooms_for(near) if room in rooms)
        return f"{text} on {len(rooms)} hosts, free: {free}"

    @property
    def allocated_credit_bytes(self) -> int:
        """Bytes of credit (space granted in advance) that the store has allocated. They count as used."""
        return sum(item.nbytes for item in self.credits() if item.location is not None)

    def reserve(
        self, writer: str, nbytes: int, num_blocks: int, deadline: float, *, room: int = 0, credit: bool = False
    ) -> Reservation | None:
        """Reserve space in a room for `num_blocks` new blocks of `nbytes` bytes in all. Returns None when fewer bytes
        are free there at the moment.

        Deadlines must not decrease from call to call.
        """
        if nbytes > self.free_bytes(room):
            return None
        ids = range(self.next_block, self.next_block + num_blocks)
        reservation = Reservation(self.next_reservation, writer, ids, nbytes, deadline, credit, room)
        self.next_block = ids.stop
        self.next_reservation += 1
        self.reservations[reservation.reservation_id] = reservation
        self._count(reservation, nbytes)
        return reservation

    def cancel(self, reservation_id: int) -> Reservation | None:
        """Remove a reservation and return it. Its bytes become free. Returns None for an unknown id."""
        reservation = self.reservations.pop(reservation_id, None)
        if reservation is not None:
            self._count(reservation, -reservation.nbytes)
        return reservation

    def credits(self, room: int | None = None) -> list[Reservation]:
        """Return the reservations that are credit (space granted in advance), oldest first. room: the only room to look
        in; None stands for all rooms."""
        return [item for item in self.reservations.values() if item.credit and room in (None, item.room)]

    def settle(
        self,
        reservation: Reservation,
        refs: Sequence[BlockRef],
        sizes: Sequence[int],
        starts: Sequence[np.ndarray | None],
        live: Sequence[int],
    ) -> None:
        """Replace a reservation by the blocks that its put has written. Its unused bytes become free.

        refs, sizes, starts, live: for each block, its `BlockRef`, its number of bytes, the index of each row's first
        token (None for a block without tokens), and the number of values (row and field) that refer to it.
        """
        self.cancel(reservation.reservation_id)
        for ref, row_starts, nbytes, count in zip(refs, starts, sizes, live, strict=True):
            self.add(ref, row_starts, nbytes, count)

    def unlink(self, slots: np.ndarray) -> list[FreedBlock]:
        """Drop one reference to a block for each slot. A slot is a number that locates one value by block and row;
        `slots` can have any shape, and values that are unwritten or lost are skipped. Returns the blocks that have no
        references left."""
        slots = slots[slots >= 0]
        freed = []
        for block_id, count in zip(*distinct_counts(slots >> ROW_BITS), strict=True):
            entry = self.entries[int(block_id)]
            entry.live -= int(count)
            assert entry.live >= 0, block_id
            if entry.live == 0:
                del self.entries[entry.ref.block_id]
                entry.room.used_bytes -= entry.nbytes
                freed.append(FreedBlock(entry.ref.block_id, entry.ref.location))
        return freed

    def lose(self, holders: Collection[int]) -> list[FreedBlock]:
        """Remove the blocks that the processes with these numbers hold, because the processes have died. Returns the
        blocks; their bytes become free. The caller must mark the values in them as lost."""
        found = [entry.ref for entry in self.entries.values() if holder_of(entry.ref.location) in holders]
        for ref in found:
            entry = self.entries.pop(ref.block_id)
            entry.room.used_bytes -= entry.nbytes
        return [FreedBlock(ref.block_id, ref.location) for ref in found]

    def refs(self, block_ids: np.ndarray) -> tuple[BlockRef, ...]:
        return tuple(self.entries[block_id].ref for block_id in block_ids.tolist())

    def token_starts(self, block_ids: np.ndarray, block: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Return the index of the first token of each row `row[i]` within its block `block_ids[block[i]]`, int64 `[N]`.
        All of the blocks must hold tokens."""
        if len(block_ids) == 1:
            [only] = block_ids.tolist()
            starts = self.entries[only].row_starts
            assert starts is not None, "a block without tokens stands for a PER_TOKEN field"
            return starts[row]
        used, block = np.unique(block, return_inverse=True)
        starts = [self.entries[block_id].row_starts for block_id in block_ids[used].tolist()]
        if not starts:
            return np.empty(0, dtype=np.int64)
        sizes = [len(part) for part in starts if part is not None]
        assert len(sizes) == len(starts), "a block without tokens stands for a PER_TOKEN field"
        base = np.cumsum(sizes, dtype=np.int64) - sizes
        tokens = np.concatenate([part for part in starts if part is not None])
        return tokens[base[block] + row]

    def _count(self, reservation: Reservation, nbytes: int) -> None:
        room = self._rooms[reservation.room]
        if reservation.credit:
            room.credit_bytes += nbytes
        else:
            room.reserved_bytes += nbytes
