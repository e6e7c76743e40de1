"""Injects faults into the calls of this process as ordered: full disks, slow calls, wrong dates, cut connections."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from headrace.tests.drills.chaos.control import Control, Order

POLL_S = 0.05
SHARED_MEMORY = "/dev/shm/"
SOCKET_PREFIX = b"\0headrace-"
"""Start of the names of the Unix sockets on which directories listen. The zero byte marks an abstract socket."""


class Faults:
    """The fault that the newest order tells this process to inject into its own calls."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._order: Order | None = None
        self._ends = 0.0
        self._struck = False
        self.torn = set[str]()
        """Files of which the current order's full disk has taken a part of a write."""
        self._lock = threading.Lock()
        self._listening = 0
        """Pid of the process that started the thread that looks for orders; 0 before. A forked process must start its
        own."""

    def listen(self) -> None:
        """Start a thread that looks for new orders to this process, unless it is already running."""
        with self._lock:
            if self._listening == os.getpid():
                return
            if not self._listening:  # The directory's process is forked.
                os.register_at_fork(after_in_child=self.listen)
            self._listening = os.getpid()
        threading.Thread(target=self._listen, name="chaos", daemon=True).start()

    def strikes(self, kind: str, path: str = "") -> Order | None:
        """Return the current order if its fault is active and of `kind`, else None. With a `path`, the fault must also
        affect that file. The first time that a fault strikes is noted in the control folder."""
        order = self._order
        if order is None or order.kind != kind or time.monotonic() > self._ends:
            return None
        if path and order.folder and not path.startswith(order.folder):
            return None
        if not self._struck:
            self._struck = True
            self._ends = time.monotonic() + order.lasts_s
            self.control.note(struck=order.number)
        return order

    def delay(self, kind: str, path: str = "") -> None:
        """Sleep for the order's `delay_s` if a slow-call fault of `kind` is active. With a `path`, it must affect that
        file."""
        order = self.strikes(kind, path)
        if order is not None:
            time.sleep(order.delay_s)

    def _listen(self) -> None:
        done, pid = 0, os.getpid()
        while True:
            order = self.control.newest_order(pid)
            if order is not None and order.number != done:
                done = order.number
                self._struck, self._ends = False, time.monotonic() + order.waits_s
                self.torn.clear()
                self._order = order
                if order.kind == "clock":  # The date is wrong whether it is asked for or not.
                    self.strikes("clock")
                if order.kind == "cut":
                    cut = cut_connections(order.ports)
                    if cut:
                        self.control.note(struck=order.number, connections=cut)
            time.sleep(POLL_S)


def cut_connections(ports: tuple[int, ...]) -> int:
    """Shut down all of this process's connections that have an end at one of `ports` or at a directory's Unix socket.
    Returns their number."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            try:
                ends = (connection.getpeername(), connection.getsockname())
                if any(_is_of_data_plane(end, ports) for end in ends):
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
            except OSError:  # listens, or has ended
                continue
    return count


def _is_of_data_plane(address: Any, ports: tuple[int, ...]) -> bool:
    if isinstance(address, bytes):
        return address.startswith(SOCKET_PREFIX)
    return isinstance(address, tuple) and address[1] in ports


# ---------------- Files: everything that Python writes goes through these calls.


class _FaultyFile(io.FileIO):
    """A binary file whose writes are delayed, or fail half done with ENOSPC, while such a fault is active."""

    faults: Faults

    def write(self, data: Any) -> int:
        path = os.path.abspath(os.fsdecode(self.name)) if not isinstance(self.name, int) else ""
        self.faults.delay("slow_checkpoint", path)
        return super().write(_with_room(self.faults, path, data))


def _with_room(faults: Faults, path: str, data: Any) -> Any:
    """Return the part of `data` that the disk takes. A full disk takes half of the first write to a file, and raises
    OSError at the next one, which is what it does at the end of its room."""
    if not faults.strikes("disk", path):
        return data
    half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
    if path in faults.torn or not half:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    faults.torn.add(path)
    return half


def install_file_faults(faults: Faults, folder: str) -> None:
    """Patch the functions that open files, write to them and reserve memory, so that ordered faults affect them.
    Affected are the files below `folder` (the run folder) and the memory in /dev/shm."""
    kind = type("FaultyFile", (_FaultyFile,), {"faults": faults})
    real_open, real_write, real_fallocate = builtins.open, os.write, os.posix_fallocate

    @functools.wraps(real_open)
    def faulty_open(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
        newline: Any = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        writes = any(letter in mode for letter in "wax+")
        if isinstance(file, int) or not writes or not os.path.abspath(os.fsdecode(file)).startswith(folder):
            return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = kind(file, mode.replace("b", "").replace("t", ""), opener=opener)
        if "b" in mode and buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)

    @functools.wraps(real_write)
    def faulty_write(descriptor: int, data: Any, /) -> int:
        path = _path_of(descriptor)
        if path.startswith(folder):
            faults.delay("slow_checkpoint", path)
            data = _with_room(faults, path, data)
        return real_write(descriptor, data)

    @functools.wraps(real_fallocate)
    def faulty_fallocate(descriptor: int, offset: int, length: int, /) -> None:
        if _path_of(descriptor).startswith(SHARED_MEMORY) and faults.strikes("shm"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_fallocate(descriptor, offset, length)

    builtins.open = io.open = faulty_open  # type: ignore[assignment]
    os.write = faulty_write
    os.posix_fallocate = faulty_fallocate


CLOCK_STEP_S = 3600.0
"""Seconds by which a fault `clock` sets the date ahead."""


def install_clock_fault(faults: Faults) -> None:
    """Patch `time.time`, so that it is an hour ahead while such a fault is active. Its beginning and end are steps of
    the clock."""
    real_time = time.time

    @functools.wraps(real_time)
    def stepped_time() -> float:
        return real_time() + (CLOCK_STEP_S if faults.strikes("clock") else 0.0)

    time.time = stepped_time


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def slowed(faults: Faults, call: Callable[..., Any], kind: str = "slow_store") -> Callable[..., Any]:
    """Wrap `call` so that it is delayed while a slow-call fault of `kind` is active."""

    @functools.wraps(call)
    def slow(*arguments: Any, **named: Any) -> Any:
        faults.delay(kind)
        return call(*arguments, **named)

    return slow


# ---------------- A function of a user that leaves something to end.

_started: list[subprocess.Popen[bytes]] = []


def starts_a_process(prompt: Any, response: str, finish_reason: str) -> float:
    """Return 0 as a reward. The first call in a process starts another process, which sleeps for a day in a session of
    its own, as sandboxes and compilers do. It must end with the reward's process."""
    if not _started:
        sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(86400)"]
        _started.append(subprocess.Popen(sleep, start_new_session=True))
    return 0.0
