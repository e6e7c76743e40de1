"""Starts the watchdog process of a run, reports the run's processes to it, and ends it (the driver's side)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from ...dataplane.handle import DataPlaneHandle
from ...dataplane.security.run_key import packed
from ..cluster.run_actors import RunActors
from ..config.config import ResourcesConfig
from ..supervision import watchdog
from ..supervision.heartbeat import Heartbeat, shared_memory
from ..supervision.stuck_report import Opened, answer_with_stacks, remove_stacks, stop_answering

END_TIMEOUT_S = 10.0
"""Seconds within which the watchdog must exit on request; then it is killed."""

_log = logging.getLogger(__name__)


class RunStuck(RuntimeError):
    """The watchdog has stopped the run. The message gives the stage, its duration and the path of the report."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepSize:
    """Numbers of groups and rows of a step. The watchdog's report compares them with the rows in the data plane."""

    groups: int
    rows_per_group: int


class WatchdogProcess:
    """The driver's side of a run's watchdog process, with the heartbeat that the watchdog reads."""

    def __init__(
        self, resources: ResourcesConfig, folder: Path, size: StepSize, own: Collection[psutil.Process] = ()
    ) -> None:
        """Start the watchdog process, unless `resources.watchdog` is false. own: processes of the run that this process
        has already started."""
        bound_s = resources.stage_timeout_s
        self.heartbeat = Heartbeat(bound_s=bound_s)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._descriptor = -1
        """File descriptor of the shared memory that holds the heartbeat. A watchdog that replaces a dead one needs
        it."""
        self._said: list[dict[str, Any]] = []
        """Messages sent to the watchdog so far. A watchdog that replaces a dead one receives them all."""
        self._reason = b""
        self._before: Any = None
        """Earlier handler of the signal `watchdog.STOP`, which `close` restores."""
        if not resources.watchdog:
            return
        self._descriptor = shared_memory()
        try:
            self.heartbeat = Heartbeat(self._descriptor, bound_s=bound_s)
            self._command = _command(folder, self._descriptor, size, own)
            self._process = _start(self._command, self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise
        answer_with_stacks(folder)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(watchdog.STOP, _stop)

    def opened(self, handle: DataPlaneHandle) -> None:
        """Send the watchdog the address of the started data plane."""
        address = handle.address
        assert address is not None, "a run's directory is an actor"
        key = packed(handle.store.key).hex()
        opened = Opened(handle.run_id, address.local, address.host, address.port, key, handle.peer)
        self.replace_if_dead()
        self._said.append(dataclasses.asdict(opened))
        self._tell(self._said[-1])

    def replace_if_dead(self) -> None:
        """Start a new watchdog process if the current one has died."""
        process = self._process
        if process is None or process.poll() is None or self.reason() is not None:
            return
        _log.warning("the watchdog has died (exit code %s) and is replaced", process.returncode)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._process = _start(self._command, self._descriptor)
        for said in self._said:
            self._tell(said)

    def started(self, actors: RunActors) -> None:
        """Make all actors able to answer requests for stack traces. Must be called after the start of the actors and
        after each replacement of one."""
        if self._process is None:
            return
        # The driver does not wait for these calls, because a train worker runs them only between two other calls. If a
        # process has not run its call, the watchdog's report says that its stacks are missing.
        for handle in actors.handles:
            handle.run(_answer_with_stacks, str(self._folder))

    def reason(self) -> str | None:
        """Return the watchdog's reason for stopping the run, or None if it does not stop the run."""
        if self._process is not None and self._process.stdout is not None:
            self._reason += self._process.stdout.read() or b""
        return self._reason.decode(errors="replace").strip() or None

    def close(self) -> None:
        """End the watchdog and wait until its process has exited. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(json.dumps(watchdog.END).encode() + b"\n", timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(self._descriptor)
        if self._before is not None:
            signal.signal(watchdog.STOP, self._before)
        stop_answering()
        remove_stacks(self._folder)

    def _tell(self, said: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(said).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # The watchdog has died. At the end of the step, `replace_if_dead` starts another, which gets the message.
            pass


@contextmanager
def under_watchdog(
    resources: ResourcesConfig, folder: Path, size: StepSize, own: Collection[psutil.Process] = ()
) -> Iterator[WatchdogProcess]:
    """Context manager that runs a watchdog for the run in `folder`. If the watchdog stops the run, raises RunStuck
    instead of the run's own error. own: processes of the run that this process has already started."""
    under = WatchdogProcess(resources, folder, size, own)
    try:
        yield under
    except BaseException as error:
        reason = under.reason()
        if reason is None:
            raise
        raise RunStuck(reason) from error
    finally:
        under.close()


def _command(folder: Path, descriptor: int, size: StepSize, own: Collection[psutil.Process]) -> list[str]:
    strangers = [child for child in psutil.Process().children(recursive=True) if child not in own]
    options = {
        "strangers": ",".join(str(stranger.pid) for stranger in strangers),
        "margin-s": watchdog.MARGIN_S,
        "grace-s": watchdog.GRACE_S,
        "groups": size.groups,
        "group-size": size.rows_per_group,
    }
    what = ("headrace.trainers.supervision.watchdog", str(descriptor), str(os.getpid()), str(folder))
    return [sys.executable, "-m", *what, *(f"--{name}={value}" for name, value in options.items())]


def _start(command: list[str], descriptor: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
        # Ctrl-C must reach only the driver, and the watchdog must outlive the driver's process group.
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _stop(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _answer_with_stacks(_actor: object, folder: str) -> None:
    """Prepare this actor's process to answer requests for stack traces."""
    answer_with_stacks(folder)
