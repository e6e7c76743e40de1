"""Runs a command so that everything that it starts ends with it, and with the process that wanted it.

    caller -> relay -> keeper (leads a session; Linux gives it the orphans below it) -> command -> what it starts
      |         |         | the command has ended, SIGTERM, or the relay has died: all that is below is killed
      |         | passes SIGTERM on, waits for the keeper, ends like the command
      | `kept_command` is what it starts, `end_kept` ends it

The relay stands between because Ray kills the direct children of a worker that it ends, and the keeper must outlive
that to do its work. This file is run as a script without the package, in milliseconds, so it imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio

END_S = 10.0
"""Seconds within which the processes that a command has started must be gone."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WANTED = {signal.SIGTERM, signal.SIGCHLD}
_LINUX = sys.platform == "linux"


def kept_command(*command: str) -> list[str]:
    """Return the command line that runs `command` under a keeper. The calling thread must be the one that starts it,
    because Linux ends the relay with that thread. Its process is ended with SIGTERM: a SIGKILL ends it too, but what
    the command has started is then gone a moment later."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


async def end_kept(process: asyncio.subprocess.Process) -> None:
    """End the process of a kept command, and wait until all that it has started is gone. Idempotent."""
    import asyncio  # The script does without it, as its import takes longer than its start.

    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(2 * END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _set(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value)


def _end_with(parent: int, signum: int) -> None:
    """Let Linux send `signum` to this process when its parent ends. Elsewhere the command ends when its input is closed
    and no function runs."""
    _set(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # The parent had already ended.
        os._exit(1)


def _let_go_of_the_output() -> None:
    """The command's ends of its pipes must be the only ones, so that its end is seen there."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _end_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _relay(command: list[str]) -> NoReturn:
    mine = os.getpid()
    keeper = os.fork()
    if not keeper:
        os.setsid()
        _set(_PR_SET_CHILD_SUBREAPER, 1)
        _end_with(mine, signal.SIGTERM)
        _keep(command)
    _let_go_of_the_output()
    while True:
        if signal.sigwait(_WANTED) == signal.SIGTERM:
            os.kill(keeper, signal.SIGTERM)
        pid, status = os.waitpid(keeper, os.WNOHANG)
        if pid:
            _end_like(status)


def _keep(command: list[str]) -> NoReturn:
    mine = os.getpid()
    child = os.fork()
    if not child:
        _end_with(mine, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WANTED)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            sys.stderr.write(f"{command[0]} cannot be run: {error.strerror}\n")
            sys.stderr.flush()
            os._exit(127)
    _let_go_of_the_output()
    ended: int | None = None
    while ended is None and signal.sigwait(_WANTED) == signal.SIGCHLD:
        with contextlib.suppress(ChildProcessError):
            while ended is None and (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended = found[1] if found[0] == child else None
    _end_all_below(mine)
    _end_like(signal.SIGTERM if ended is None else ended)


def _end_all_below(keeper: int) -> None:
    """Kill all descendants. Those whose parents end become children of the keeper, so none is lost on the way."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for pid in _below(keeper):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # None is left.
            return
        time.sleep(0.005)


def _below(root: int) -> list[int]:
    if not _LINUX:
        os.killpg(root, signal.SIGKILL)  # The keeper leads the group, and ends with it.
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:  # It grows while it is read.
        found += children.get(pid, ())
    return found


if __name__ == "__main__":
    # Blocked signals wait for `sigwait`, so none is lost between two looks.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WANTED)
    _end_with(int(sys.argv[1]), signal.SIGKILL)
    _relay(sys.argv[2:])
