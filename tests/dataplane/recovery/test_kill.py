"""The directory's process is killed while clients work, and another one goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import psutil
import pytest
import ray
import torch

from headrace import DataPlane, DataPlaneClient, DataPlaneConfig, KVBatchMeta, connect, connect_async, open_data_plane
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.compact import pack_keys
from headrace.dataplane.config import StoreConfig
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.calls import ClaimRows
from headrace.dataplane.errors import ClaimTimeout, DataPlaneTimeout, DirectoryLost
from headrace.dataplane.rpc.socket_link import SocketLink
from headrace.tests.dataplane.recovery.kills import ROWS, rows_over_kills

pytestmark = pytest.mark.processes

SCHEMA = Schema([Field(name="ids", kind=Kind.PER_SAMPLE, dtype=torch.int32)])
NUM_PUTS = 60


def fields_of(number: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.full((ROWS,), number, dtype=torch.int32)}


def check(client: DataPlaneClient, rows: KVBatchMeta) -> None:
    values = torch.as_tensor(client.get(rows)["ids"])
    assert values.tolist() == [int(key.partition("-")[2].partition(".")[0]) for key in rows.keys]


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_no_row_is_lost_or_seen_twice_when_the_directory_is_killed(kind: str) -> None:
    seen, status = rows_over_kills(kind, SCHEMA, fields_of, check, NUM_PUTS, 4)
    assert (status.rows, status.leases, status.bytes_used) == (0, 0, 0)
    assert len(seen) == len(set(seen)) == 2 * NUM_PUTS * ROWS


def test_a_call_that_waits_goes_on_waiting_over_the_death() -> None:
    with open_data_plane(DataPlaneConfig(), process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(client.claim("p", "a", ("ids",), 1, timeout_s=30.0)))
        waiting.start()
        while not client.status().waiting_claims:
            time.sleep(0.01)
        os.kill(plane.serving_pid(), signal.SIGKILL)
        while not client.status().waiting_claims:
            time.sleep(0.01)
        client.put("p", ["k"], {"ids": torch.zeros(1, dtype=torch.int32)})
        waiting.join(30)
        assert found


@pytest.mark.parametrize("op", ["claim", "lookup"])
def test_the_time_before_the_death_counts_towards_the_limit_of_a_call(op: str) -> None:
    with open_data_plane(DataPlaneConfig(), process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        handle, claim = plane.handle, requests.Claim(ClaimRows("p", "a", ("ids",), 1), 30.0)
        assert handle.address is not None
        link = SocketLink(handle.address, handle.store.key, handle.peer, connect_s=20.0)
        request = claim if op == "claim" else requests.Lookup("p", pack_keys(["k"]), None, 30.0)
        again, payload = requests.repeated(b"client 1 002", op, requests.encode(request), 10.0)
        again, payload = requests.repeated(b"client 1 003", again, payload, 30.0)
        with pytest.raises(ClaimTimeout if op == "claim" else DataPlaneTimeout):
            requests.body_of(link.call(again, payload, 0.0), op, 0.0)
        link.detach()


def test_a_stopped_directory_ends_with_its_keeper() -> None:
    with open_data_plane(DataPlaneConfig(), process=True) as plane:
        serving = psutil.Process(plane.serving_pid())
        serving.suspend()
        os.kill(plane.processes()["directory"], signal.SIGKILL)
        psutil.wait_procs([serving], timeout=20)
        assert not serving.is_running() or serving.status() == psutil.STATUS_ZOMBIE


def test_the_end_of_the_keeper_ends_the_directory() -> None:
    with open_data_plane(DataPlaneConfig(), process=True) as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        os.kill(plane.processes()["directory"], signal.SIGKILL)
        with pytest.raises(DirectoryLost):
            while True:  # The process notices the end of its keeper within milliseconds.
                client.status(timeout_s=5.0)


def test_calls_of_an_event_loop_go_on_over_the_death() -> None:
    async def work(plane: DataPlane) -> None:
        async with connect_async(plane.handle) as client:
            await client.register("p", SCHEMA, ("a",))
            waiting = asyncio.create_task(client.claim("p", "a", ("ids",), 1, timeout_s=30.0))
            while not (await client.status()).waiting_claims:
                await asyncio.sleep(0.01)
            os.kill(plane.serving_pid(), signal.SIGKILL)
            receipt = await client.put("p", ["k"], {"ids": torch.ones(1, dtype=torch.int32)})
            assert (await waiting).keys == receipt.keys
            assert torch.equal(torch.as_tensor((await client.get(receipt))["ids"]), torch.ones(1, dtype=torch.int32))

    with open_data_plane(DataPlaneConfig(), process=True) as plane:
        asyncio.run(work(plane))


@pytest.mark.slow
def test_the_directory_of_a_run_with_ray_is_back_with_its_leases(ray_session: None) -> None:
    with open_data_plane() as plane, connect(plane.handle) as client:
        client.register("p", SCHEMA, ("a",))
        client.put("p", ["k", "l"], {"ids": torch.ones(2, dtype=torch.int32)})
        held = client.claim("p", "a", ("ids",), 1)
        began = time.monotonic()
        os.kill(plane.serving_pid(), signal.SIGKILL)
        assert client.status().leased_rows == 1 and time.monotonic() - began < 5
        client.release(held, "a", "done")
        assert client.claim("p", "a", ("ids",), 1).keys == ("l",)


@pytest.mark.slow
def test_the_directory_of_several_hosts_is_back_with_its_units(ray_session: None) -> None:
    """A unit that is lost before the death stays lost, and one that joined later is still there."""
    config = DataPlaneConfig(store=StoreConfig(capacity_mib=8, num_units=2), timeout_s=20)
    here = ray.get_runtime_context().get_node_id()
    with open_data_plane(config, one_host=False) as plane, connect(plane.handle.over_sockets()) as client:
        client.register("p", SCHEMA, ("a",))
        puts = [client.put("p", [f"{number}.0"], {"ids": torch.ones(1, dtype=torch.int32)}) for number in range(4)]
        assert client.forget_unit(here) == {"p": tuple(put.keys[0] for put in puts)}
        for _ in range(2):
            os.kill(plane.serving_pid(), signal.SIGKILL)
            plane.ensure_unit(here)
            put = client.put("p", ["new.0"], {"ids": torch.ones(1, dtype=torch.int32)}, replace=True)
            assert put.blocks[0].location[:2] == b"\0\2"
        os.kill(plane.serving_pid(), signal.SIGKILL)
        assert torch.as_tensor(client.get(client.claim("p", "a", ("ids",), 1))["ids"]).tolist() == [1]
