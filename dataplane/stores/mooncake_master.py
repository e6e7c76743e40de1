"""Runs the Mooncake master (metadata server) of one run: a child process with its own ports, ending with its parent."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreLost

START_TIMEOUT_S = 30.0
PORT_ATTEMPTS = 5
"""Maximum number of attempts to start the Mooncake master. Each takes a free port, which another process may take
first."""
HOW_TO_GET_IT = "pip install -e '.[mooncake]' and apt-get install libibverbs1"

# Blocks are pinned and their room is accounted for, so that nothing is to be evicted; a segment's owner is in the
# process that owns the master, so that a late heartbeat (10 s by default) means a busy machine and no death.
OPTIONS = (
    "--eviction_high_watermark_ratio=1.0",
    "--client_ttl=31536000",
    "--enable_metric_reporting=false",
    "--rpc_thread_num=2",
    "--logtostderr=true",
    "--minloglevel=2",
)

# Becomes the master: same pid. The kernel kills it with the thread that started it, even when that one is SIGKILLed.
# The binary's path is in the environment and the command line bears another name, because TransferQueue's
# mooncake bootstrap runs `pkill -f mooncake_master` on the whole host.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(os.environ["HEADRACE_MASTER_BINARY"], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Address and pid of a running Mooncake master."""

    name: str
    pid: int
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def peer(self) -> str:
        """Name of the Mooncake master in error messages, with its pid and address."""
        return f"{self.name} pid={self.pid} {self.endpoint}"


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
            if _wait_for_port(self._process, host, port, started + START_TIMEOUT_S):
                self.address = MasterAddress(name, self._process.pid, host, port)
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
        arguments = [name, f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_host={host}", "--metrics_port=0"]
        command = [name, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *arguments, *self._options]
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
    with socket.create_server((host, 0)) as server:
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
