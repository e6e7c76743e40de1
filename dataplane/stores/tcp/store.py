"""Implements the client's part of the store `tcp`: it reads and writes blocks in storage units.

A put goes to the unit of this process's host if there is one, through shared memory, else to any unit over TCP. A get
reads blocks of this host's units in place, and asks other units only for the bytes of the rows that are wanted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ....codecs.blocks import BlockLayout, BlockPieces, part_bytes
from ....codecs.integers import ALIGN, ceil_div, distinct, round_up
from ....codecs.memory import as_bytes, fresh
from ....codecs.threads import run_in_threads
from ...block_store import ANY_HOLDER, HOLDER_BYTES, ByteRanges, PutsAll, StoreSpec, Want, holder_of
from ...directory.requests import body_of
from ...errors import CapacityExceeded, DataPlaneError, IntegrityError, RowsCleared, StoreLost
from ...meta import BlockRef
from ...rpc.forks import renew_in_forks
from ...rpc.links import Link
from ..shared_memory import SharedMemoryStore
from .link import Sent, UnitDied, UnitLink
from .wire import (
    ENDING,
    GONE,
    STILL,
    Cut,
    Fill,
    Get,
    Put,
    Reserve,
    UnitAddress,
    column,
    decode,
    encode,
    locations,
    memory_id,
    sections,
)

_PAD = memoryview(bytes(ALIGN))
_ASK_TIMEOUT_S = 10.0
STRIPE_BYTES = 4 << 20
"""Smallest number of bytes of a put that are sent over a connection of their own."""
MOST_STRIPE_BYTES = 1 << 30
"""Largest number of bytes of a put that are sent in one message."""
STRIPES = min(4, os.cpu_count() or 1)
"""Largest number of connections over which a put is sent at the same time. The copy into one connection, and the one
out of it, take a core each."""


class TcpStore(PutsAll):
    """Reads and writes blocks in storage units, from any process that can reach them. Thread-safe."""

    def __init__(self, spec: StoreSpec, link: Link) -> None:
        """Join the units that the directory lists, without connecting to them. `shares_memory` False in the spec's
        address makes this client use sockets even for units of its own host. Tests and benchmarks set it. `checksums`
        True makes it check all bytes that it sends and receives over sockets."""
        self._key = spec.key
        self._link = link
        self._lock = threading.Lock()
        renew_in_forks(self, TcpStore._renew)
        self._memory_id = memory_id() if spec.address.get("shares_memory", True) else ""
        self._checks = bool(spec.address.get("checksums", False))
        self._units: list[UnitLink] = []
        self._near: dict[int, SharedMemoryStore] = {}
        """Pools of the units that are on this process's host, by the unit's number."""
        self._dead: set[int] = set()
        self._turns = itertools.count(os.getpid())
        """Numbers of this client's puts, so that they go to the units in turn. Clients begin at different units."""
        self._asked = False
        self._closed = False
        units: Any = spec.address["units"]
        self._add([UnitAddress(*unit) for unit in units])

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @property
    def holders(self) -> list[str]:
        """Names of the units; see `NamesHolders`."""
        return [unit.address.peer for unit in self._units]

    def avoid(self, dead: Collection[int]) -> bool:
        """Write nothing to these units any more; see `ChoosesHolders`."""
        fresh = set(dead) - self._dead
        self._dead |= fresh
        return bool(fresh)

    def host_of(self, holder: int) -> str:
        """Return the host of a unit; see `ChoosesHolders`."""
        return self._units[holder].address.space if holder < len(self._units) else ""

    # ---------------- These methods write blocks.

    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Write the blocks to one unit; see `put_to`."""
        return self.put_to(ANY_HOLDER, first_block_id, blocks, timeout_s)

    def near(self, timeout_s: float) -> int:
        """Return the number of a living unit of this host; see `ChoosesHolders`."""
        if not self._near and not self._asked:
            self._ask_directory(time.monotonic() + timeout_s)
        return next((number for number in self._near if number not in self._dead), ANY_HOLDER)

    def put_to(
        self, holder: int, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float
    ) -> tuple[bytes, ...]:
        """Write the blocks to one unit. The first choice is a unit on the host of the unit `holder`, then one on this
        host; the others follow when it has no room or has died.

        Raises RowsCleared when the put's reservation has ended, CapacityExceeded when no unit has room in time,
        StoreLost when a unit does not answer or all have died, and DataPlaneTimeout when the time limit passes first.
        """
        started = time.monotonic()
        deadline = started + timeout_s
        layouts = [BlockLayout((), 0, 0, part_bytes(parts)) for parts in blocks]
        order = self._order(holder, deadline)
        full: CapacityExceeded | None = None
        died: StoreLost | None = None
        for attempt in range(2):  # In the first attempt, no unit waits for room.
            for number in order:
                wait_s = max(0.0, (deadline - time.monotonic()) * attempt / 2)
                try:
                    found = self._put_to(number, first_block_id, blocks, layouts, wait_s, deadline)
                except CapacityExceeded as error:
                    full = error
                except UnitDied as error:
                    self._dead.add(number)
                    died = error
                    self._tell_directory(deadline)
                else:
                    return tuple(number.to_bytes(HOLDER_BYTES) + location for location in found)
            order = [number for number in order if number not in self._dead][:1]
            order = order or self._order(holder, deadline)  # Others may have been started for those that died.
        if full is not None:
            raise full
        elapsed_s = time.monotonic() - started
        raise died or StoreLost("the store has no storage unit", op="put", elapsed_s=elapsed_s)

    def _put_to(
        self,
        number: int,
        first_block_id: int,
        blocks: Sequence[BlockPieces],
        layouts: Sequence[BlockLayout],
        wait_s: float,
        deadline: float,
    ) -> tuple[bytes, ...]:
        unit, sizes = self._units[number], tuple(layout.nbytes for layout in layouts)
        near = self._near.get(number)
        if near is None and sum(sizes) < (2 * STRIPE_BYTES if STRIPES > 1 else MOST_STRIPE_BYTES):
            request = encode(Put(first_block_id, sizes, wait_s, self._checks))
            raw = _laid_out(blocks, layouts)
            return locations(unit.ask("put", "put", request, raw, deadline, summed=self._checks))
        room = unit.ask("put", "reserve", encode(Reserve(first_block_id, sum(sizes), wait_s)), (), deadline)
        if near is None:
            self._fill(unit, first_block_id, _laid_out(blocks, layouts), sum(sizes), deadline)
        else:
            _write_near(near, room, first_block_id, blocks, layouts)
        return locations(unit.ask("put", "cut", encode(Cut(first_block_id, sizes)), (), deadline))

    def _fill(
        self, unit: UnitLink, first_block_id: int, raw: Sequence[memoryview], nbytes: int, deadline: float
    ) -> None:
        """Send the bytes of a put into its room, in stripes over up to STRIPES connections."""
        most = min(MOST_STRIPE_BYTES, ceil_div(nbytes, STRIPES))
        stripe_bytes = round_up(max(STRIPE_BYTES, most), ALIGN)

        def send(start: int, stripe: Sequence[memoryview]) -> None:
            request = encode(Fill(first_block_id, start, self._checks))
            unit.ask("put", "fill", request, stripe, deadline, summed=self._checks)

        stripes = enumerate(sections(raw, stripe_bytes))
        calls = [functools.partial(send, number * stripe_bytes, stripe) for number, stripe in stripes]
        ended = run_in_threads(calls, STRIPES)
        errors = [error for call in ended if (error := call.exception()) is not None]
        if errors:  # If the room was freed meanwhile, what some stripe says besides tells more.
            raise min(errors, key=lambda error: (isinstance(error, RowsCleared), not isinstance(error, UnitDied)))

    def _order(self, holder: int, deadline: float) -> list[int]:
        """Return the numbers of the units in the order in which a put tries them. Those on the host of the unit
        `holder` come first, then those of this host, then the others; each begin at the unit whose turn it is."""
        if holder >= len(self._units) or not self._near and not self._asked:
            self._ask_directory(deadline)
        alive = [number for number in range(len(self._units)) if number not in self._dead]
        if not alive:
            self._ask_directory(deadline)  # A unit may have joined.
            alive = [number for number in range(len(self._units)) if number not in self._dead]
        near = [number for number in alive if number in self._near]
        far = [number for number in alive if number not in self._near]
        turn = next(self._turns)
        order = _from_turn(near, turn) + _from_turn(far, turn)
        if 0 <= holder < len(self._units):
            chosen = self._units[holder].address.memory
            order.sort(key=lambda number: self._units[number].address.memory != chosen)
        return order

    # ---------------- These methods read blocks.

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return views of the wanted parts. Views of blocks in this host's units show the pool itself. Other views show
        the memory into which the parts were received."""
        deadline = time.monotonic() + timeout_s
        found: list[dict[int, np.ndarray]] = [{} for _ in wants]
        far: list[tuple[int, Want]] = []
        for position, want in enumerate(wants):
            near = self._near.get(self._number(want.block, deadline))
            if near is None:
                far.append((position, want))
            else:
                self._units[self._number(want.block, deadline)].check_alive("get", deadline)
                (found[position],) = near.get([_in_pool(want)], timeout_s)
        if far:
            self._get_far(far, found, deadline)
        return found

    def _get_far(self, far: list[tuple[int, Want]], found: list[dict[int, np.ndarray]], deadline: float) -> None:
        """Receive the wanted parts of blocks in other hosts' units, and add views of them to `found`. far: (position in
        `found`, request) for each of these blocks."""
        parts = [(number, part) for number, (_, want) in enumerate(far) for part in want.parts]
        sizes = [far[number][1].block.layout.part_bytes[part] for number, part in parts]
        starts = np.cumsum([0, *(round_up(size, ALIGN) for size in sizes)]).tolist()
        memory = as_bytes(fresh(torch.uint8, (starts[-1],)))
        ranges = []
        for (number, part), start, nbytes in zip(parts, starts, sizes, strict=False):
            position, want = far[number]
            view = memory[start : start + nbytes]
            offset = want.block.layout.offsets[part]
            ranges.append(ByteRanges(view, np.array([number]), np.array([offset]), np.array([nbytes])))
            found[position][part] = view
        self._read([want.block for _, want in far], ranges, deadline)
        for position, _ in far:
            for view in found[position].values():
                view.flags.writeable = False

    def lends(self, blocks: Sequence[BlockRef]) -> bool:
        """Return whether all blocks are in pools of this host, so that `get` returns views without a copy."""
        deadline = time.monotonic() + _ASK_TIMEOUT_S
        return all(self._number(block, deadline) in self._near for block in blocks)

    def read_ranges(self, blocks: Sequence[BlockRef], ranges: Sequence[ByteRanges], timeout_s: float) -> None:
        """Receive ranges of bytes of blocks straight into their destination memory. Every block is checked for whether
        it still exists, even a block without ranges.

        Raises RowsCleared when a block was freed, before or while it was read, StoreLost naming the unit that has died
        or does not answer, and DataPlaneTimeout with the bytes received so far when the time limit passes first.
        """
        self._read(blocks, ranges, time.monotonic() + timeout_s)

    def _read(self, blocks: Sequence[BlockRef], ranges: Sequence[ByteRanges], deadline: float) -> None:
        """Read ranges of blocks. All far units are asked before the first reply is received, so that they work side by
        side, and while this process copies from the pools of its host."""
        unit_of = np.array([self._number(block, deadline) for block in blocks], np.int64)
        columns = _Columns(ranges)
        near: list[tuple[int, list[BlockRef], np.ndarray, np.ndarray]] = []
        asked: list[tuple[UnitLink, Sent, int, np.ndarray]] = []
        try:
            for number in distinct(unit_of).tolist():
                positions = np.flatnonzero(unit_of == number)
                chosen = np.flatnonzero(unit_of[columns.block] == number) if len(columns.block) else columns.block
                of_unit = [blocks[position] for position in positions.tolist()]
                if number in self._near:
                    near.append((number, of_unit, positions, chosen))
                    continue
                sent = self._ask_for(self._units[number], of_unit, positions, columns, chosen, deadline)
                asked.append((self._units[number], sent, len(of_unit), chosen))
            for number, of_unit, positions, chosen in near:
                self._units[number].check_alive("get", deadline)
                self._copy_near(self._near[number], of_unit, positions, columns, chosen)
            while asked:
                unit, sent, num_blocks, chosen = asked.pop(0)
                self._receive(unit, sent, num_blocks, columns, chosen)
        finally:
            for _, sent, _, _ in asked:  # After an error, replies that are not received would block these connections.
                sent.connection.close()

    def _ask_for(
        self,
        unit: UnitLink,
        blocks: Sequence[BlockRef],
        positions: np.ndarray,
        columns: _Columns,
        chosen: np.ndarray,
        deadline: float,
    ) -> Sent:
        """Ask one unit for the ranges at the indices `chosen`. positions: position of each of `blocks` among all blocks
        of the read, ascending."""
        request = Get(
            column([block.block_id for block in blocks]),
            column(np.searchsorted(positions, columns.block[chosen])),
            column(columns.start[chosen]),
            column(columns.nbytes[chosen]),
            self._checks,
        )
        expected = int(columns.nbytes[chosen].sum()) + ENDING.size
        return unit.send("get", "get", encode(request), (), deadline, expected=expected)

    def _receive(self, unit: UnitLink, sent: Sent, num_blocks: int, columns: _Columns, chosen: np.ndarray) -> None:
        """Receive the ranges at the indices `chosen`, for which a unit was asked. num_blocks: number of their
        blocks, for errors."""
        targets, ending, expected = columns.targets(chosen), bytearray(ENDING.size), sent.progress.to_receive
        with unit.answer(sent) as (connection, _, raw_bytes):
            if raw_bytes != expected:
                raise ValueError(f"got a reply of {raw_bytes} bytes, expected {expected}")
            checksum = connection.receive_summed(targets, sent.deadline) if self._checks else 0
            connection.receive_into([*([] if self._checks else targets), memoryview(ending)], sent.deadline)
        state, wanted = ENDING.unpack(ending)
        if state == GONE:
            raise RowsCleared("a block was freed while it was read", op="get", peer=unit.address.peer)
        if state != STILL or checksum != wanted:
            what = f"{expected} bytes of {num_blocks} blocks were damaged on the way"
            raise IntegrityError(what, op="get", peer=unit.address.peer)

    def _copy_near(
        self,
        near: SharedMemoryStore,
        blocks: Sequence[BlockRef],
        positions: np.ndarray,
        columns: _Columns,
        chosen: np.ndarray,
    ) -> None:
        wants = [_in_pool(Want(block, ())) for block in blocks]
        near.get(wants, 0.0)
        pool = near.pool_view()
        base = np.array([near.offset_of(want.block.location) for want in wants], np.int64)
        starts = base[np.searchsorted(positions, columns.block[chosen])] + columns.start[chosen]
        for target, start in zip(columns.each_target(chosen), starts.tolist(), strict=True):
            target[:] = pool[start : start + target.nbytes]
        near.settle(wants)

    def settle(self, wants: Sequence[Want]) -> None:
        """Raise RowsCleared if a block of this host's pools has been freed since the `get`. Rows that came over TCP
        were checked on arrival."""
        deadline = time.monotonic() + _ASK_TIMEOUT_S
        for want in wants:
            near = self._near.get(self._number(want.block, deadline))
            if near is not None:
                near.settle([_in_pool(want)])

    def close(self) -> None:
        """Disconnect from the units, which continue. Idempotent."""
        with self._lock:
            self._closed = True
            for near in self._near.values():
                near.close()
            for unit in self._units:
                unit.close()

    # ---------------- These methods find the units.

    def _number(self, block: BlockRef, deadline: float) -> int:
        """Return the number of the unit that holds a block. Raises StoreLost if no such unit exists."""
        number = holder_of(block.location)
        if number >= len(self._units):
            self._ask_directory(deadline)
            if number >= len(self._units):
                raise StoreLost(f"block {block.block_id} is in storage unit {number}, which is not listed", op="get")
        return number

    def _tell_directory(self, deadline: float) -> None:
        """Make the directory look for dead units, so that their rows count as lost. A failure is not raised, because
        the next reader of such a row reports it, too."""
        with contextlib.suppress(DataPlaneError):
            self._link.call("find_lost", b"", max(0.1, min(_ASK_TIMEOUT_S, deadline - time.monotonic())))

    def _ask_directory(self, deadline: float) -> None:
        """Ask the directory for the units, because some may have joined since the data plane was opened."""
        started = time.monotonic()
        reply = self._link.call("store", b"units", max(0.1, min(_ASK_TIMEOUT_S, deadline - started)))
        body = body_of(reply, "connect", time.monotonic() - started)
        self._add(decode(body, list[UnitAddress]))
        self._asked = True

    def _add(self, units: Sequence[UnitAddress]) -> None:
        with self._lock:
            if self._closed:
                raise StoreLost("this client is closed", op="connect")
            for address in units[len(self._units) :]:
                if address.memory == self._memory_id:
                    try:
                        spec = StoreSpec("shm", "", {"folder": address.folder})
                        self._near[len(self._units)] = SharedMemoryStore(spec)
                    except StoreLost:
                        pass  # The unit has died; a request for one of its blocks reports that.
                self._units.append(UnitLink(address, self._key))


