"""What a run leaves behind when it is killed, and how it is ended: its processes, and its folders in shared memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable

import psutil

from ...codecs.owned_folder import PREFIX, SHARED_MEMORY, process_start

END_TIMEOUT_S = 10.0
"""In which a killed process has to be gone."""
POLL_S = 0.05


class Family:
    """The processes of a run as they come and go, below its driver and beside it.

    A process is known by its pid and its start time: a pid that another process has got meanwhile is never hit.
    """

    def __init__(self, driver_pid: int, strangers: Iterable[int] = ()) -> None:
        """strangers: pids of what the driver had below it before the run, which is none of the run's; nor is the
        process that asks."""
        self.driver = next(iter(_processes([driver_pid])), None)
        """None: it was gone already."""
        self._strangers = {psutil.Process(), *_processes(strangers)}
        self.members: set[psutil.Process] = set()
        """Those that were seen; some are gone again."""

    def look(self) -> None:
        """Note who is there now. Reads the state of every process of the host: some milliseconds."""
        if self.driver is not None:
            self._note(_below(self.driver))

    def add(self, processes: Iterable[tuple[int, int]]) -> None:
        """Note processes, by pid and `process_start`, that need not be the driver's descendants: actors of a Ray that
        it has joined."""
        self._note(_processes(pid for pid, ticks in processes if process_start(pid) == ticks))

    def kill(self) -> list[str]:
        """Kill all that are left, the driver among them, and what they have started since; returns who they were.

        Waits until they are gone, END_TIMEOUT_S at most.
        """
        self.look()
        if self.driver is not None:
            _kill(self.driver)  # first: it must not start another while the others end
        killed: dict[psutil.Process, str] = {}
        while True:
            for process in list(self.members):
                self._note(_below(process))
            alive = [process for process in self.members - killed.keys() if is_alive(process)]
            if not alive:
                break
            for process in alive:
                killed[process] = _describe(process)
                _kill(process)
        _wait_until_gone([*killed, *([self.driver] if self.driver is not None else [])])
        return list(killed.values())

    def _note(self, processes: Iterable[psutil.Process]) -> None:
        self.members |= {process for process in processes if process != self.driver} - self._strangers


def remove_shared_memory(run_id: str) -> list[str]:
    """What a killed process of the run left behind there; the others have removed their own. Returns the names."""
    assert run_id, "it would match the folders of every run"
    removed = []
    for pattern in (f"{PREFIX}{run_id}*", f".{PREFIX}{run_id}*"):
        for folder in SHARED_MEMORY.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def is_running(pid: int) -> bool:
    """`is_alive` of the process that has the pid now."""
    return any(is_alive(process) for process in _processes([pid]))


def _processes(pids: Iterable[int]) -> set[psutil.Process]:
    """Those of `pids` that are there."""
    found = set()
    for pid in pids:
        try:
            found.add(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # compares start times
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass  # gone by itself, or another user's, which Ray has to end


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    """A zombie counts as gone: its parent may be slow to notice (which is why this is not psutil.wait_procs)."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}"
