"""The client for asyncio is a twin of the blocking one; its cancelled and waiting calls take nothing with them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.errors import DataPlaneTimeout, DirectoryLost
from headrace.dataplane.factory import DataPlane, connect_async
from headrace.dataplane.stores.local import LocalHost
from headrace.tests.dataplane.client.local_plane import ids


def test_twins_have_the_same_methods() -> None:
    import inspect

    from headrace.dataplane.client.async_client import AsyncDataPlaneClient

    def methods(of: type) -> dict[str, list[inspect.Parameter]]:
        found = {name: call for name, call in vars(of).items() if inspect.isfunction(call) and name[0] != "_"}
        return {name: list(inspect.signature(call).parameters.values()) for name, call in found.items()}

    assert methods(DataPlaneClient) == methods(AsyncDataPlaneClient)


def test_a_cancelled_put_waits_for_its_bytes_and_takes_everything_back(
    monkeypatch: pytest.MonkeyPatch, plane: DataPlane, client: DataPlaneClient
) -> None:
    moving, go_on = threading.Event(), threading.Event()
    written = LocalHost.write

    def slow(self: LocalHost, block_id: int, parts: object) -> None:
        moving.set()
        assert go_on.wait(5)
        written(self, block_id, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalHost, "write", slow)

    async def cancel() -> None:
        async with connect_async(plane.handle) as twin:
            put = asyncio.create_task(twin.put("p", ["a.0"], {"ids": ids(1)}))
            await asyncio.to_thread(moving.wait, 5)
            put.cancel()
            await asyncio.sleep(0.05)
            assert not put.done(), "the store still reads its bytes"
            put.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await put
            status = await twin.status()
            assert (status.rows, status.bytes_reserved, status.store_bytes) == (0, 0, 0)

    asyncio.run(cancel())


def test_async_calls_do_not_wait_behind_other_threads_of_the_loop(plane: DataPlane, client: DataPlaneClient) -> None:
    receipt = client.put("p", ["a.0"], {"ids": ids(1)})
    go_on = threading.Event()

    async def use() -> None:
        loop = asyncio.get_running_loop()
        hanging = [loop.run_in_executor(None, go_on.wait, 30) for _ in range(64)]  # tools that do not return
        async with connect_async(plane.handle) as twin:
            try:
                assert (await asyncio.wait_for(twin.get(receipt, timeout_s=5), 10)).num_rows == 1
            finally:
                go_on.set()
            await asyncio.gather(*hanging)

    asyncio.run(use())


def test_the_wait_for_a_thread_counts_in_the_time_limit(
    plane: DataPlane, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipt = client.put("p", ["a.0"], {"ids": ids(1)})
    go_on = threading.Event()
    read = LocalHost.read
    monkeypatch.setattr(LocalHost, "read", lambda *arguments: (go_on.wait(30), read(*arguments))[1])

    async def use() -> None:
        async with connect_async(plane.handle) as twin:
            slow = [asyncio.create_task(twin.get(receipt)) for _ in range(twin._threads._max_workers)]
            await asyncio.sleep(0)
            try:
                with pytest.raises(DataPlaneTimeout, match="no thread was free.*op=get"):
                    await asyncio.wait_for(twin.get(receipt, timeout_s=0.1), 10)
                queued = asyncio.create_task(twin.get(receipt, timeout_s=30))
                await asyncio.sleep(0)
                queued.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await queued
            finally:
                go_on.set()
            assert [batch.num_rows for batch in await asyncio.gather(*slow)] == [1] * len(slow)
        with pytest.raises(DirectoryLost, match="closed"):
            await twin.get(receipt)
        await twin.close()

    asyncio.run(use())