class _Columns:
    """Ranges of several `ByteRanges` as columns, with the destination memory of each range."""

    def __init__(self, ranges: Sequence[ByteRanges]) -> None:
        none = np.empty(0, np.int64)
        self.block = np.concatenate([item.block for item in ranges]) if ranges else none
        self.start = np.concatenate([item.start for item in ranges]) if ranges else none
        self.nbytes = np.concatenate([item.nbytes for item in ranges]) if ranges else none
        self._memory = [item.into.data for item in ranges]
        counts = [len(item.block) for item in ranges]
        self._item = np.repeat(np.arange(len(ranges)), counts)
        ends = np.cumsum(self.nbytes)
        firsts = np.cumsum([0, *counts[:-1]]) if ranges else none
        before = np.concatenate((np.zeros(1, np.int64), ends))[firsts] if ranges else none
        self._stop = ends - np.repeat(before, counts)
        """Position of the byte after each range in its destination memory."""

    def targets(self, chosen: np.ndarray) -> list[memoryview]:
        """Return the memory of the chosen ranges, in order; ranges that are neighbours in memory share one piece."""
        if not len(chosen):
            return []
        item, stop = self._item[chosen], self._stop[chosen]
        start = stop - self.nbytes[chosen]
        breaks = np.flatnonzero((item[1:] != item[:-1]) | (start[1:] != stop[:-1])) + 1
        first, last = np.append(0, breaks), np.append(breaks, len(chosen)) - 1
        return self._pieces(item[first], start[first], stop[last])

    def each_target(self, chosen: np.ndarray) -> list[memoryview]:
        """Return the memory of each chosen range."""
        stop = self._stop[chosen]
        return self._pieces(self._item[chosen], stop - self.nbytes[chosen], stop)

    def _pieces(self, item: np.ndarray, start: np.ndarray, stop: np.ndarray) -> list[memoryview]:
        memory = self._memory
        return [memory[i][a:b] for i, a, b in zip(item.tolist(), start.tolist(), stop.tolist(), strict=True)]


