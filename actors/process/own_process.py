"""Reads and sets the properties of an actor's own process: its name and host, its GPUs, its allocator.

It imports nothing that takes time, because actors that start early need it before anything else.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of the two settings of glibc's allocator in its `malloc.h`."""
KEPT_BYTES = 128 << 20
"""Largest number of freed bytes at the top of the heap that a process keeps."""
HEAP_BYTES = 32 << 20
"""Smallest block that gets pages of its own, which go back when it is freed: the largest value that glibc accepts."""


def show_gpus(devices: Sequence[str] | None) -> None:
    """Let this process see only these GPUs. Must be called before anything in the process uses CUDA, which reads the
    variable once. A no-op for None.

    Ray sets the variable, too, but an actor with GPUs of several of its bundles would get only those of one. devices:
    CUDA's names of the GPUs; the first becomes `cuda:0`.
    """
    if devices is not None:
        os.environ[_VISIBLE] = ",".join(devices)


def shown_gpus() -> tuple[str, ...]:
    """Return CUDA's names of the GPUs that this process is limited to; () if it is limited to none or to nothing."""
    return tuple(name for name in os.environ.get(_VISIBLE, "").split(",") if name)


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Identity of a process, for errors, traces and clean-up."""

    name: str
    pid: int
    host: str
    gpus: tuple[str, ...] = ()
    """CUDA's names of the GPUs that the process is limited to; () if there is no limit, or if it may use none."""

    @staticmethod
    def here(name: str) -> ActorInfo:
        """Return the identity of the calling process, with `name` as its name."""
        return ActorInfo(name, os.getpid(), socket.gethostname(), shown_gpus())

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"


def keep_freed_memory() -> bool:
    """Let the allocator keep up to KEPT_BYTES of freed memory instead of returning it to the operating system. Returns
    whether this process has an allocator with that setting, which is glibc's.

    A step on a CPU frees its tensors and needs as many in the next microbatch or token. With glibc's own limits the
    system took their pages away each time and cleared others for them, thousands per step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # this C library has no mallopt
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES))


def settle() -> None:
    """Take all objects that exist now, most of them imported modules, out of the garbage collector's sight. It first
    removes the garbage among them. Otherwise each full collection looks at all of them, which stops the process for a
    tenth of a second."""
    gc.collect()
    gc.freeze()
