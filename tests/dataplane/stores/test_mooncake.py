"""Store `mooncake` at its own protocol: blocks in and out, freed and unfinished ones, a full segment, a dead master."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.codecs.integers import ALIGN
from headrace.dataplane.block_store import StoreSpec, Want
from headrace.dataplane.errors import DataPlaneTimeout, StoreLost
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.stores.mooncake_client import MasterAddress, MooncakeClient
from headrace.dataplane.stores.mooncake_processes import MooncakeMaster
from headrace.dataplane.stores.mooncake_store import SLACK_BYTES, MooncakeHost, MooncakeStore
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.stores.written import ALL, NEXT_BLOCK, assert_hold, free, layout_of, parts_of, write
from headrace.tests.process_pool import has_ended, kill, suspend
from headrace.tests.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("mooncake_library")]


@pytest.fixture(scope="module")
def host(mooncake_library: None) -> Iterator[MooncakeHost]:
    host = MooncakeHost(fresh_run_id(), 32 << 20)
    yield host
    assert host.usage_bytes() == 0
    host.close()
    host.close()
    assert not Path(f"/proc/{host.spec.address['pid']}").exists()


@pytest.fixture
def store(host: MooncakeHost) -> Iterator[MooncakeStore]:
    store = MooncakeStore(host.spec)
    yield store
    store.close()
    store.close()


def test_blocks_of_one_put_come_back_exact(host: MooncakeHost, store: MooncakeStore) -> None:
    first = next(NEXT_BLOCK)
    for number in range(3):
        assert (next(NEXT_BLOCK) if number else first) == first + number
        assert host.allocate(first + number, layout_of().nbytes) == b""
    blocks = [tuple((part,) for part in parts_of(first + number)) for number in range(3)]
    locations = store.put_many(first, blocks, 10.0)
    wants = [Want(BlockRef(first + n, locations[n], layout_of()), ALL) for n in range(3)]
    assert_hold(store, *wants[::-1])
    views = [view for found in store.get(wants, 10.0) for view in found.values()]
    assert all(view.size == 0 or view.ctypes.data % ALIGN == 0 for view in views)
    free(host, *wants)
    assert host.usage_bytes() == 0


def test_block_freed_amid_its_put_keeps_its_room_until_the_put_ends(host: MooncakeHost, store: MooncakeStore) -> None:
    block_id = next(NEXT_BLOCK)
    assert host.allocate(block_id, 1 << 20) == b""
    key = f"{host.spec.run_id}/{block_id}"
    library: Any = store._client._store
    assert library.batch_put_session_start([key], [1 << 20]) == [0]
    host.free(block_id, b"")
    assert host.usage_bytes() == 1 << 20, "a writer may still be in it"
    free(host, write(host, store))
    assert host.usage_bytes() == 1 << 20
    assert library.batch_put_session_revoke([key]) == [0]
    free(host, write(host, store))
    assert host.usage_bytes() == 0


def test_segment_has_room_for_all_that_the_account_lets_in(mooncake_library: None) -> None:
    capacity = 8 << 20
    host = MooncakeHost(fresh_run_id(), capacity)
    store = MooncakeStore(host.spec)
    draw, held = random.Random(1), []
    for _ in range(300):
        size = draw.choice([1_000, 40_000, 300_000, 1_500_000])
        while sum(want.block.layout.nbytes for want in held) + size + ALIGN > capacity:
            free(host, held.pop(draw.randrange(len(held))))
        held.append(write(host, store, (64, size)))
    assert_hold(store, *held)
    limit = capacity + capacity // 4 + SLACK_BYTES
    assert host.allocate(1 << 40, limit - host.usage_bytes() + 1) is None
    assert host.allocate(1 << 41, limit - host.usage_bytes()) == b""
    assert host.allocate((1 << 41) + 1, 1) is None
    free(host, *held)
    host.free(1 << 41, b"")
    assert host.usage_bytes() == 0
    store.close()
    host.close()


# ------------------------------------------------------------------ the master


class LongestPause:
    """How long Python threads did not get to run, at most, until `end`."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(0.01):
            now = time.monotonic()
            self._longest_s, before = max(self._longest_s, now - before), now

    def end(self) -> float:
        """Seconds."""
        self._stop.set()
        self._thread.join()
        return self._longest_s


def test_stopped_then_killed_master_is_named_within_the_bound(mooncake_library: None) -> None:
    host = MooncakeHost(fresh_run_id(), 8 << 20)
    store = MooncakeStore(host.spec)
    wants = [write(host, store) for _ in range(2)]
    name, pid = host.spec.address["name"], int(str(host.spec.address["pid"]))
    suspend(pid)
    started = time.monotonic()
    try:
        with pytest.raises(DataPlaneTimeout, match=rf"{name} pid={pid}") as caught:
            store.get(wants[:1], 1.0)  # A short time limit is no sign of a death.
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 0.9 < time.monotonic() - started < 2.5 and caught.value.elapsed_s
    assert_hold(store, *wants)
    frozen = LongestPause()
    kill(pid)
    block = wants[0].block
    for act in (
        lambda: store.get(wants, 20.0),
        lambda: store.settle(wants),
        lambda: store.put(block.block_id, b"", parts_of(block.block_id), block.layout.offsets, 20.0),
    ):
        started = time.monotonic()
        with pytest.raises(StoreLost, match=rf"{name} pid={pid}"):
            act()
        assert time.monotonic() - started < 5.0, "a dead process is noticed, not waited for"
    with pytest.raises(StoreLost, match=str(name)):
        MooncakeStore(host.spec)
    started = time.monotonic()
    free(host, *wants)
    store.close()
    assert time.monotonic() - started < 5.0
    host.close()
    assert time.monotonic() - started < 5.0
    assert frozen.end() < 2.0, "the library held Python's lock"


