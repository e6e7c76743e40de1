"""Implements a storage unit: it keeps blocks in its host's shared memory, and serves them over TCP.

Bytes of a put are received straight into the unit's pool, and bytes of a get are sent straight from it. A writer or
reader on the unit's host uses the pool itself, and only asks the unit for room. One thread serves each connection, so
that a slow or stopped client does not delay other clients. Run as a module, this file is the process of a unit, a child
of the process that starts it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import logging
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ....codecs.integers import ALIGN
from ...errors import CapacityExceeded, RowsCleared, StoreLost
from ...owned_folder import process_start
from ...rpc.child_process import ChildProcess, serve_parent
from ...security.authenticated_listener import AuthenticatedListener, listen
from ...security.run_key import packed, unpacked
from ..shared_memory import SharedMemoryHost, SharedMemoryStore, location_at
from .wire import (
    DAMAGED,
    DONE,
    ENDING,
    FREED,
    FULL,
    GONE,
    REFUSED,
    SERVICE,
    STILL,
    SUM,
    Connection,
    Cut,
    Fill,
    Free,
    Get,
    Keep,
    Put,
    Reserve,
    UnitAddress,
    decode,
    encode,
    integers,
    memory_id,
    shown_ids,
)

_logger = logging.getLogger(__name__)

STALL_S = 60.0
"""Seconds that a client may take to send or receive the rest of a message before its connection is closed."""
MAX_WAIT_S = 86400.0
"""Largest number of seconds for which a put may wait for room."""
MAX_BLOCK_ID = 1 << 62
"""Number above all ids of blocks, because the table of blocks holds ids as 64 bits."""
LATE_BLOCKS = 1 << 16
"""Number of deleted blocks that are remembered because they had not arrived when they were deleted."""
LOOK_AGAIN_S = 0.25
"""Seconds after which a put that waits for room checks again for ranges whose late writers have ended."""
THREAD_STACK_BYTES = 512 << 10


class StorageUnit:
    """One storage unit, in threads of this process."""

    def __init__(self, run_id: str, name: str, key: bytes, host: str, capacity_bytes: int) -> None:
        """Create the pool, and listen on a free port of the address `host`.

        key: the run's key, which clients must know. Raises ValueError when /dev/shm has no room for `capacity_bytes`,
        and OSError when `host` is not an address of this host.
        """
        self._pool = SharedMemoryHost(f"{run_id}-{name}", capacity_bytes)
        self._memory = SharedMemoryStore(self._pool.spec)
        self._lock = threading.Lock()
        self._room = threading.Condition()
        """Condition that is notified when blocks are freed."""
        self._late: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Ids of blocks that were deleted before they arrived. A block with such an id is refused."""
        self._first_block = 0
        """Lowest id that a block may have that arrives now."""
        self._connections: set[Connection] = set()
        self._closed = False
        try:
            listener = listen(host)
        except BaseException:
            self._pool.close()
            raise
        port = listener.getsockname()[1]
        folder = str(self._pool.spec.address["folder"])
        self.address = UnitAddress(name, os.getpid(), host, port, memory_id(), folder, platform.node())
        self._handlers: dict[str, Callable[[Connection, bytes, int], None]] = {
            "put": self._put,
            "get": self._get,
            "reserve": self._reserve,
            "fill": self._fill,
            "cut": self._cut,
            "free": self._free,
            "keep": self._keep,
        }
        self._listener = AuthenticatedListener(listener, key, SERVICE, self._admit)

    def close(self) -> None:
        """End all connections and remove the pool. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = [known.socket for known in self._connections]
        self._listener.close()
        with self._room:
            self._room.notify_all()
        for connection in ended:
            _end(connection)
        self._memory.close()
        self._pool.close()

    # ---------------- These methods serve connections.

    def _admit(self, connection: socket.socket) -> None:
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            threading.Thread(target=self._host, args=(connection,), name="storage-unit", daemon=True).start()
        except RuntimeError as error:  # The system cannot start another thread.
            _logger.warning("a connection is refused: %s", error)
            connection.close()
        finally:
            threading.stack_size(before)

    def _host(self, connection: socket.socket) -> None:
        known = Connection(connection)
        with self._lock:
            closed = self._closed
            if not closed:
                self._connections.add(known)
        try:
            if not closed:
                self._serve(known)
        finally:
            with self._lock:
                self._connections.discard(known)
            known.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            try:
                request = connection.receive(None)
                if request is None:
                    return
                op, head, raw_bytes = request
                handler = self._handlers.get(op)
                if handler is None:
                    raise ValueError(f"the op {op!r} is unknown")
                handler(connection, head, raw_bytes)
            except ValueError as error:  # The message is malformed, so the bytes after it cannot be read, either.
                _logger.warning("a connection is closed: %s", error)
                connection.number = 0  # That of the request may be what was damaged.
                _try_reply(connection, REFUSED, str(error))
                return
            except OSError:
                return  # The client disconnected, or stopped within a message.
            except StoreLost:
                if not self._closed:
                    raise
                return  # The unit was closed in the middle of a request.

    # ---------------- These methods carry out requests.

    def _put(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request = decode(head, Put)
        nbytes = raw_bytes - SUM.size * request.check
        if sum(request.sizes) != nbytes:
            raise ValueError(f"put: got {nbytes} bytes of blocks, expected {sum(request.sizes)}")
        _check_sizes(request.sizes, nbytes)
        deadline = time.monotonic() + request.wait_s + STALL_S
        location = self._room_for(request.first_block_id, nbytes, request.wait_s)
        if isinstance(location, str):
            connection.skip(raw_bytes, deadline)
            _reply(connection, FULL, location.encode())
            return
        fill = Fill(request.first_block_id, 0, request.check)
        if self._received(connection, fill, location, raw_bytes, deadline, frees=True):
            self._cut_into(connection, request.first_block_id, request.sizes)

    def _fill(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request, deadline = decode(head, Fill), time.monotonic() + STALL_S
        (place,) = self._pool.places([request.first_block_id])
        if place is None:
            connection.skip(raw_bytes, deadline)
            _reply(connection, FREED, f"block {request.first_block_id} was freed before it was written".encode())
            return
        slot, offset, room_bytes = place
        if not 0 <= request.start <= request.start + raw_bytes - SUM.size * request.check <= room_bytes:
            raise ValueError(f"fill: got {raw_bytes} bytes for byte {request.start} of {room_bytes}")
        if self._received(connection, request, location_at(slot, offset), raw_bytes, deadline):
            _reply(connection, DONE, b"")

    def _received(
        self,
        connection: Connection,
        request: Fill,
        location: bytes,
        raw_bytes: int,
        deadline: float,
        *,
        frees: bool = False,
    ) -> bool:
        """Receive the bytes of a put, or a part of them, into its room at `location`. If they are damaged or the room
        was freed, the reply says so, and the result is False.

        frees: whether room whose bytes do not come is freed. If it has more parts, these may have been sent again over
        other connections, and the room may be blocks by now. Then the end of the client's reservation frees it.
        """
        block_id, nbytes, received, ending = request.first_block_id, raw_bytes, False, bytearray(SUM.size)
        try:
            with self._memory.writing(block_id, location) as room:
                if request.check:
                    nbytes -= SUM.size
                    checksum = connection.receive_summed([room(request.start, nbytes).data], deadline)
                    connection.receive_into([memoryview(ending)], deadline)
                    whole = SUM.unpack(ending) == (checksum,)
                else:
                    connection.receive_into([room(request.start, nbytes).data], deadline)
                    whole = True
                received = True
        except RowsCleared as error:  # The reservation has ended in the meantime.
            connection.skip(0 if received else raw_bytes, deadline)
            _reply(connection, FREED, error.message.encode())
            return False
        except BaseException:
            if frees:
                self._pool.free(block_id, b"")
            raise
        if not whole:
            if frees:
                self._pool.free(block_id, b"")
            _reply(connection, DAMAGED, b"the bytes of a put were damaged on the way")
        return whole

    def _reserve(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request = decode(head, Reserve)
        location = self._room_for(request.first_block_id, request.nbytes, request.wait_s)
        if isinstance(location, str):
            _reply(connection, FULL, location.encode())
        else:
            _reply(connection, DONE, location)

    def _cut(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request = decode(head, Cut)
        (place,) = self._pool.places([request.first_block_id])
        if place is not None:
            _check_sizes(request.sizes, place[2])
        self._cut_into(connection, request.first_block_id, request.sizes)

    def _cut_into(self, connection: Connection, first_block_id: int, sizes: Sequence[int]) -> None:
        """Make blocks of the room that was filled, and reply with their locations."""
        try:
            found = self._blocks(first_block_id, sizes)
        except RowsCleared as error:
            _reply(connection, FREED, error.message.encode())
        except CapacityExceeded as error:  # There is no room for the table of blocks.
            self._pool.free(first_block_id, b"")
            _reply(connection, FULL, error.message.encode())
        else:
            _reply(connection, DONE, encode(found))

    def _get(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request = decode(head, Get)
        block_ids = integers(request.block_ids).tolist()
        places = self._pool.places(block_ids)
        gone = [block_id for block_id, place in zip(block_ids, places, strict=True) if place is None]
        if gone:
            _reply(connection, FREED, f"block {shown_ids(gone)} was freed".encode())
            return
        held = np.array(places, dtype=np.int64).reshape(len(places), 3)
        starts, stops = _checked(request, held)
        pool = self._memory.pool_view()
        pieces = [pool[start:stop] for start, stop in zip(starts, stops, strict=True)]
        deadline = time.monotonic() + STALL_S
        later_bytes = sum(stop - start for start, stop in zip(starts, stops, strict=True)) + ENDING.size
        connection.send(DONE, b"", (), deadline, later_bytes=later_bytes)
        if request.check:
            checksum = connection.send_summed(pieces, deadline)
        else:
            checksum = 0
            connection.send_raw(pieces, deadline)
        state = STILL if self._pool.places(block_ids) == places else GONE
        connection.send_raw([memoryview(ENDING.pack(state, checksum))], deadline)

    def _free(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        block_ids = integers(decode(head, Free).block_ids).tolist()
        with self._lock:
            for block_id in block_ids:
                if not self._pool.holds(block_id):
                    self._late[block_id] = None
            while len(self._late) > LATE_BLOCKS:
                self._late.popitem(last=False)
        for block_id in block_ids:
            self._pool.free(block_id, b"")
        with self._room:
            self._room.notify_all()
        _reply(connection, DONE, b"")

    def _keep(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        request = decode(head, Keep)
        kept = set(integers(request.block_ids).tolist())
        with self._lock:
            self._first_block = request.next_block
        for block_id in self._pool.block_ids():
            if block_id < request.next_block and block_id not in kept:
                self._pool.free(block_id, b"")
        with self._room:
            self._room.notify_all()
        _reply(connection, DONE, b"")

    # ---------------- These methods use the pool.

    def _room_for(self, first_block_id: int, nbytes: int, wait_s: float) -> bytes | str:
        """Allocate room for a put, waiting for it at most `wait_s` seconds. Returns its location, or why there is
        none."""
        if not 0 <= first_block_id < MAX_BLOCK_ID or nbytes <= 0 or not 0 <= wait_s <= MAX_WAIT_S:
            raise ValueError(f"put: block {first_block_id} of {nbytes} bytes with a wait of {wait_s} s is not valid")
        deadline = time.monotonic() + wait_s
        if self._pool.holds(first_block_id):
            raise ValueError(f"put: block {first_block_id} exists already, expected a new id")
        while True:
            location = self._pool.allocate(first_block_id, nbytes)
            if location is not None:
                return location
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed:
                return self._pool.shortage()
            with self._room:
                self._room.wait(min(left_s, LOOK_AGAIN_S))

    def _blocks(self, first_block_id: int, sizes: Sequence[int]) -> list[bytes]:
        """Make blocks of the room that was allocated for `first_block_id`, and return their locations. Raises
        RowsCleared when one of them has been deleted in the meantime; the other blocks are then deleted, too."""
        found = self._pool.cut(first_block_id, sizes)
        block_ids = range(first_block_id, first_block_id + len(sizes))
        with self._lock:
            late = [block_id for block_id in block_ids if block_id in self._late or block_id < self._first_block]
            for block_id in late:
                self._late.pop(block_id, None)
        if late:
            for block_id in block_ids:
                self._pool.free(block_id, b"")
            raise RowsCleared(f"block {shown_ids(late)} was freed before it was written", op="put")
        return found


def _end(connection: socket.socket) -> None:
    """End a connection without closing its descriptor, which another thread may be using."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _check_sizes(sizes: Sequence[int], room_bytes: int) -> None:
    """Raise ValueError unless `sizes` are sizes of one or more blocks that fit into `room_bytes` bytes."""
    if not sizes or min(sizes) <= 0 or any(size % ALIGN for size in sizes) or sum(sizes) > room_bytes:
        raise ValueError(
            f"got blocks of {shown_ids(sizes)} bytes, expected multiples of {ALIGN} that fit into {room_bytes} bytes"
        )


