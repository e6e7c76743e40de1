"""The heartbeat records the driver's current stage in memory that it shares with its watchdog.

It is one record of fixed size with a checksum. Only one thread of the driver writes it at a time, because the
interpreter's lock is held for the single copy. A reader that sees a partial record notices the wrong checksum and reads
again.
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
"""Number of bytes of the memory, one page; the record is at its start."""
_RECORD = _SUM.size + _BODY.size
_LOOKS = 100
"""Maximum number of times that a reader reads a record again because its checksum is wrong. A write takes a
microsecond."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat record: the driver's current stage, when it entered that stage, and how long it may stay there."""

    step: int
    """Number of the current step; 0 before the first step."""
    stage: str
    """Name of the current stage, or of the last one when none is in progress."""
    inside: bool
    """True while the stage is in progress, False when it has ended and the next one has not begun."""
    since_s: float
    """Time in seconds at which the stage began or ended, by `time.monotonic()`, a clock that all processes of a host
    share."""
    bound_s: float
    """Maximum number of seconds for the stage, or for the time until the next one; infinite when there is no limit."""

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"{step}stage {self.stage!r}" if self.inside else f"{step}after stage {self.stage!r}"


class Heartbeat:
    """Writes the heartbeat (the driver's current stage) in the driver. Thread-safe."""

    def __init__(self, descriptor: int = -1, *, bound_s: float = math.inf) -> None:
        """Write to the shared memory of `descriptor`, which `shared_memory` returned. If it is -1, write to memory that
        is not read.

        `bound_s` is the maximum number of seconds for the time between stages, and for stages without a time limit of
        their own.
        """
        self._memory = mmap.mmap(descriptor, SIZE)
        self._bound_s = bound_s
        self._step = 0
        self._stage = b"start"
        self._write(False, bound_s)

    @property
    def stage(self) -> str:
        """Name of the current stage, or of the last one when none is in progress."""
        return self._stage.decode()

    def step(self, step: int) -> None:
        """Record that all following stages belong to step `step`."""
        self._step = step
        self._write(False, self._bound_s)

    def enter(self, stage: str, bound_s: float | None = None) -> None:
        """Record that `stage` begins and may take `bound_s` seconds. With None, the default time limit applies."""
        self._stage = stage.encode()
        self._write(True, self._bound_s if bound_s is None else bound_s)

    def leave(self) -> None:
        """Record that the current stage has ended."""
        self._write(False, self._bound_s)

    def _write(self, inside: bool, bound_s: float) -> None:
        body = _BODY.pack(self._step, time.monotonic(), bound_s, inside, self._stage)
        self._memory[:_RECORD] = _SUM.pack(zlib.crc32(body)) + body


def shared_memory() -> int:
    """Return a descriptor of memory for one heartbeat, for its writer and for the process that reads it.

    The caller closes it. The memory belongs to no file system and is freed when the last process closes it.
    """
    descriptor = os.memfd_create("headrace-heartbeat")
    os.ftruncate(descriptor, SIZE)
    return descriptor


class HeartbeatReader:
    """Reads the driver's heartbeat in the watchdog."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        self._last = Beat(0, "start", False, time.monotonic(), math.inf)

    def read(self) -> Beat:
        """Return the newest record. If the driver was killed while writing it, return the record before it."""
        for _ in range(_LOOKS):
            record = self._memory[:_RECORD]
            body = record[_SUM.size :]
            if zlib.crc32(body) == _SUM.unpack_from(record)[0]:
                step, since_s, bound_s, inside, stage = _BODY.unpack(body)
                self._last = Beat(step, stage.decode(errors="replace"), bool(inside), since_s, bound_s)
                break
        return self._last