def test_master_that_goes_while_a_client_connects_is_named(
    mooncake_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client notices the end before it has called the library once."""
    run = MooncakeClient._run

    def run_after_the_end(client: MooncakeClient, op: str, call: Any, timeout_s: float) -> Any:
        assert client.ended.wait(20.0)
        return run(client, op, call, timeout_s)

    monkeypatch.setattr(MooncakeClient, "_run", run_after_the_end)
    with socket.create_server(("127.0.0.1", 0)) as server:
        leaver = threading.Thread(target=lambda: server.accept()[0].close())
        leaver.start()
        with pytest.raises(StoreLost, match="mooncake master is lost.*leaver pid=7 127.0.0.1"):
            MooncakeClient(MasterAddress("leaver", 7, *server.getsockname()), "tcp", "")
        leaver.join(20.0)


@pytest.mark.slow
def test_nobody_calls_a_dead_master_and_the_segment_ends_with_it(mooncake_library: None) -> None:
    host = MooncakeHost(fresh_run_id(), 8 << 20)
    store = MooncakeStore(host.spec)
    free(host, write(host, store))
    address = str(host.spec.address["host"]), int(str(host.spec.address["port"]))
    segment = host.processes()["mooncake segment"]
    assert not has_ended(segment)
    kill(int(str(host.spec.address["pid"])))
    wait_until(lambda: has_ended(segment))
    for client in (host._client, store._client):
        assert client.ended.wait(10) and client._leaving is not None
        client._leaving.join(20)
        assert not client._leaving.is_alive()
    with socket.create_server(address) as server:
        server.settimeout(3.0)
        with pytest.raises(TimeoutError):
            server.accept()
    store.close()
    host.close()


def test_rows_that_went_with_the_segment_are_lost_at_once(mooncake_library: None) -> None:
    host = MooncakeHost(fresh_run_id(), 8 << 20)
    store = MooncakeStore(host.spec)
    want = write(host, store)
    kill(host.processes()["mooncake segment"])
    wait_until(store._client.ended.is_set)
    with pytest.raises(StoreLost, match=str(host.spec.address["name"])):
        store.get([want], 10.0)
    store.close()
    host.close()


def listening_on(pid: int) -> set[str]:
    """Addresses, in hexadecimal, of the TCP sockets that a process listens on."""
    links = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    lines = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}


HOLDER = """
import sys, threading
from headrace.dataplane.stores.mooncake_store import MooncakeHost
hosts = []
starting = threading.Thread(target=lambda: hosts.append(MooncakeHost(sys.argv[1], 8 << 20)))
starting.start()
starting.join()
address = hosts[0].spec.address
print("HOST", address["name"], address["pid"], address["host"], address["port"], flush=True)
sys.stdin.read()
"""


def test_master_ends_with_its_owner_and_not_with_the_thread_that_asked_for_it(mooncake_library: None) -> None:
    run_id = fresh_run_id()
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        said = next(line for line in owner.stdout if line.startswith("HOST ")).split()
        address = {"name": said[1], "pid": int(said[2]), "host": said[3], "port": int(said[4])}
        master = Path("/proc") / said[2]
        spec = StoreSpec("mooncake", run_id, {**address, "ports": "", "protocol": "tcp", "device": ""})
        store = MooncakeStore(spec)
        store.put(1, b"", parts_of(1), layout_of().offsets, 10.0)
        want = Want(BlockRef(1, b"", layout_of()), ALL)
        assert_hold(store, want)
        assert "mooncake_master" not in (master / "cmdline").read_text(), "TransferQueue kills what bears that name"
        assert listening_on(int(said[2])) == {"0100007F"}, "loopback, as the kernel writes it"
        owner.kill()
        started = time.monotonic()
        with pytest.raises(StoreLost, match=f"pid={said[2]}"):
            while True:
                store.get([want], 5.0)
        assert time.monotonic() - started < 5.0
        wait_until(lambda: has_ended(int(said[2])), timeout_s=5)
        store.close()
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


@pytest.mark.slow
def test_stopped_master_delays_a_client_that_joins_for_a_bounded_time(mooncake_library: None) -> None:
    host = MooncakeHost(fresh_run_id(), 1 << 20)
    pid = int(str(host.spec.address["pid"]))
    suspend(pid)
    started = time.monotonic()
    try:
        with pytest.raises(StoreLost, match=f"pid={pid}"):
            MooncakeStore(host.spec)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert time.monotonic() - started < 60
    host.close()


def test_master_that_cannot_start_says_why(mooncake_library: None) -> None:
    with pytest.raises(StoreLost, match=r"ended with code 1: .*no_such_option"):
        MooncakeMaster(fresh_run_id(), "127.0.0.1", ("--no_such_option=1",))


# ------------------------------------------------------------------ settings


def test_settings_of_the_shell_do_not_change_the_transport(
    host: MooncakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_STORE_MEMCPY", "1")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with caplog.at_level("INFO", "headrace.dataplane.stores.mooncake_client"):
        MooncakeStore(host.spec).close()
    assert os.environ["MC_STORE_MEMCPY"] == "0" and "MC_FORCE_TCP" not in os.environ
    assert "tcp, 0 bytes lent" in caplog.text


def test_rdma_is_refused_where_there_is_none(mooncake_library: None) -> None:
    with pytest.raises(ValueError, match=r"protocol='rdma' device='no_such_device'.*use protocol: tcp"):
        MooncakeHost(fresh_run_id(), 1 << 20, protocol="rdma", device="no_such_device")
    with pytest.raises(ValueError, match=r"device: got 'mlx5_0' with protocol 'tcp'"):
        MooncakeHost(fresh_run_id(), 1 << 20, device="mlx5_0")