def _checked(request: Get, held: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the first byte of each requested range in the pool, and the byte after its last. Raises ValueError for
    ranges beyond their blocks. held: (slot, offset, bytes) of each block, int64 `[B, 3]`."""
    block, start, nbytes = integers(request.block), integers(request.start), integers(request.nbytes)
    if not len(block) == len(start) == len(nbytes):
        raise ValueError("get: the columns of the ranges differ in length, expected equal lengths")
    if len(block) and not 0 <= block.min() <= block.max() < len(held):
        raise ValueError(f"get: got ranges of blocks {block.min()} to {block.max()}, expected 0 to {len(held) - 1}")
    first = held[block, 1] + start
    wrong = (start < 0) | (nbytes < 0) | (start > held[block, 2]) | (nbytes > held[block, 2] - start)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        text = f"get: got {nbytes[at]} bytes from byte {start[at]}, expected at most {held[block[at], 2]} bytes in all"
        raise ValueError(text)
    return first.tolist(), (first + nbytes).tolist()


def _reply(connection: Connection, op: str, head: bytes) -> None:
    connection.send(op, head, (), time.monotonic() + STALL_S)


def _try_reply(connection: Connection, op: str, text: str) -> None:
    with contextlib.suppress(OSError):  # The client may have disconnected.
        _reply(connection, op, text.encode())


START_TIMEOUT_S = 60.0


class UnitProcess:
    """A storage unit in a child process. It ends with this process at the latest."""

    def __init__(self, run_id: str, name: str, key: bytes, host: str, capacity_bytes: int) -> None:
        """Start the unit; arguments and errors are those of `StorageUnit`. Raises StoreLost when it does not start
        within START_TIMEOUT_S."""
        secret = packed(key).hex()
        setup = {"run_id": run_id, "name": name, "key": secret, "host": host, "capacity_bytes": capacity_bytes}
        self._child = ChildProcess(__name__, setup, START_TIMEOUT_S)
        self.address = UnitAddress(**self._child.answer)
        self.pid = self.address.pid
        self._start = process_start(self.pid)

    def has_died(self) -> bool:
        # The process that asks may have been forked from the one that started the unit, so it cannot wait for it.
        return process_start(self.pid) != self._start

    def close(self) -> None:
        """End the process and with it the unit's pool. Idempotent."""
        self._child.close()


def _start(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    try:
        key = unpacked(bytes.fromhex(setup["key"]))
        unit = StorageUnit(setup["run_id"], setup["name"], key, setup["host"], setup["capacity_bytes"])
    except OSError as error:
        raise ValueError(f"storage unit {setup['name']}: cannot listen on {setup['host']}: {error.strerror}") from None
    gc.freeze()  # Imported objects stay, so the garbage collector need not look at them.
    return dataclasses.asdict(unit.address), unit.close


if __name__ == "__main__":
    serve_parent(_start)