def _write_near(
    near: SharedMemoryStore,
    room: bytes,
    first_block_id: int,
    blocks: Sequence[BlockPieces],
    layouts: Sequence[BlockLayout],
) -> None:
    """Write blocks, end to end, into their room in a pool of this host."""
    bases = accumulate((layout.nbytes for layout in layouts[:-1]), initial=0)
    pieces = [piece for block in blocks for part in block for piece in part]
    offsets = [
        base + at + before
        for base, layout, block in zip(bases, layouts, blocks, strict=True)
        for at, part in zip(layout.offsets, block, strict=True)
        for before in accumulate((piece.nbytes for piece in part[:-1]), initial=0)
    ]
    near.put(first_block_id, room, pieces, offsets, 0.0)


def _from_turn(numbers: list[int], turn: int) -> list[int]:
    """Return the numbers in turn, beginning with the one whose turn it is."""
    first = turn % max(1, len(numbers))
    return numbers[first:] + numbers[:first]


def _in_pool(want: Want) -> Want:
    """Return the same request with the block's location in its unit's pool."""
    block = want.block
    return Want(BlockRef(block.block_id, block.location[HOLDER_BYTES:], block.layout), want.parts)


def _laid_out(blocks: Sequence[BlockPieces], layouts: Sequence[BlockLayout]) -> list[memoryview]:
    """Return the blocks' parts as pieces of memory, with padding between them. Sent one after another, the pieces have
    the same layout as in the pool."""
    pieces = []
    for parts, layout in zip(blocks, layouts, strict=True):
        ends = [*layout.offsets[1:], layout.nbytes]
        for part, start, end, nbytes in zip(parts, layout.offsets, ends, layout.part_bytes, strict=True):
            pieces += [piece.data for piece in part]
            if end - start > nbytes:
                pieces.append(_PAD[: end - start - nbytes])
    return pieces
