"""Defines the requests to a storage unit and its replies, and carries them over blocking sockets.

A message is a frame of `rpc/frames.py`. Its payload is the number of bytes of its head, the head (msgpack), and then
raw bytes. The raw bytes are sent straight from their memory and received straight into their destination. The frame's
checksum covers the head. Checksums of the raw bytes are part of requests and replies that ask for them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from ...errors import SHOWN_KEYS
from ...listen_address import join_host
from ...owned_folder import SHARED_MEMORY, pid_space
from ...rpc.frames import HEADER_BYTES, check, head, other_number, read_header, set_up_tcp

T = TypeVar("T")

SERVICE = "storage unit"
"""Name of a storage unit in handshakes."""
MAX_HEAD_BYTES = 64 << 20
"""Largest number of bytes of a message's head. The head of a request for a million ranges has 20 MB."""
_HEAD_BYTES = struct.Struct("<I")
_BUFFER_BYTES = 64 << 10
_LOOK_S = 1.0
"""Longest time in seconds that a system call may wait before the deadline is checked."""
_MOST_VIEWS = 1024
"""Largest number of pieces of memory that one system call takes (IOV_MAX of Linux)."""
_SUMMED_BYTES = 512 << 10
"""Number of bytes whose checksum is computed between two system calls, while the network carries others. So many fit
into the cache of a core."""
LOCAL_BUFFER_BYTES = 512 << 10
"""Size of the kernel's buffers of a connection within one host. They would otherwise grow to tens of MiB, so that the
bytes would leave the caches of the cores between the sender's copy and the receiver's."""


