"""Runs the two processes of a Mooncake store: the master (metadata server), and the one that lends memory to it.

When the master dies, the threads of Mooncake's library in the process that lends memory keep calling the dead master
forever, and disconnecting from it takes 20 s under Python's global interpreter lock. A separate process ends together
with these threads, and the directory's process is not disturbed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import StoreLost
from ..listen_address import listening
from ..security.authenticated_listener import listen
from .mooncake_client import HOW_TO_GET_IT, MasterAddress, MooncakeClient

MASTER_START_TIMEOUT_S = 30.0
PORT_ATTEMPTS = 5
"""Maximum number of attempts to start the Mooncake master. Each attempt picks a free port, which another process may
take first."""

# Blocks are pinned and their space is accounted for, so nothing needs to be evicted. The process that lends the memory
# ends with the master, so a late heartbeat (10 s by default) means a busy machine instead of a death.
OPTIONS = (
    "--eviction_high_watermark_ratio=1.0",
    "--client_ttl=31536000",
    "--enable_metric_reporting=false",
    "--rpc_thread_num=2",
    "--logtostderr=true",
    "--minloglevel=2",
)

# This program becomes the master and keeps its pid. The kernel kills the master when the thread that started it ends,
# even by SIGKILL. The binary's path is in the environment and the command line has another name, because
# TransferQueue's mooncake bootstrap runs `pkill -f mooncake_master` on the whole host.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(os.environ["HEADRACE_MASTER_BINARY"], sys.argv[2:])
"""


class MooncakeMaster:
    """Starts and ends the process of the run's Mooncake master."""

    def __init__(self, run_id: str, host: str, options: tuple[str, ...] = OPTIONS) -> None:
        """host: address on which the Mooncake master listens; loopback for a run on one host.

        Raises ValueError if mooncake is not installed, and StoreLost if the master does not start.
        """
        self._binary = _binary()
        self._options = options
        name = f"headrace-{run_id}-mooncake-master"
        started = time.monotonic()
        for attempt in range(PORT_ATTEMPTS):
            port = _free_port(host)
            self._process, self._log = self._start(name, host, port)
            if _wait_for_port(self._process, host, port, started + MASTER_START_TIMEOUT_S):
                self.address = MasterAddress(name, self._process.pid, host, port, str(listening().ports or ""))
                return
            exited, said = self._process.poll(), self._said()
            self.close()
            if exited is None or attempt == PORT_ATTEMPTS - 1:
                elapsed = time.monotonic() - started
                why = "did not listen in time" if exited is None else f"ended with code {exited}"
                raise StoreLost(f"mooncake master {why}: {said}", op="start", peer=name, elapsed_s=elapsed)

    def close(self) -> None:
        """Kill the process of the Mooncake master, and wait until it has ended. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _start(self, name: str, host: str, port: int) -> tuple[subprocess.Popen[bytes], Any]:
        """Start the Mooncake master from a thread that lives as long as the master does. The kernel kills the master
        when the thread that started it ends (PR_SET_PDEATHSIG). Returns the process and its log file."""
        log = tempfile.TemporaryFile()
        arguments = [name, f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_host={host}"]
        arguments.append(f"--metrics_port={_free_port(host) if listening().ports else 0}")
        # Python looks for its library beside argv[0], or, if that has no folder, above the working folder.
        shown = os.path.join(os.path.dirname(sys.executable), name)
        command = [shown, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *arguments, *self._options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MC_")}
        environment["HEADRACE_MASTER_BINARY"] = str(self._binary)
        started: list[subprocess.Popen[bytes]] = []
        failed: list[BaseException] = []
        ready = threading.Event()

        def live() -> None:
            try:
                process = subprocess.Popen(
                    command,
                    executable=sys.executable,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
            except BaseException as error:
                failed.append(error)
                ready.set()
                return
            started.append(process)
            ready.set()
            process.wait()

        threading.Thread(target=live, name=f"{name}-parent", daemon=True).start()
        ready.wait()
        if failed:
            raise failed[0]
        return started[0], log

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _binary() -> Path:
    """Return the path of the program mooncake_master, without importing the library. Raises ValueError if it is not
    installed."""
    spec = importlib.util.find_spec("mooncake")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        binary = Path(folder) / "mooncake_master"
        if os.access(binary, os.X_OK):
            return binary
    where = f"there is no mooncake_master in {folders[0]}" if folders else "mooncake is not installed"
    raise ValueError(f"dataplane.store.kind='mooncake': {where}; {HOW_TO_GET_IT}")


def _free_port(host: str) -> int:
    with listen(host) as server:
        return server.getsockname()[1]


def _wait_for_port(process: subprocess.Popen[bytes], host: str, port: int, deadline: float) -> bool:
    """Wait until the process accepts connections on the port. Returns False at `deadline`, or as soon as the process
    has ended."""
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return process.poll() is None
        except OSError:
            time.sleep(0.02)
    return False


START_TIMEOUT_S = 60.0


class MooncakeSegment:
    """Starts and ends the process that lends memory to the run's Mooncake master."""

    def __init__(
        self, master: MasterAddress, protocol: str, device: str, nbytes: int, lost: Callable[[], None]
    ) -> None:
        """nbytes: number of bytes to lend. lost: function that is called from a thread if the process ends before
        `close`.

        Raises StoreLost if the process does not start in time, or reports that its Mooncake client could not be
        created.
        """
        arguments = [master.name, master.pid, master.host, master.port, master.ports, protocol, device, nbytes]
        started = time.monotonic()
        told, tell = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(tell), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(tell,),
            )
        finally:
            os.close(tell)
        self.pid = self._process.pid
        self._lost = lost
        self._closed = False
        try:
            with os.fdopen(told) as answers:
                poll = select.poll()  # `select` refuses descriptors above 1023.
                poll.register(answers, select.POLLIN)
                answer = (
                    answers.readline()
                    if poll.poll(START_TIMEOUT_S * 1000)
                    else "the segment's process did not start in time"
                )
            if answer != "ready\n":
                peer, elapsed = f"{master.name} segment pid={self.pid}", time.monotonic() - started
                text = answer.strip() or "the segment's process ended when it started"
                raise StoreLost(text, op="start", peer=peer, elapsed_s=elapsed)
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="mooncake-segment", daemon=True).start()

    def close(self) -> None:
        """Kill the process that lends the memory, and wait until it has ended. Idempotent."""
        self._closed = True
        self._process.kill()
        self._process.wait()

    def _watch(self) -> None:
        self._process.wait()
        if not self._closed:
            self._lost()


def main(
    tell: int, name: str, pid: int, host: str, port: int, ports: str, protocol: str, device: str, nbytes: int
) -> None:
    """Run the process that lends memory to the Mooncake master, until the master ends. The master itself ends with the
    process that started it. tell: file descriptor to which "ready" or an error is written."""
    with os.fdopen(tell, "w") as answers:
        try:
            client = MooncakeClient(MasterAddress(name, pid, host, port, ports), protocol, device, nbytes)
        except Exception as error:  # Any error is reported to the process that waits for an answer.
            answers.write(f"{type(error).__name__}: {error}\n")
            answers.flush()
            os._exit(1)
        answers.write("ready\n")
    client.ended.wait()
    os._exit(0)  # This skips the library's own shutdown.


if __name__ == "__main__":
    main(int(sys.argv[1]), *json.loads(sys.argv[2]))
