"""Kills the directory of a data plane while threads write and consume rows."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace import DataPlane, DataPlaneClient, DataPlaneConfig, KVBatchMeta, Schema, connect, open_data_plane
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.errors import ClaimTimeout
from headrace.dataplane.status import DataPlaneStatus

ROWS = 4
"""Number of rows of a put and of a claim."""


def _write(plane: DataPlane, writer: int, num_puts: int, fields_of: Callable[[int], dict[str, Any]]) -> None:
    with connect(plane.handle) as client:
        for number in range(num_puts):
            client.put("p", [f"{writer}-{number}.{row}" for row in range(ROWS)], fields_of(number))


def _wait(enough: Callable[[], bool], bound_s: float) -> None:
    deadline = time.monotonic() + bound_s
    while not enough() and time.monotonic() < deadline:
        time.sleep(0.01)


def rows_over_kills(
    kind: str,
    schema: Schema,
    fields_of: Callable[[int], dict[str, Any]],
    check: Callable[[DataPlaneClient, KVBatchMeta], None],
    num_puts: int,
    most_kills: int,
) -> tuple[list[str], DataPlaneStatus]:
    """Return the keys that two consumers have seen of the rows of two writers, and the status afterwards. No thread may
    fail meanwhile.

    fields_of: fields of a writer's put, by its number. check: checks rows that were claimed.
    """
    config = DataPlaneConfig(store=StoreConfig(kind=kind, capacity_mib=16))  # type: ignore[arg-type]
    seen, done = list[str](), threading.Event()

    def consume(plane: DataPlane) -> None:
        with connect(plane.handle) as client:
            while not done.is_set():
                try:
                    rows = client.claim("p", "a", tuple(schema), ROWS, timeout_s=1.0)
                except ClaimTimeout:
                    continue
                check(client, rows)
                client.release(rows, "a", "done")
                client.clear("p", rows.keys)
                seen.extend(rows.keys)

    with open_data_plane(config, process=True) as plane, ThreadPoolExecutor(4) as pool:
        with connect(plane.handle) as client:
            client.register("p", schema, ("a",))
        writers = [pool.submit(_write, plane, number, num_puts, fields_of) for number in range(2)]
        readers = [pool.submit(consume, plane) for _ in range(2)]
        try:
            kills = 0
            while not all(one.done() for one in writers) and kills < most_kills:
                enough = len(seen) + 20
                os.kill(plane.serving_pid(), signal.SIGKILL)
                kills += 1
                _wait(lambda enough=enough: len(seen) >= enough or all(one.done() for one in writers), 5)
            for writer in writers:
                writer.result(30)
            _wait(lambda: len(seen) >= 2 * num_puts * ROWS or any(one.done() for one in readers), 30)
        finally:
            done.set()
        for reader in readers:
            reader.result(10)
        assert kills
        with connect(plane.handle) as client:
            return seen, client.status()