@dataclass(slots=True)
class Progress:
    """Counts the bytes of one request and its reply, so that a time-out can say how far they came."""

    to_receive: int = 0
    """Number of bytes of the reply, as far as it is known."""
    to_send: int = 0
    sent: int = 0
    received: int = 0
    moved: float = field(default_factory=time.monotonic)
    """Time at which the last byte was moved, by `time.monotonic()`."""

    def count(self, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes that were sent or received just now."""
        self.sent += sent
        self.received += received
        self.moved = time.monotonic()

    def __str__(self) -> str:
        if not self.to_send:
            return "the connection was not made"
        if self.sent < self.to_send:
            return f"{self.sent} of {self.to_send} bytes of the request were sent"
        return f"{self.received} of {self.to_receive or 'the'} bytes of the reply were received"


class Connection:
    """One end of a connection that has passed the handshake. Not thread-safe. After any error it must be closed."""

    def __init__(self, connection: socket.socket) -> None:
        """Take ownership of a connected TCP socket."""
        set_up_tcp(connection)
        _keep_in_cache(connection)
        # The socket blocks, and the kernel limits the time. One system call can then move all bytes of a request. With
        # a timeout of Python's, the interpreter would run in between.
        connection.settimeout(None)
        self.socket = connection
        self.progress = Progress()
        """Count of the bytes of the current message; the client replaces it with each request."""
        self.number = 0
        """Number of the request that is being answered, which its reply also has."""
        self._limits_s: dict[int, float] = {}
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        """Bytes `_start` to `_end` of the buffer were received and are not used yet."""

    def send(
        self,
        op: str,
        text: bytes,
        raw: Sequence[memoryview],
        deadline: float,
        *,
        later_bytes: int = 0,
        summed: bool = False,
    ) -> None:
        """Send a message. raw: pieces of memory (bytes each) that follow its head, in this order. later_bytes: number
        of further bytes of the message, which the caller sends next with `send_raw`. summed: whether a SUM of `raw`
        follows it.

        Raises ValueError for a message of more than MAX_FRAME_BYTES, TimeoutError at the deadline (by the clock
        `time.monotonic()`), and ConnectionError when the other end has closed the connection.
        """
        raw_bytes = sum([piece.nbytes for piece in raw]) + later_bytes + (SUM.size if summed else 0)
        text = _HEAD_BYTES.pack(len(text)) + text
        first = memoryview(head(self.number, text, op, raw_bytes=raw_bytes) + text)
        self.progress.to_send = len(first) + raw_bytes
        if summed:
            self.send_raw([first], deadline)
            self.send_raw([memoryview(SUM.pack(self.send_summed(raw, deadline)))], deadline)
        else:
            self.send_raw([first, *raw], deadline)

    def send_raw(self, pieces: Sequence[memoryview], deadline: float) -> None:
        """Send pieces of memory, one after another. Raises TimeoutError and ConnectionError as `send` does."""
        for start in range(0, len(pieces), _MOST_VIEWS):
            left = pieces[start : start + _MOST_VIEWS]
            left_bytes = sum([piece.nbytes for piece in left])
            while left_bytes:
                self._limit(socket.SO_SNDTIMEO, deadline)
                try:
                    sent = self.socket.sendmsg(left)
                except BlockingIOError:
                    continue
                left_bytes -= sent
                self.progress.count(sent=sent)
                left = _rest(left, sent) if left_bytes else ()

    def receive(self, deadline: float | None, *, reply: bool = False) -> tuple[str, bytes, int] | None:
        """Receive a message's op and head. Returns them with the number of raw bytes that follow, which must be
        received or skipped next; None when the other end has closed the connection between two messages.

        deadline: time by the clock `time.monotonic()`; None waits for the message's first byte without limit. reply:
        whether the message must be the reply to the request `number`, or the unit's word on a request that it could not
        read; otherwise it is a request, and sets `number`. Raises Damaged and ValueError for bytes that are not such a
        message, TimeoutError, and ConnectionError.
        """
        if not self._fill(HEADER_BYTES, deadline, at_end=True):
            return None
        deadline = time.monotonic() + _LOOK_S * 60 if deadline is None else deadline
        nbytes, number, op_bytes, checksum = read_header(self._take(HEADER_BYTES))
        if nbytes < op_bytes + _HEAD_BYTES.size:
            raise ValueError(f"got a frame of {nbytes} bytes, expected at least {op_bytes + _HEAD_BYTES.size}")
        self.progress.to_receive = HEADER_BYTES + nbytes
        self._fill(op_bytes + _HEAD_BYTES.size, deadline)
        op, size = bytes(self._take(op_bytes)), bytes(self._take(_HEAD_BYTES.size))
        (head_bytes,) = _HEAD_BYTES.unpack(size)
        raw_bytes = nbytes - op_bytes - _HEAD_BYTES.size - head_bytes
        if head_bytes > MAX_HEAD_BYTES or raw_bytes < 0:
            raise ValueError(f"got a head of {head_bytes} bytes in a frame of {nbytes}, expected a smaller one")
        text = bytearray(head_bytes)
        self.receive_into([memoryview(text)], deadline)
        check(checksum, op, size + text)
        if not reply:
            self.number = number
        elif number not in (self.number, 0):
            raise other_number(number, b"")
        return op.decode(), bytes(text), raw_bytes

    def has_message(self) -> bool:
        """Take what has arrived, without waiting. Returns whether `receive` now returns or raises without waiting,
        except for raw bytes that do not fit into the buffer. Only for messages of which nothing was received before."""
        try:
            while self._end < HEADER_BYTES or self._end < HEADER_BYTES + read_header(self._buffer)[0]:
                # A socket under TLS is read to the end, because its bytes would no longer make it readable.
                count = self.socket.recv_into(self._view[self._end :], 0, socket.MSG_DONTWAIT)
                if not count:
                    return True
                self._end += count
                self.progress.count(received=count)
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # `receive` finds the same.
            pass
        return True

    def receive_into(self, pieces: Sequence[memoryview], deadline: float) -> None:
        """Fill pieces of memory with the next bytes. Raises TimeoutError at the deadline, and ConnectionError when the
        connection ends first."""
        left = [piece for piece in pieces if piece.nbytes]
        while left and self._end > self._start:
            count = min(self._end - self._start, left[0].nbytes)
            left[0][:count] = self._take(count)
            left = _rest(left, count)
        while left:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                count = self.socket.recvmsg_into(left[:_MOST_VIEWS], 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            if not count:
                raise ConnectionResetError("the connection ended within a message")
            self.progress.count(received=count)
            left = _rest(left, count)

    def send_summed(self, pieces: Sequence[memoryview], deadline: float) -> int:
        """Send pieces of memory as `send_raw` does, and return their checksum, as `raw_checksum` computes it."""
        digest = xxhash.xxh3_64()
        for part in sections(pieces, _SUMMED_BYTES):
            for piece in part:
                digest.update(piece)
            self.send_raw(part, deadline)
        return digest.intdigest()

    def receive_summed(self, pieces: Sequence[memoryview], deadline: float) -> int:
        """Fill pieces of memory as `receive_into` does, and return their checksum, as `raw_checksum` computes it."""
        digest = xxhash.xxh3_64()
        for part in sections(pieces, _SUMMED_BYTES):
            self.receive_into(part, deadline)
            for piece in part:
                digest.update(piece)
        return digest.intdigest()

    def skip(self, nbytes: int, deadline: float) -> None:
        """Receive bytes and drop them."""
        nothing = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes:
            count = min(nbytes, nothing.nbytes)
            self.receive_into([nothing[:count]], deadline)
            nbytes -= count

    def is_idle(self) -> bool:
        """Return whether nothing has come on the connection since the last message, not even its end."""
        if self._end > self._start:
            return False
        try:
            self.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Close the connection, which ends the calls of other threads on it. Idempotent."""
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # The connection is closed already, or the other end has ended it.
        self.socket.close()

    def _fill(self, nbytes: int, deadline: float | None, *, at_end: bool = False) -> bool:
        """Receive into the buffer until it has at least `nbytes` unused bytes. Returns False if `at_end` is true and
        the connection ended before the first byte."""
        if self._start and self._start + nbytes > len(self._buffer):
            unused = self._end - self._start
            self._view[:unused] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, unused
        while self._end - self._start < nbytes:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                count = self.socket.recv_into(self._view[self._end :])
            except BlockingIOError:
                continue
            if not count:
                if at_end and self._end == self._start:
                    return False
                raise ConnectionResetError("the connection ended within a message")
            self._end += count
            self.progress.count(received=count)
        return True

    def _take(self, nbytes: int) -> memoryview:
        self._start += nbytes
        taken = self._view[self._start - nbytes : self._start]
        if self._start == self._end:
            self._start = self._end = 0
        return taken

    def _limit(self, option: int, deadline: float | None) -> None:
        """Set the kernel's time limit for the next call. Raises TimeoutError at the deadline."""
        limit_s = 0.0 if deadline is None else min(_LOOK_S, deadline - time.monotonic())
        if deadline is not None and limit_s <= 0:
            raise TimeoutError
        if limit_s != self._limits_s.get(option):
            seconds = int(limit_s)
            microseconds = max(1, int((limit_s - seconds) * 1e6)) if limit_s else 0
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, microseconds))
            self._limits_s[option] = limit_s


