"""Runs a process of the benchmark on a host that is made of namespaces. Run as a module, this file is the process.

The driver and the process exchange pickled calls and answers over a socket that the process inherits.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from ...dataplane.config import DataPlaneConfig, StoreConfig
from ...dataplane.factory import DataPlane, open_data_plane
from ...dataplane.handle import DataPlaneHandle
from ..transfer.processes import BenchProcess
from .namespaces import Host

ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 20.0


class HostedProcess(BenchProcess):
    """A process of the benchmark that can also open data planes."""

    def __init__(self) -> None:
        super().__init__()
        self._planes: list[DataPlane] = []

    def open(self, config: DataPlaneConfig, listen: str) -> DataPlaneHandle:
        """Open a data plane, which runs until `close`. listen: address of this host; "" for clients of this host."""
        self._planes.append(open_data_plane(config, process=True, listen=listen))
        return self._planes[-1].handle

    def close(self) -> None:
        """Close all endpoints and data planes. Idempotent."""
        self.leave()
        while self._planes:
            self._planes.pop().close()


class HostProcess:
    """The driver's handle to a `HostedProcess` on a host. As a context manager, it ends the process."""

    def __init__(self, host: Host) -> None:
        self.host = host
        ours, theirs = socket.socketpair()
        with theirs:
            command = host.command(sys.executable, "-m", __name__, str(theirs.fileno()), folder=os.getcwd())
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._pipe = Connection(ours.detach())

    def call(self, method: str, *args: Any) -> Any:
        """Call a method in the process, and return its result. Raises RuntimeError if the method raised an error, if
        the process has ended, or if it does not answer within ANSWER_TIMEOUT_S."""
        name = f"the benchmark's process on {self.host.name}"
        try:
            self._pipe.send((method, args))
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                raise RuntimeError(f"{name} did not answer {method} within {ANSWER_TIMEOUT_S:g} s")
            failed, result = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"{name} ended in {method}") from error
        if failed:
            raise RuntimeError(f"{name}: {method}: {result}")
        return result

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pipe.close()  # The process then ends by itself, unless a call in it hangs.
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.host.kill()
            self._process.wait(END_TIMEOUT_S)


def store_config(kind: str, capacity_mib: int) -> DataPlaneConfig:
    """Return the configuration of a data plane with this store, which checks rows that cross hosts as in a run."""
    return DataPlaneConfig(store=StoreConfig.model_validate({"kind": kind, "capacity_mib": capacity_mib}))


def _serve(pipe: Connection, process: HostedProcess) -> None:
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        run: Callable[..., Any] = getattr(process, method)
        try:
            answer = False, run(*args)
        except Exception as error:  # The driver's call raises it.
            answer = True, f"{type(error).__name__}: {error}"
        pipe.send(answer)


if __name__ == "__main__":
    hosted = HostedProcess()
    try:
        _serve(Connection(int(sys.argv[1])), hosted)
    finally:
        hosted.close()
