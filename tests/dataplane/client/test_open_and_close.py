"""A data plane that cannot be opened, is closed, forked away from or killed says so to its clients."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import ClaimTimeout, DirectoryLost
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane
from headrace.tests.waiting import wait_until


def test_open_refuses_what_it_cannot_give(plane: DataPlane) -> None:
    with pytest.raises(ValueError, match="this process has a data plane of that name"):
        small_plane(run_id=plane.handle.run_id)
    with pytest.raises(ValueError, match="run_id"):
        small_plane(run_id="a/b")


def test_a_store_that_cannot_start_says_why(ray_session: None) -> None:
    with (
        small_plane(store="shm", run_id="twice") as plane,
        pytest.raises(ValueError, match="twice"),
    ):
        open_data_plane(plane.handle.config, run_id="twice")


def test_closed_data_plane(plane: DataPlane, client: DataPlaneClient) -> None:
    failed: list[Exception] = []

    def wait() -> None:
        try:
            client.claim("p", "a", ("ids",), 1)
        except DirectoryLost as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: client.status().waiting_claims)
    plane.close()
    plane.close()
    thread.join(5)
    assert "closed" in str(failed[0])
    with pytest.raises(DirectoryLost, match="closed"):
        client.status()
    with pytest.raises(DirectoryLost, match="no such data plane"):
        connect(plane.handle)


@pytest.mark.processes
def test_a_forked_process_is_told_that_the_directory_is_not_its_own(plane: DataPlane, client: DataPlaneClient) -> None:
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            started = time.monotonic()
            for call in (client.status, lambda: connect(plane.handle)):
                with pytest.raises(DirectoryLost, match="forked"):
                    call()
            plane.close()
            assert time.monotonic() - started < 2
            os.write(tell, b"told")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(told, 4) == b"told"
    assert client.status().rows == 0, "the parent's goes on"


def test_directory_in_an_actor_and_its_death(ray_session: None) -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="local", capacity_mib=1), timeout_s=3.0, block_rows=4)
    with open_data_plane(config) as plane, connect(plane.handle, name="test") as client:
        client.register("p", SCHEMA, ("a",))
        receipt = client.put("p", ["a.0", "b.0"], {"ids": ids(2), "note": ["x", "y"]})
        assert client.get(receipt).objects("note") == ["x", "y"]
        with pytest.raises(ClaimTimeout):
            client.claim("p", "a", ("score",), 1, timeout_s=0.1)

        async def twin() -> None:
            async with connect_async(plane.handle) as other:
                assert len(await other.claim("p", "a", ("ids",), 2)) == 2

        asyncio.run(twin())
        pid = int(plane.handle.peer.split("pid=")[1].split()[0])
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        started = time.perf_counter()
        with pytest.raises(DirectoryLost, match=f"pid={pid}.*elapsed") as caught:
            client.claim("p", "a", ("score",), 1)
        assert caught.value.op == "claim" and time.perf_counter() - started < 10
        with pytest.raises(DirectoryLost):
            client.put("p", ["c.0"], {"ids": ids(1)})
