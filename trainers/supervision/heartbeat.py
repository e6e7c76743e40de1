"""The heartbeat: where the driver stands, written at every turn into memory that its watchdog reads at any moment.

One record of fixed size with a checksum. The driver's threads take turns at it (one copy under the interpreter's lock);
a reader that meets a half-written one sees that it does not add up, and looks again.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass

_BODY = struct.Struct("<qddB47p")
_SUM = struct.Struct("<I")
SIZE = 4096
"""Bytes of the memory: one page, of which a record takes the first part."""
_RECORD = _SUM.size + _BODY.size
_LOOKS = 100
"""Times that a reader looks again at a record that does not add up: a write takes a microsecond."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat says."""

    step: int
    """The step under way; 0 before the first."""
    stage: str
    """The stage under way, or the last one."""
    inside: bool
    """Whether it is under way; False: it has ended, and the next has not begun."""
    since_s: float
    """When it began, or ended: `time.monotonic`, which all processes of a host share."""
    bound_s: float
    """How long it may take; infinite when nobody can say."""

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"{step}stage {self.stage!r}" if self.inside else f"{step}after stage {self.stage!r}"


class Heartbeat:
    """The driver's end. Thread-safe."""

    def __init__(self, descriptor: int = -1, *, bound_s: float = math.inf) -> None:
        """descriptor: of the memory, from `shared_memory`; -1: nobody reads it, and it costs the same microsecond.
        bound_s: of stages that do not say otherwise, and of the time between them."""
        self._memory = mmap.mmap(descriptor, SIZE)
        self._bound_s = bound_s
        self._step = 0
        self._stage = b"start"
        self._write(False, bound_s)

    def step(self, step: int) -> None:
        """What follows belongs to `step`."""
        self._step = step
        self._write(False, self._bound_s)

    def enter(self, stage: str, bound_s: float | None = None) -> None:
        """`stage` begins; None: it may take as long as any."""
        self._stage = stage.encode()
        self._write(True, self._bound_s if bound_s is None else bound_s)

    def leave(self) -> None:
        """The stage has ended."""
        self._write(False, self._bound_s)

    def _write(self, inside: bool, bound_s: float) -> None:
        body = _BODY.pack(self._step, time.monotonic(), bound_s, inside, self._stage)
        self._memory[:_RECORD] = _SUM.pack(zlib.crc32(body)) + body


def shared_memory() -> int:
    """Descriptor of memory for one heartbeat, for its writer and for the process that reads it; the caller closes it.
    It belongs to no file system, and is gone with the last of them."""
    descriptor = os.memfd_create("headrace-heartbeat")
    os.ftruncate(descriptor, SIZE)
    return descriptor


class HeartbeatReader:
    """The watchdog's end."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        self._last = Beat(0, "start", False, time.monotonic(), math.inf)

    def read(self) -> Beat:
        """The newest beat; the one before when the driver was killed in the middle of writing it."""
        for _ in range(_LOOKS):
            record = self._memory[:_RECORD]
            body = record[_SUM.size :]
            if zlib.crc32(body) == _SUM.unpack_from(record)[0]:
                step, since_s, bound_s, inside, stage = _BODY.unpack(body)
                self._last = Beat(step, stage.decode(errors="replace"), bool(inside), since_s, bound_s)
                break
        return self._last