def _keep_in_cache(connection: socket.socket) -> None:
    """Limit the bytes that the kernel holds of a connection within this host. Others need large buffers, because bytes
    are on their way for longer."""
    with contextlib.suppress(OSError):  # The other end may have disconnected.
        if connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)


def sections(pieces: Sequence[memoryview], most_bytes: int) -> Iterator[list[memoryview]]:
    """Divide pieces of memory, end to end, into lists of `most_bytes` bytes. The last may have fewer."""
    part: list[memoryview] = []
    room = most_bytes
    for piece in pieces:
        while piece.nbytes > room:
            yield [*part, piece[:room]]
            piece, part, room = piece[room:], [], most_bytes
        part.append(piece)
        room -= piece.nbytes
    if part:
        yield part


def _rest(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of pieces of memory after their first `done` bytes."""
    for number, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[number + 1 :]]
        done -= piece.nbytes
    return []


@dataclass(frozen=True, slots=True)
class UnitAddress:
    """Address of one storage unit, with the location of its memory for processes on the same host."""

    name: str
    pid: int
    host: str
    """IP address at which the unit listens."""
    port: int
    memory: str
    """Identity of the shared memory with the unit's pool, as `memory_id` returns it. Hosts and containers have
    different ones."""
    folder: str
    """Folder of the unit's pool in that shared memory."""
    host_name: str = ""
    """Name of the unit's host."""
    node: str = ""
    """Ray's id of the unit's node; "" for a unit that is no Ray actor."""

    @property
    def space(self) -> str:
        """Space of the process ids of the unit's host, as `pid_space` returns it there."""
        return self.memory.rpartition(" ")[0]

    @property
    def peer(self) -> str:
        """Name of the unit in error messages, with its pid, host and address."""
        return f"storage unit {self.name} pid={self.pid} host={self.host_name} {join_host(self.host, self.port)}"


def memory_id() -> str:
    """Return the identity of this process's shared memory: boot of the host, mount of /dev/shm, and namespace of pids.
    Processes with equal identities can share a pool, and see whether each other's writers are alive."""
    return f"{pid_space()} {os.stat(SHARED_MEMORY).st_dev}"  # `UnitAddress.space` takes the first part of it.


@dataclass(frozen=True, slots=True)
class Put:
    """Request (op `put`) to write consecutive blocks, whose bytes follow end to end. The reply is their locations."""

    first_block_id: int
    sizes: tuple[int, ...]
    """Number of bytes of each block, multiples of `codecs.memory.ALIGN`."""
    wait_s: float
    """Seconds for which the unit may wait for room."""
    check: bool = False
    """True if a checksum, packed as `SUM`, follows the bytes."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Request (op `reserve`) for room for consecutive blocks. A writer on the unit's host writes them itself; others
    fill the room over several connections. The reply is the room's location in the pool."""

    first_block_id: int
    nbytes: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Fill:
    """Request (op `fill`) to write the bytes that follow into a part of reserved room."""

    first_block_id: int
    start: int
    """First byte of the part within the room."""
    check: bool = False
    """True if a checksum, packed as `SUM`, follows the bytes."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Request (op `cut`) to make blocks of what a writer has written into reserved room. The reply is the blocks'
    locations."""

    first_block_id: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Get:
    """Request (op `get`) to read R ranges of bytes of B blocks. The reply is the bytes of the ranges, end to end, and
    an ENDING."""

    block_ids: bytes
    """Ids of the blocks, `[B]`, as `column` encodes them. A block without ranges is only checked for whether it still
    exists."""
    block: bytes
    """Position of each range's block in `block_ids`, `[R]`, as `column` encodes it."""
    start: bytes
    """First byte of each range within its block, `[R]`, as `column` encodes it."""
    nbytes: bytes
    """Number of bytes of each range, `[R]`, as `column` encodes it."""
    check: bool = False
    """Whether the unit sends a checksum of the bytes."""


@dataclass(frozen=True, slots=True)
class Free:
    """Request (op `free`) to delete blocks, and to refuse blocks among them that have not arrived yet."""

    block_ids: bytes
    """Ids of the blocks, as `column` returns them."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Request (op `keep`) to delete all blocks but these, and to refuse other blocks with ids below `next_block`."""

    block_ids: bytes
    """Ids of the blocks, as `column` returns them."""
    next_block: int


SUM = struct.Struct("<Q")
"""Last bytes of a `Put` or `Fill` with `check`: the checksum of the bytes before it, as `raw_checksum` returns it."""
ENDING = struct.Struct("<BQ")
"""Last bytes of the reply to a `Get`: STILL if no block was freed in the meantime, else GONE, and the checksum of the
bytes, as `raw_checksum` returns it; 0 if the request asked for none."""
STILL, GONE = 0xFF, 0
DONE, FREED, FULL, REFUSED, DAMAGED = "done", "freed", "full", "refused", "damaged"
"""Ops of replies: the request was carried out; a block was freed; the pool has no room; the request is not valid; the
bytes of a put were damaged on the way. The head of the last four is a text."""


def raw_checksum(pieces: Iterable[memoryview]) -> int:
    """Return the xxh3 of pieces of memory (bytes each), end to end."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


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
        raise ValueError(f"these {len(data)} bytes are not a {kind}: {error}") from error


def locations(head: bytes) -> tuple[bytes, ...]:
    """Decode the locations in the reply to a `Put` or `Cut`. Raises ValueError for other bytes."""
    return decode(head, tuple[bytes, ...])


def shown_ids(block_ids: Sequence[int]) -> str:
    """Return a text with the first few of these integers."""
    more = len(block_ids) - SHOWN_KEYS
    return ", ".join(map(str, block_ids[:SHOWN_KEYS])) + (f" and {more} more" if more > 0 else "")
