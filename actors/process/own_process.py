"""Reads and sets the properties of an actor's own process: its name and host, its GPUs, its allocator, its threads.

This module imports nothing that takes time, because actors that start early need it first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from ...dataplane.owned_folder import pid_space, process_start

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of two settings of glibc's allocator, as in its `malloc.h`."""
KEPT_BYTES = 128 << 20
"""Largest number of freed bytes at the top of the heap that a process keeps."""
HEAP_BYTES = 32 << 20
"""Size in bytes from which a block gets its own pages, which return to the operating system when the block is freed.
This is the largest value that glibc accepts."""


def show_gpus(devices: Sequence[str] | None) -> None:
    """Let this process see only these GPUs. Must be called before anything in the process uses CUDA, which reads the
    variable once. A no-op for None.

    Ray also sets the variable, but an actor with GPUs from several bundles would get only the GPUs of one bundle.
    devices: CUDA's names of the GPUs; the first becomes `cuda:0`.
    """
    if devices is not None:
        os.environ[_VISIBLE] = ",".join(devices)


def shown_gpus() -> tuple[str, ...]:
    """Return CUDA's names of the GPUs to which this process is limited. () means no limit, or no GPU."""
    return tuple(name for name in os.environ.get(_VISIBLE, "").split(",") if name)


@dataclass(frozen=True, slots=True)
class ActorInfo:
    """Identity of a process, for errors, traces and clean-up."""

    name: str
    pid: int
    host: str
    gpus: tuple[str, ...] = ()
    """CUDA's names of the GPUs that the process is limited to; () if there is no limit, or if it may use none."""
    space: str = ""
    """Space in which `pid` has its meaning, as `pid_space` returns it; "" while it is unknown. Hosts can have equal
    names, but never equal spaces."""
    start: int | None = None
    """Start time of the process in clock ticks, which tells it from a later process with the same pid."""

    @staticmethod
    def here(name: str) -> ActorInfo:
        """Return the identity of the calling process, with `name` as its name."""
        pid = os.getpid()
        return ActorInfo(name, pid, socket.gethostname(), shown_gpus(), pid_space(), process_start(pid))

    @property
    def is_here(self) -> bool:
        """True when the process is on this host, in the same space of process ids."""
        return self.space == pid_space()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid} on {self.host})"


def bind_process_groups(address: str) -> None:
    """Bind the gloo and NCCL groups that this process makes from now on to the network interface of `address`.

    address: an IP address of this host. NCCL reads the variables once, so this comes before its first group.

    By default gloo takes the address to which the host's name resolves (loopback on many machines, which other hosts
    cannot reach), and NCCL the first interface. The user's own GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and
    NCCL_SOCKET_FAMILY take precedence. Does nothing if no interface has the address.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
            os.environ.setdefault("NCCL_SOCKET_FAMILY", "AF_INET6" if ":" in address else "AF_INET")
            return


def keep_freed_memory() -> bool:
    """Let the allocator keep up to KEPT_BYTES of freed memory instead of returning it to the operating system. Returns
    whether the process has an allocator with this setting; only glibc's has it.

    A step on a CPU frees its tensors and needs as much memory for the next microbatch or token. With glibc's default
    limits, the system took back thousands of pages per step and cleared others for the next tensors.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # This C library has no mallopt.
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES))


def leave_cores_free() -> None:
    """Let idle compute threads of this process sleep, unless the environment chooses otherwise. Must be called before
    torch is imported, whose OpenMP reads the variable once.

    By default such threads wait by spinning. Engines and train workers share cores, with each other and with other
    processes: a thread that spins takes the core from the thread that it waits for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def settle() -> None:
    """Exempt all objects that exist now from garbage collection, after collecting the garbage among them. Most of them
    belong to imported modules. Otherwise each full collection would visit all of them, which stops the process for a
    tenth of a second."""
    gc.collect()
    gc.freeze()
