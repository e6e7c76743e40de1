"""Baseline: TransferQueue's key-value API on its MooncakeStore, over TCP, with a mooncake master of our own.

TransferQueue's own bootstrap (`auto_init`) ends every mooncake_master of the host, so it stays off.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from .transferqueue import TransferQueueContender

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
SEGMENT_BYTES = 2 << 30
BUFFER_BYTES = 1 << 30


class MooncakeContender(TransferQueueContender):
    """TransferQueue on MooncakeStore; ends its master too."""

    def __init__(self, name: str, backend: dict[str, Any], master: Master) -> None:
        self._master = master
        try:
            super().__init__(name, backend)
        except BaseException:
            master.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._master.close()


def open_transferqueue_mooncake(name: str) -> MooncakeContender:
    """Raises FileNotFoundError without mooncake's binaries, RuntimeError when the master does not start."""
    master = Master()
    section = {
        "auto_init": False,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{master.port}",
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": SEGMENT_BYTES,
        "local_buffer_size": BUFFER_BYTES,
    }
    return MooncakeContender(name, {"storage_backend": "MooncakeStore", "MooncakeStore": section}, master)


class Master:
    """A mooncake master on free ports of loopback. A copy of another name, lest another's pkill end it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-bench-")
        binary = Path(self._folder.name) / "bench_store_master"
        shutil.copy(_binary(), binary)
        binary.chmod(0o700)
        self.port, metrics = _free_ports(2)
        command = [str(binary), f"--rpc_port={self.port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"]
        self._log = open(Path(self._folder.name) / "log", "wb")  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _listens(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                told = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-1:]
                self.close()
                raise RuntimeError(f"mooncake's master did not start: {told}")
            time.sleep(0.05)

    def close(self) -> None:
        """End it by pid. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)
        self._log.close()
        self._folder.cleanup()


def _binary() -> Path:
    """The wheel's own program, wherever its package lies."""
    import mooncake  # type: ignore[import-not-found]

    folders = [Path(folder) for folder in mooncake.__path__]
    found = next((path for folder in folders if (path := folder / "mooncake_master").is_file()), None)
    if found is None:
        raise FileNotFoundError(f"no mooncake_master in {', '.join(map(str, folders))}")
    return found


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in held]
    for listener in held:
        listener.close()
    return ports


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True
