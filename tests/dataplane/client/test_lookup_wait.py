"""Lookups that wait for rows and fields."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.dataplane.client.async_client import AsyncDataPlaneClient
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.service import DirectoryService
from headrace.dataplane.errors import DataPlaneTimeout, KeysNotFound, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.stores.local import LocalHost
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids
from headrace.tests.dataplane.rpc.served import Served


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Starts `call` in a thread; what it returns or raises is appended to the list."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_a_lookup_waits_until_all_rows_and_fields_are_there(client: DataPlaneClient, plane: DataPlane) -> None:
    keys = ["a.0", "b.0", "a.0"]
    twin = connect(plane.handle)
    both, with_both = in_thread(lambda: twin.lookup("p", keys, ["ids", "score"], wait=True))
    any_field, with_any = in_thread(lambda: twin.lookup("p", keys, wait=True))
    client.put("p", ["b.0"], {"score": torch.zeros(1)})
    client.put("p", ["a.0"], {"ids": ids(1)})
    client.put("p", ["b.0"], {"ids": ids(1)})
    any_field.join(5)
    assert with_any[0].keys == tuple(keys) and with_any[0].fields == ("ids",)
    assert not with_both
    client.put("p", ["a.0"], {"score": torch.ones(1)})
    both.join(5)
    assert client.get(with_both[0]).tensor("score").tolist() == [1, 0, 1]


def test_a_lookup_that_need_not_wait_does_not(client: DataPlaneClient) -> None:
    client.put("p", ["a.0"], {"ids": ids(1)})
    assert client.lookup("p", ["a.0"], ["ids"], wait=True, timeout_s=0).keys == ("a.0",)
    with pytest.raises(KeysNotFound):
        client.lookup("p", ["b.0"])


def test_a_lookup_out_of_time_names_what_is_missing(client: DataPlaneClient) -> None:
    client.put("p", ["a.0", "a.1", "b.0"], {"ids": ids(3)})
    client.put("p", ["a.1"], {"score": torch.zeros(1)})
    words = r"waited for 4 keys; 1 were never put, 2 lack field 'score' \(\['a.0', 'b.0'\]\) .*'c.0'.*elapsed=0.01s"
    with pytest.raises(DataPlaneTimeout, match=words):
        client.lookup("p", ["a.0", "a.1", "b.0", "c.0"], ["ids", "score"], wait=True, timeout_s=0.01)
    client.put("p", ["b.1"], {"score": torch.zeros(1)})
    with pytest.raises(DataPlaneTimeout, match="no field is written for all of them"):
        client.lookup("p", ["a.0", "b.1"], wait=True, timeout_s=0.01)


def test_a_wait_that_cannot_end_is_refused_or_ended(client: DataPlaneClient, plane: DataPlane) -> None:
    with pytest.raises(SchemaMismatch, match="fields .'scores'."):
        client.lookup("p", ["a.0"], ["scores"], wait=True)
    waiting, results = in_thread(lambda: connect(plane.handle).lookup("p", ["a.0"], wait=True))
    while not client._link._service._ready_pulse("p")._waiters:  # type: ignore[attr-defined]
        time.sleep(0.005)
    client.unregister("p")
    waiting.join(5)
    assert "'p': not registered" in str(results[0])


def test_a_cancelled_lookup_leaves_nothing(plane: DataPlane, client: DataPlaneClient) -> None:
    async def cancel() -> None:
        async with connect_async(plane.handle) as twin:
            waiting = asyncio.create_task(twin.lookup("p", ["a.0"], wait=True))
            await asyncio.sleep(0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await twin.put("p", ["a.0"], {"ids": ids(1)})

    asyncio.run(cancel())
    assert not client._link._service._ready["p"]._waiters  # type: ignore[attr-defined]


def test_lookups_over_sockets_that_are_cancelled_wait_no_more() -> None:
    served = Served()
    waiters = served.service._ready_pulse("p")._waiters

    async def cancel(twin: AsyncDataPlaneClient) -> None:
        waiting = asyncio.create_task(twin.lookup("p", ["a.0"], ["ids"], wait=True))
        while not waiters:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not waiters, "the directory heard of it before the caller continued"

    async def use() -> None:
        async with connect_async(served.handle) as twin:
            await twin.register("p", SCHEMA)
            await cancel(twin)
            waiting = asyncio.create_task(twin.lookup("p", ["a.0"], ["ids"], wait=True))
            await twin.put("p", ["a.0"], {"ids": ids(1)})
            assert (await waiting).keys == ("a.0",)

    try:
        asyncio.run(use())
    finally:
        served.close()


def test_waits_are_forgotten_when_they_end() -> None:
    """Also while nothing is put, as for a reader that waits in slices of time."""

    async def wait_in_vain() -> tuple[bytes, int]:
        service = DirectoryService(DataPlaneConfig(store=StoreConfig(kind="local")), LocalHost("run"))
        await service.call("register", requests.encode(requests.Register("p", SCHEMA, (), 1)))
        reply = await service.call("lookup", requests.encode(requests.Lookup("p", b"ta.0", None, 0.01)))
        return reply, len(service._ready["p"]._waiters)

    reply, left = asyncio.run(wait_in_vain())
    assert left == 0
    with pytest.raises(DataPlaneTimeout, match="1 were never put"):
        KVBatchMeta.from_bytes(requests.body_of(reply, "lookup", 0.0))
