"""Runs a process of the weight benchmark on a host that is made of namespaces. Run as a module, it is the process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..hosts.namespaces import Host
from .peers import Peer, serve

_END_TIMEOUT_S = 20.0


class HostPeer(Peer):
    """The driver's handle to one process of the benchmark on a host."""

    def __init__(self, host: Host, make: Callable[[], Any]) -> None:  # pyright: ignore[reportMissingSuperCall]
        """Start the process on `host`. make: picklable function that makes the served object in the process."""
        self.host = host
        ours, theirs = socket.socketpair()
        with theirs:
            command = host.command(sys.executable, "-m", __name__, str(theirs.fileno()), folder=os.getcwd())
            self._started = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._pipe = Connection(ours.detach())
        self._pipe.send(make)

    @property
    def name(self) -> str:
        """Name of the process in errors."""
        return f"the process on {self.host.name}"

    def close(self) -> None:
        """End the process, or its whole host if it does not end. Idempotent."""
        if not self._pipe.closed:
            if self._started.poll() is None:
                self._pipe.send(("close", ()))
            self._pipe.close()
        try:
            self._started.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.host.kill()
            self._started.wait(_END_TIMEOUT_S)


if __name__ == "__main__":
    driver = Connection(int(sys.argv[1]))
    serve(driver.recv(), driver)
