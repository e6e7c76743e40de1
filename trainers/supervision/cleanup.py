"""Finds and kills the processes of a run, and removes the run's folders in shared memory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable

import psutil

from ...dataplane.owned_folder import PREFIX, SHARED_MEMORY, process_start

END_TIMEOUT_S = 10.0
"""Seconds to wait for the end of killed processes."""
POLL_S = 0.05


class Family:
    """The processes of a run: its driver, the driver's descendants, and its actors in a joined Ray cluster. A process
    is identified by pid and start time, so that a new process with a reused pid is never killed.
    """

    def __init__(self, driver_pid: int, strangers: Iterable[int] = ()) -> None:
        """Start with an empty family. `strangers` are the pids of descendants that the driver had before the run
        started; they never become members, and neither does the calling process."""
        self.driver = next(iter(_processes([driver_pid])), None)
        """The driver's process; None when it was already gone."""
        self._strangers = {psutil.Process(), *_processes(strangers)}
        self.members: set[psutil.Process] = set()
        """Processes of the run that have been seen so far, without the driver. Some of them may have ended."""

    def look(self) -> None:
        """Add the driver's current descendants. This takes some milliseconds, because it reads the state of all
        processes."""
        if self.driver is not None:
            self._note(_below(self.driver))

    def add(self, processes: Iterable[tuple[int, int]]) -> None:
        """Add processes, given as (pid, `process_start`), which can be other processes than the driver's descendants.
        An example is an actor in a joined Ray cluster."""
        self._note(_processes(pid for pid, ticks in processes if process_start(pid) == ticks))

    def kill(self) -> list[str]:
        """Kill the driver, all live members, and all processes that they have started since. Returns the members'
        names. Waits until all of them have ended, for END_TIMEOUT_S seconds at most.
        """
        self.look()
        if self.driver is not None:
            # The driver is killed first, so that it cannot start another process while the others end.
            kill_process(self.driver)
        killed: dict[psutil.Process, str] = {}
        while True:
            for process in list(self.members):
                self._note(_below(process))
            alive = [process for process in self.members - killed.keys() if is_alive(process)]
            if not alive:
                break
            for process in alive:
                killed[process] = _describe(process)
                kill_process(process)
        gone = [*killed, *([self.driver] if self.driver is not None else [])]
        # Unlike in psutil.wait_procs, a zombie counts as ended, because its parent can be slow to reap it.
        _wait(lambda: any(map(is_alive, gone)), END_TIMEOUT_S)
        return list(killed.values())

    def _note(self, processes: Iterable[psutil.Process]) -> None:
        self.members |= {process for process in processes if process != self.driver} - self._strangers


def remove_shared_memory(run_id: str) -> list[str]:
    """Remove the shared-memory folders of the run's killed processes. Returns the folders' names."""
    assert run_id, "it would match the folders of every run"
    removed = []
    for pattern in (f"{PREFIX}{run_id}*", f".{PREFIX}{run_id}*"):
        for folder in SHARED_MEMORY.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def is_running(pid: int) -> bool:
    """Return whether a process with this pid is alive now."""
    return any(is_alive(process) for process in _processes([pid]))


def wait_until_ended(processes: Callable[[], Iterable[tuple[int, int | None]]], timeout_s: float) -> bool:
    """Wait until none of the processes that `processes` returns is alive, for `timeout_s` seconds at most. Returns
    whether all have ended. They are given as (pid, `process_start`); None stands for a process that had ended."""
    return _wait(
        lambda: any(start is not None and process_start(pid) == start for pid, start in processes()), timeout_s
    )


def _processes(pids: Iterable[int]) -> set[psutil.Process]:
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
    """Return whether the process runs. A zombie counts as running until its last thread has ended, because it keeps its
    files and its GPU memory until then."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def kill_process(process: psutil.Process) -> None:
    """Kill a process, unless it has ended or belongs to another user.

    psutil compares start times before it sends a signal, except if it has already seen the end of the process: it then
    signals whichever process has that pid now. This function therefore skips processes that do not run.
    """
    try:
        if process.is_running():
            process.kill()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass  # The process has ended, or belongs to another user, so that only Ray can end it.


def _wait(alive: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `alive` returns False, for `timeout_s` seconds at most. Returns False if the time is over first."""
    deadline = time.monotonic() + timeout_s
    while alive():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.name()} (pid {process.pid})"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}"
