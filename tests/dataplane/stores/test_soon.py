"""Blocks that the directory's event loop frees in storage units, without a thread unless a unit does not answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import RowsCleared
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.stores.tcp import soon
from headrace.dataplane.stores.tcp.host import TcpHost
from headrace.testing.data_plane import open_plane
from headrace.tests.waiting import wait_until


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of blocks of each call in which the thread freed some."""
    real, counts = TcpHost.free_many, list[int]()

    def free_many(host: TcpHost, blocks: Any) -> None:
        counts.append(len(blocks))
        real(host, blocks)

    monkeypatch.setattr(TcpHost, "free_many", free_many)
    return counts


@pytest.fixture
def plane(in_thread: list[int]) -> Iterator[DataPlane]:
    with open_plane("tcp", capacity_mib=8, timeout_s=20) as plane:
        yield plane


def cleared(client: DataPlaneClient, name: str) -> None:
    """Put a row and clear it, after which it cannot be read."""
    meta = client.put("p", [name], {"x": torch.zeros(1)})
    client.clear("p", [name])
    with pytest.raises(RowsCleared):
        client.get(meta)


@pytest.mark.processes
def test_a_unit_frees_blocks_without_a_thread(
    plane: DataPlane, in_thread: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(plane.handle) as client:
        client.register("p", Schema([Field("x", Kind.PER_SAMPLE, torch.float32)]))
        cleared(client, "first")
        assert in_thread == [1], "the first free opens the connection"
        cleared(client, "second")
        assert in_thread == [1]
        (link,) = client._link.host._units  # type: ignore[attr-defined]
        link._idle[0].socket.shutdown(2)
        cleared(client, "third")
        assert in_thread == [1, 1], "a connection that has ended is replaced by the thread"
        monkeypatch.setattr(soon, "SOON_S", 0.05)
        pid = plane.processes()["unit-0"]
        meta = client.put("p", ["fourth"], {"x": torch.zeros(1)})
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
        again = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
        again.start()
        try:
            client.clear("p", ["fourth"])
        finally:
            again.join()
        assert in_thread == [1, 1, 1], "a unit that does not answer in time is left to the thread"
        with pytest.raises(RowsCleared):
            client.get(meta)
        status = client.status()
        assert (status.bytes_used, status.bytes_unfreed, status.rows) == (0, 0, 0)
