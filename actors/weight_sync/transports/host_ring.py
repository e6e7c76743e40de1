"""`HostRing` is memory in which one receiver of a host passes an update's payloads on to the host's other receivers.

    first receiver    has_room -> receive payload k into slot k modulo 2 -> publish -> has_room -> ...
    other receivers                                                         landed -> verify, use -> through -> ...

The memory has no name (memfd): the other processes open it through /proc. So nothing of it is left when its processes
have ended, however they end, and it needs no room in /dev/shm.

words 0-3   token of the ring, bytes of a slot, number of readers, number of payloads that have landed
1 word each number of payloads that the reader is through with
2 slots     one payload each, at a multiple of a page
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Collection

import numpy as np
import torch

from ....codecs.integers import round_up
from ....dataplane.owned_folder import pid_space

SLOTS = 2
_TOKEN, _SLOT_BYTES, _NUM_READERS, _LANDED, _COUNTS = range(5)
_WORD = 8
_TICK_S = 1e-4
"""Seconds between two checks that a payload has landed."""


def host_name() -> str:
    """Return the name of the space whose processes can read each other's rings.

    They share a boot, a namespace of pids and a user."""
    return f"{pid_space()} {os.getuid()}"


class HostRing:
    """One process's mapping of the ring. Only the first receiver writes, except for each reader's own count."""

    def __init__(self, descriptor: int, location: str) -> None:
        """Map the ring that `descriptor` has open. Raises ValueError if it is not the one at `location`."""
        self.location = location
        """Address of the ring for other processes of the host: pid, file descriptor and token."""
        memory = mmap.mmap(descriptor, 0)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._words = np.frombuffer(memory, np.uint64, count=len(memory) // _WORD)
        if int(self._words[_TOKEN]) != int(location.split()[2]):
            raise ValueError(f"the memory at {location} belongs to another process")
        self.slot_bytes, self.num_readers = int(self._words[_SLOT_BYTES]), int(self._words[_NUM_READERS])
        self._counts = self._words[_COUNTS : _COUNTS + self.num_readers]
        self._slots_at = _slots_at(self.num_readers)
        self.gone: set[int] = set()
        """Readers that have left, for which the first receiver does not wait."""
        self.whole = False
        """True in the first receiver once the last payload of its update has landed."""

    @staticmethod
    def open(location: str) -> HostRing:
        """Map the ring of another process. Raises OSError if that process is gone or must not be read, and ValueError
        if its pid was given to another."""
        pid, number, _ = location.split()
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return HostRing(descriptor, location)
        finally:
            os.close(descriptor)

    def slot(self, number: int, nbytes: int) -> torch.Tensor:
        """Return the memory of payload `number`, uint8 `[nbytes]`."""
        begin = self._slots_at + number % SLOTS * round_up(self.slot_bytes, mmap.PAGESIZE)
        return self._bytes[begin : begin + nbytes]

    def has_room(self, number: int) -> bool:
        """Return whether all readers are through with the payload whose slot payload `number` takes."""
        return all(count + SLOTS > number for reader, count in enumerate(self.counts) if reader not in self.gone)

    def publish(self, number: int) -> None:
        """Tell the readers that payload `number` has landed in its slot."""
        self._words[_LANDED] = number + 1

    def through(self, reader: int, number: int) -> None:
        """Record that a reader does not need payload `number` any more."""
        self._counts[reader] = number + 1

    @property
    def num_landed(self) -> int:
        return int(self._words[_LANDED])

    @property
    def counts(self) -> Collection[int]:
        """Number of payloads that each reader is through with."""
        return self._counts.tolist()

    def begin_again(self, nbytes: int, num_readers: int) -> bool:
        """Make the ring ready for another update of the same number of readers, and return True. Returns False if it is
        too small, or if a reader of the last update may still use it."""
        fits = self.whole and nbytes <= self.slot_bytes and num_readers == self.num_readers
        if not fits or self.gone or any(count != self.num_landed for count in self.counts):
            return False
        self.whole = False
        self._words[_LANDED] = 0
        self._counts[:] = 0
        return True


class OwnRing(HostRing):
    """The ring of this process, which keeps it open for others until `close`."""

    def __init__(self, nbytes: int, num_readers: int) -> None:
        """Allocate a ring for payloads of up to `nbytes` bytes. Raises OSError when there is no memory for it."""
        self._descriptor = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
        try:
            os.truncate(self._descriptor, _slots_at(num_readers) + SLOTS * round_up(max(nbytes, 1), mmap.PAGESIZE))
            token = secrets.randbits(63)
            os.pwrite(self._descriptor, np.array([token, nbytes, num_readers], np.uint64).tobytes(), 0)
            super().__init__(self._descriptor, f"{os.getpid()} {self._descriptor} {token}")
        except BaseException:
            os.close(self._descriptor)
            raise

    def close(self) -> None:
        """Make it impossible for others to open the ring. Those that have it open keep it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Landing:
    """A payload that the first receiver of the host puts into the ring."""

    def __init__(self, ring: HostRing, number: int) -> None:
        self._ring = ring
        self._number = number

    def ended(self, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds, and return whether the payload has landed."""
        until = time.monotonic() + wait_s
        while not (ended := self._ring.num_landed > self._number) and time.monotonic() < until:
            time.sleep(_TICK_S)
        return ended


def _slots_at(num_readers: int) -> int:
    return round_up((_COUNTS + num_readers) * _WORD, mmap.PAGESIZE)
