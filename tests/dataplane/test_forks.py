"""A forked process and its parent use a client at the same time. Neither waits for the other or harms its rows."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.client.lease_renewal import LeaseRenewal
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.factory import connect, connect_async, open_data_plane
from headrace.testing.data_plane import fresh_run_id

SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32)])
TOKENS = 50_000
LOCK = type(threading.Lock())

pytestmark = pytest.mark.processes


@pytest.fixture(params=["shm", "tcp", "tcp over sockets"])
def client(request: pytest.FixtureRequest) -> Iterator[DataPlaneClient]:
    kind, _, far = request.param.partition(" ")
    config = DataPlaneConfig(store=StoreConfig(kind=kind, capacity_mib=64), timeout_s=20)
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane:
        with connect(plane.handle.over_sockets() if far else plane.handle) as client:
            client.register("p", SCHEMA)
            for number in range(3):  # Then the directory grants space ahead of the next put.
                put(client, f"before{number}", number)
            yield client


def put(client: DataPlaneClient, key: str, value: int) -> None:
    client.put("p", [f"{key}.0"], {"ids": [torch.full((TOKENS,), value, dtype=torch.int32)]})


def forked(act: Callable[[], object]) -> int:
    """Run `act` in a forked process that has 20 s for it. Returns the process's id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads.
        pid = os.fork()
    if not pid:
        code = 1
        try:
            threading.Timer(20, os._exit, [2]).start()
            torch.set_num_threads(1)  # The threads of OpenMP do not exist after a fork, and torch would wait for them.
            act()
            code = 0
        finally:
            os._exit(code)
    return pid


def expect_done(pid: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_does_not_write_to_the_space_of_its_parent(client: DataPlaneClient) -> None:
    child = forked(lambda: [put(client, f"child{number}", 100 + number) for number in range(5)])
    for number in range(5):
        put(client, f"parent{number}", 200 + number)
    expect_done(child)
    put(client, "after", 300)
    expected = {f"child{n}.0": 100 + n for n in range(5)} | {f"parent{n}.0": 200 + n for n in range(5)}
    for key, value in expected.items():
        assert client.get_keys("p", [key], ["ids"]).jagged("ids").values.unique().tolist() == [value], key


def test_a_fork_waits_for_no_lock_of_its_parent(client: DataPlaneClient) -> None:
    held = [lock for one in gc.get_objects() if is_of_client(one) for lock in vars(one).values() if type(lock) is LOCK]
    assert len(held) >= 4
    taken = [lock for lock in held if lock.acquire(blocking=False)]

    def use() -> None:
        put(client, "child", 7)
        assert client.get_keys("p", ["child.0"], ["ids"]).jagged("ids").values.unique().tolist() == [7]

    started = time.monotonic()
    try:
        child = forked(use)
    finally:
        for lock in taken:
            lock.release()
    expect_done(child)
    put(client, "parent", 8)
    assert time.monotonic() - started < 20
    assert client.get_keys("p", ["child.0", "parent.0"], ["ids"]).num_rows == 2


def test_an_async_client_works_in_a_fork(client: DataPlaneClient) -> None:
    async def begin(*names: str) -> None:
        for name in names:
            await other.put("p", [f"{name}.0"], {"ids": [torch.ones(3, dtype=torch.int32)]})

    async def end() -> None:
        await begin("child")
        await other.close()

    other = connect_async(client._operations.handle)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin("one", "two"))  # Then the client has threads that are idle.
    expect_done(forked(lambda: asyncio.run(end())))
    loop.run_until_complete(other.close())
    loop.close()
    assert client.get_keys("p", ["one.0", "two.0", "child.0"], ["ids"]).num_rows == 3


def is_of_client(one: Any) -> bool:
    """Return whether this is an object of a client that has locks. Leases have their own way with forks."""
    module = str(type(one).__module__)
    rooms = ("headrace.dataplane.client", "headrace.dataplane.stores", "headrace.dataplane.rpc")
    return (module.startswith(rooms) or module == "headrace.dataplane.traffic") and (
        hasattr(one, "__dict__") and not isinstance(one, LeaseRenewal) and type(one).__name__ != "_Threads"
    )
