"""Lends a run's memory to its Mooncake master (metadata server) from a separate process that ends with the master.

If a process lends memory and the master dies, the threads of Mooncake's library keep calling the dead master for ever,
and disconnecting from it takes 20 s under Python's global interpreter lock. In a separate process these threads end
with the process, and the directory's process is not disturbed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from ..errors import StoreLost
from .mooncake_client import MooncakeClient
from .mooncake_master import MasterAddress

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
        arguments = [master.name, master.pid, master.host, master.port, protocol, device, nbytes]
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
                ready, _, _ = select.select([answers], [], [], START_TIMEOUT_S)
                answer = answers.readline() if ready else "the segment's process did not start in time"
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


def main(tell: int, name: str, pid: int, host: str, port: int, protocol: str, device: str, nbytes: int) -> None:
    """Run the process that lends memory to the Mooncake master, until the master ends. The master itself ends with the
    process that started it. tell: file descriptor to which "ready" or an error is written."""
    with os.fdopen(tell, "w") as answers:
        try:
            client = MooncakeClient(MasterAddress(name, pid, host, port), protocol, device, nbytes)
        except Exception as error:  # told to the process that waits, whatever it is
            answers.write(f"{type(error).__name__}: {error}\n")
            answers.flush()
            os._exit(1)
        answers.write("ready\n")
    client.ended.wait()
    os._exit(0)  # without the library's goodbye


if __name__ == "__main__":
    main(int(sys.argv[1]), *json.loads(sys.argv[2]))
