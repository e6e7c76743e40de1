"""`SharedSlots` is memory into which a receiver takes buckets, and in which others of its host read them.

    owner     take a slot -> payload -> verify -> pass on -> unpack -> all are through -> slot free again
    readers                                       |-> verify, unpack -> through

The memory has no name (memfd). The owner hands it over through a socket for each reader, which has no file either, so
nothing is left when the processes have ended, however they end, and each end sees at once that the other is lost. The
owner closes the socket of a reader that is too slow before it uses the slot again. The reader's `through` then fails,
so that it never takes other bytes for those that it was passed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import mmap
import os
import queue
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from ....codecs import messages
from ....codecs.integers import round_up
from ..transports import host_ring
from ..transports.control_link import Note
from ..transports.protocol import BucketFrame, Deadline
from .pair_sender import SLOTS

_SLICE_S = 0.05
_ASK_S = 0.5
"""Seconds without a message after which a reader asks whether the owner still moves."""
_MAX_BYTES = 1 << 14
_MAX_TEXT = 4000
_CREDENTIALS = struct.Struct("iII")
T = TypeVar("T")


@functools.cache
def host_name() -> str:
    """Return the name of the space whose receivers can share slots: a user's processes on one host and network."""
    return f"{host_ring.host_name()} {os.stat('/proc/self/ns/net').st_ino}"


def meeting_place(key: bytes, location: str, owner: int, reader: int) -> bytes:
    """Return the address of the socket of a pair of receivers, which cannot be guessed without the run's key. location:
    that of the update."""
    told = f"{location} {owner} {reader}".encode()
    return b"\0headrace-" + hashlib.blake2b(told, key=key[:64], digest_size=24).hexdigest().encode()


