"""Kills the directory of a data plane while threads write and consume rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from headrace import DataPlane, DataPlaneConfig, Schema, connect, open_data_plane
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.status import DataPlaneStatus

Write = Callable[[DataPlane, int, list[BaseException]], None]
Consume = Callable[[DataPlane, list[str], list[BaseException], threading.Event], None]


def rows_over_kills(
    kind: str, schema: Schema, write: Write, consume: Consume, num_rows: int, most_kills: int
) -> tuple[list[str], DataPlaneStatus]:
    """Return the keys that two consumers have seen of the rows of two writers, and the status afterwards. No thread may
    fail meanwhile. num_rows: number of rows that both write."""
    config = DataPlaneConfig(store=StoreConfig(kind=kind, capacity_mib=16))  # type: ignore[arg-type]
    seen: list[str] = []
    failed: list[BaseException] = []
    done = threading.Event()
    with open_data_plane(config, process=True) as plane:
        with connect(plane.handle) as client:
            client.register("p", schema, ("a",))
        writers = [threading.Thread(target=write, args=(plane, number, failed)) for number in range(2)]
        readers = [threading.Thread(target=consume, args=(plane, seen, failed, done)) for _ in range(2)]
        for thread in writers + readers:
            thread.start()
        kills = 0
        while any(thread.is_alive() for thread in writers) and kills < most_kills:
            before = len(seen)
            os.kill(plane.serving_pid(), signal.SIGKILL)
            kills += 1
            deadline = time.monotonic() + 5
            while len(seen) < before + 20 and any(t.is_alive() for t in writers) and time.monotonic() < deadline:
                time.sleep(0.01)
        for thread in writers:
            thread.join(30)
        deadline = time.monotonic() + 30
        while len(seen) < num_rows and not failed and time.monotonic() < deadline:
            time.sleep(0.01)
        done.set()
        for thread in readers:
            thread.join(10)
        assert not failed and kills
        with connect(plane.handle) as client:
            return seen, client.status()
