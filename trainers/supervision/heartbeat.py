"""Records the driver's current stage, the heartbeat, in memory shared with its watchdog.

The heartbeat is one record of fixed size with a checksum. Only one thread of the driver writes at a time, because the
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
"""Size of the shared memory in bytes, one page. The record is at its start."""
_RECORD = _SUM.size + _BODY.size
_LOOKS = 100
"""Largest number of times that a reader retries because the checksum is wrong. A write takes a microsecond."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat record: the driver's current stage, when it entered that stage, and how long it may stay there."""

    step: int
    """Number of the current step; 0 before the first step."""
    stage: str
    """Name of the current stage, or of the last one when none is in progress."""
    inside: bool
    """True while the stage is in progress, False between its end and the begin of the next stage."""
    since_s: float
    """Time in seconds at which the stage began or ended, by `time.monotonic()`, a clock that all processes of a host
    share."""
    bound_s: float
    """Largest number of seconds for the stage, or for the time until the next stage; infinite if there is no limit."""

    def __str__(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"{step}stage {self.stage!r}" if self.inside else f"{step}after stage {self.stage!r}"


class Heartbeat:
    """Writes the heartbeat (the driver's current stage) in the driver. Thread-safe."""

    def __init__(self, descriptor: int = -1, *, bound_s: float = math.inf) -> None:
        """Write to the shared memory of `descriptor`, a result of `shared_memory`. With -1, write to memory without
        readers. `bound_s` is the largest number of seconds between stages, and for stages without their own time limit.
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
        """Record that `stage` begins and can take up to `bound_s` seconds. With None, the default time limit
        applies."""
        self._stage = stage.encode()
        self._write(True, self._bound_s if bound_s is None else bound_s)

    def leave(self) -> None:
        """Record that the current stage has ended."""
        self._write(False, self._bound_s)

    def _write(self, inside: bool, bound_s: float) -> None:
        body = _BODY.pack(self._step, time.monotonic(), bound_s, inside, self._stage)
        self._memory[:_RECORD] = _SUM.pack(zlib.crc32(body)) + body


def shared_memory() -> int:
    """Return a descriptor of memory for one heartbeat, shared by its writer and its reader. The caller closes the
    descriptor. The memory belongs to no file system and is freed when the last process closes it.
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
        """Return the newest complete record. If the driver was killed during a write, this is the previous record."""
        for _ in range(_LOOKS):
            record = self._memory[:_RECORD]
            body = record[_SUM.size :]
            if zlib.crc32(body) == _SUM.unpack_from(record)[0]:
                step, since_s, bound_s, inside, stage = _BODY.unpack(body)
                self._last = Beat(step, stage.decode(errors="replace"), bool(inside), since_s, bound_s)
                break
        return self._last