class SlotMemory:
    """Memory of SLOTS buckets, which its process can hand over. It is freed with its last reference."""

    def __init__(self, nbytes: int) -> None:
        """Allocate slots of `nbytes` bytes each. Raises OSError when there is no memory for them."""
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("headrace-buckets", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.truncate(self.descriptor, SLOTS * round_up(max(nbytes, 1), mmap.PAGESIZE))
        self.slots = map_slots(self.descriptor)


class SharedSlots:
    """The slots of one update in the receiver that owns them. Any thread may call `take`, `pass_on` and `through`."""

    def __init__(self, memory: SlotMemory, places: Mapping[int, bytes], deadline: Deadline) -> None:
        """Listen for readers. places: address of each reader's socket, by rank. Raises OSError when listening fails."""
        self._memory, self._deadline = memory, deadline
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._notes: dict[int, Note] = {}
        """Buckets that were passed on in the slots that are not free."""
        self._users: dict[int, set[int | None]] = {}
        """Readers that are not through with each slot, and None for the owner itself."""
        self._doors: dict[int, socket.socket] = {}
        """Listening sockets of the readers that have not connected."""
        self._readers: dict[int, socket.socket] = {}
        self._idle_s = dict.fromkeys(places, 0.0)
        """Seconds for which each reader has had a bucket and done nothing, while this process ran itself."""
        self.all_here = False
        """True once all receivers of the update have begun. Until then, none is given up."""
        for slot in range(SLOTS):
            self._free.put(slot)
        try:
            for reader, place in places.items():
                door = self._doors[reader] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                door.bind(place)
                door.listen(1)
        except OSError:
            self.close()
            raise

    def take(self) -> int:
        """Return a free slot. Raises queue.Empty when there is none for a moment."""
        slot = self._free.get(timeout=_SLICE_S)
        with self._lock:
            self._users[slot] = {None}
        return slot

    def payload(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return the first bytes of a slot, uint8 `[nbytes]`."""
        return self._memory.slots[slot][:nbytes]

    def pass_on(self, slot: int, frame: BucketFrame, readers: Collection[int]) -> None:
        """Let `readers` read a verified bucket in a slot that was taken, as long as they have not left."""
        with self._lock:
            note = self._notes[slot] = Note("frame", number=slot, frame=frame)
            for reader in readers:
                if reader in self._doors or reader in self._readers:
                    self._users[slot].add(reader)
                if reader in self._readers:
                    self._send(reader, note)

    def through(self, slot: int) -> None:
        """Note that the owner itself does not need a slot any more."""
        with self._lock:
            self._release(slot, None)

    def serve(self, over: Callable[[], bool], patience_s: float, look: Callable[[], None]) -> None:
        """Admit the readers, and hear them, until `over()` is true and they are through with all slots.

        A reader that has a bucket, and is through with none for `patience_s` seconds, is given up. look: function that
        is called again and again, and raises an error to end the call.
        """
        before = time.monotonic()
        while True:
            look()
            ended, poll = over(), select.poll()
            with self._lock:
                ends = {one.fileno(): (reader, one) for reader, one in (*self._doors.items(), *self._readers.items())}
                if ended and not any(self._owes(reader) for reader, _ in ends.values()):
                    return
            for number in ends:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(_SLICE_S * 1e3):
                reader, one = ends[number]
                with self._lock:
                    if one is self._doors.get(reader):
                        self._admit(reader)
                    elif one is self._readers.get(reader):
                        self._hear(reader)
            now = time.monotonic()
            with self._lock:
                self._judge(min(now - before, _SLICE_S), patience_s)
            before = now

    def close(self, reason: str = "") -> None:
        """Close all sockets. reason: why the update failed in the owner, for its readers. Idempotent."""
        with self._lock:
            for reader in [*self._doors, *self._readers]:
                if reason and reader in self._readers:
                    self._send(reader, Note("failed", reason[:_MAX_TEXT]))
                self._leave(reader)

    # ---------------- These methods are private, and called with the lock.

    def _owes(self, reader: int) -> bool:
        return any(reader in users for users in self._users.values())

    def _judge(self, passed_s: float, patience_s: float) -> None:
        for reader in [*self._doors, *self._readers]:
            self._idle_s[reader] += passed_s if self.all_here and self._owes(reader) else -self._idle_s[reader]
            if self._idle_s[reader] > patience_s:
                self._leave(reader)

    def _admit(self, reader: int) -> None:
        connection, _ = self._doors[reader].accept()
        if not _is_own(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._doors.pop(reader).close()
        self._readers[reader] = connection
        try:
            socket.send_fds(connection, [b"\0"], [self._memory.descriptor])
        except OSError:
            self._leave(reader)
        for slot, note in [*self._notes.items()]:
            if reader in self._readers and reader in self._users.get(slot, ()):
                self._send(reader, note)

    def _hear(self, reader: int) -> None:
        try:
            note = _receive(self._readers[reader])
        except OSError:
            self._leave(reader)
            return
        if note.kind == "through":
            self._idle_s[reader] = 0.0
            self._deadline.moved()
            self._release(note.number, reader)
        else:
            self._send(reader, Note("moves", number=self._deadline.num_moves))

    def _send(self, reader: int, note: Note) -> None:
        try:
            self._readers[reader].send(messages.encode(note))
        except OSError:
            self._leave(reader)

    def _leave(self, reader: int) -> None:
        for ends in (self._doors, self._readers):
            if reader in ends:
                ends.pop(reader).close()
        for slot in [*self._users]:
            self._release(slot, reader)

    def _release(self, slot: int, user: int | None) -> None:
        users = self._users.get(slot, set())
        users.discard(user)
        if slot in self._users and not users:
            del self._users[slot]
            self._notes.pop(slot, None)
            self._free.put(slot)


class LostOwner(ConnectionError):
    """The owner of slots has failed, or is gone."""


class SlotReader:
    """A reader's end: the slots of another receiver of this host. Only one thread may use it."""

    def __init__(self, place: bytes, patience_s: float, is_there: Callable[[], bool], look: Callable[[], None]) -> None:
        """Connect to the owner, once it listens at `place`.

        patience_s: seconds for which the owner may do nothing at all. is_there: function that returns whether the owner
        has begun, however it fared since. look: as in `SharedSlots.serve`. Raises LostOwner if the owner is gone or
        does nothing, and OSError if its memory cannot be read.
        """
        self._patience_s, self._is_there, self._look, self._num_moves = patience_s, is_there, look, 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        try:
            self._connect(place)
            self._slots = _map_handed(self._await(lambda: socket.recv_fds(self._socket, 1, 1, socket.MSG_CMSG_CLOEXEC)))
        except BaseException:
            self._socket.close()
            raise

    def passed(self, moved: Callable[[], None]) -> tuple[int, BucketFrame, torch.Tensor]:
        """Return the next bucket that is passed on: its slot, its frame, and its bytes. Rely on them only when
        `through` has returned.

        moved: function that is called when the owner has made progress elsewhere. Raises LostOwner if it fails, is gone
        or does nothing.
        """
        while True:
            note = self._await(lambda: _receive(self._socket))
            if note.kind == "failed":
                raise LostOwner(f"it has failed: {note.text}")
            if note.frame is not None:
                return note.number, note.frame, self._slots[note.number][: note.frame.nbytes]
            if note.number > self._num_moves:
                self._num_moves = note.number
                moved()

    def through(self, slot: int) -> None:
        """Give a slot back. Raises LostOwner if the owner is gone or did not wait, so that the bytes may be others."""
        try:
            self._socket.send(messages.encode(Note("through", number=slot)))
        except OSError as error:
            raise self._lost("it is lost, or did not wait any longer") from error

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _connect(self, place: bytes) -> None:
        while True:
            there = self._is_there()
            try:
                self._socket.connect(place)
                break
            except (ConnectionRefusedError, BlockingIOError) as error:
                if there and isinstance(error, ConnectionRefusedError):
                    raise LostOwner("it is lost") from error
            self._look()
            time.sleep(_SLICE_S / 10)
        if not _is_own(self._socket):
            raise PermissionError(errno.EPERM, "its socket belongs to another user")

    def _await(self, receive: Callable[[], T]) -> T:
        """Return what the owner sends next, and ask it for a sign of life when that takes long."""
        idle_s, asked, poll = 0.0, False, select.poll()
        poll.register(self._socket, select.POLLIN)
        try:
            while not poll.poll(_SLICE_S * 1e3):
                self._look()
                idle_s += _SLICE_S if self._is_there() else 0.0
                if idle_s > self._patience_s:
                    raise LostOwner(f"it has done nothing for {self._patience_s:.1f} s")
                if not asked and idle_s > _ASK_S:
                    asked = True
                    self._socket.send(messages.encode(Note("moves")))
            return receive()
        except LostOwner:
            raise
        except OSError as error:
            raise self._lost("it is lost") from error

    def _lost(self, otherwise: str) -> LostOwner:
        """Return the error for a broken socket, with the reason that the owner may have sent before."""
        for _ in range(SLOTS + 2):  # The first call can fail though messages have come.
            with contextlib.suppress(OSError):
                note = _receive(self._socket)
                if note.kind == "failed":
                    return LostOwner(f"it has failed: {note.text}")
        return LostOwner(otherwise)


def _receive(connection: socket.socket) -> Note:
    body = connection.recv(_MAX_BYTES)
    if not body:
        raise ConnectionError("the socket was closed by the other end")
    try:
        return messages.decode(body, Note)
    except ValueError as error:
        raise ConnectionError(f"got bytes that are not a message of this protocol: {error}") from error


def _is_own(connection: socket.socket) -> bool:
    """Return whether the other end belongs to this process's user."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(told)[1] == os.getuid()


def map_slots(descriptor: int) -> list[torch.Tensor]:
    """Return the slots of the `SlotMemory` that `descriptor` has open."""
    return [*torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8).chunk(SLOTS)]


def _map_handed(handed: tuple[bytes, list[int], int, Any]) -> list[torch.Tensor]:
    if not handed[1]:
        raise LostOwner("it is lost")
    try:
        return map_slots(handed[1][0])
    finally:
        os.close(handed[1][0])
