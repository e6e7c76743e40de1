"""Blocks that the directory's event loop frees in storage units, without a thread unless a unit does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import RowsCleared
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.rpc.frames import frame
from headrace.dataplane.security.handshake import new_key
from headrace.dataplane.security.run_key import RunKey
from headrace.dataplane.security.tls import secured, wrapped
from headrace.dataplane.stores.tcp import soon
from headrace.dataplane.stores.tcp.host import TcpHost
from headrace.dataplane.stores.tcp.wire import DONE, Connection
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


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def plane(request: pytest.FixtureRequest, in_thread: list[int], tmp_path: Path) -> Iterator[DataPlane]:
    encrypted = {"key_file": str(tmp_path / "key"), "tls": True} if request.param else {}
    with open_plane("tcp", capacity_mib=8, timeout_s=20, **encrypted) as plane:
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


@pytest.mark.parametrize("tls", [False, True])
def test_a_reply_in_pieces_is_not_waited_for(tls: bool) -> None:
    """The socket under TLS is not readable any more once a piece has been decrypted."""
    key = RunKey.make(new_key(), "", "run", tls=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        if tls:
            server = wrapped(far, key, server=True)
            shown = thread.submit(server.do_handshake)
            near = secured(near, key, "storage unit", time.monotonic() + 10)
            shown.result(10)
            far = server
        text = b"blocks"
        payload = len(text).to_bytes(4, "little") + text
        reply = frame(7, payload, DONE)
        with contextlib.closing(Connection(near)) as connection, far:
            connection.number = 7
            for at in range(0, len(reply), 9):
                assert not connection.has_message()
                far.sendall(reply[at : at + 9])
                upto = min(at + 9, len(reply))
                wait_until(lambda upto=upto: connection.has_message() or connection._end == upto)
            assert connection.receive(0.0, reply=True) == (DONE, text, 0)
            far.close()
            wait_until(connection.has_message)
            assert connection.receive(time.monotonic() + 5) is None
