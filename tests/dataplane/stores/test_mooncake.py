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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.integers import ALIGN
from headrace.dataplane.block_store import StoreSpec, Want
from headrace.dataplane.errors import IntegrityError, RowsCleared, StoreLost
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.stores import mooncake_store
from headrace.dataplane.stores.mooncake_client import MasterAddress, MooncakeClient
from headrace.dataplane.stores.mooncake_processes import MooncakeMaster
from headrace.dataplane.stores.mooncake_store import SLACK_BYTES, MooncakeHost, MooncakeStore
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.process_pool import has_ended, kill, suspend

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("mooncake_library")]

SIZES = (100, 0, 300_000, 7, 0)
ALL = tuple(range(len(SIZES)))
NEXT_BLOCK = iter(range(1, 1 << 30))


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


def parts_of(block_id: int, sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    generator = np.random.default_rng(block_id)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def layout_of(sizes: tuple[int, ...]) -> BlockLayout:
    return BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=sizes)


def write(host: MooncakeHost, store: MooncakeStore, sizes: tuple[int, ...] = SIZES) -> Want:
    block_id, layout = next(NEXT_BLOCK), layout_of(sizes)
    location = host.allocate(block_id, layout.nbytes)
    assert location is not None
    location = store.put(block_id, location, parts_of(block_id, sizes), layout.offsets, 10.0)
    return Want(BlockRef(block_id, location, layout), tuple(range(len(sizes))))


def free(host: MooncakeHost, *wants: Want) -> None:
    host.free_many([(want.block.block_id, want.block.location) for want in wants])


def assert_hold(store: MooncakeStore, wants: list[Want]) -> None:
    for want, views in zip(wants, store.get(wants, 10.0), strict=True):
        assert sorted(views) == sorted(want.parts)
        expected = parts_of(want.block.block_id, want.block.layout.part_bytes)
        for part, view in views.items():
            np.testing.assert_array_equal(view, expected[part])
            assert not view.flags.writeable and (view.size == 0 or view.ctypes.data % ALIGN == 0)
    store.settle(wants)


def test_blocks_and_parts_come_back_exact_in_any_order(host: MooncakeHost, store: MooncakeStore) -> None:
    wants = [write(host, store) for _ in range(4)]
    first = wants[-1].block.block_id + 1
    for number in range(3):
        assert next(NEXT_BLOCK) == first + number and host.allocate(first + number, 300_224) == b""
    locations = store.put_many(
        first, [tuple((part,) for part in parts_of(first + number)) for number in range(3)], 10.0
    )
    wants += [Want(BlockRef(first + n, locations[n], layout_of(SIZES)), ALL) for n in range(3)]
    assert_hold(store, wants[::-1])
    one, two, three = (want.block for want in wants[:3])
    assert_hold(store, [wants[2], Want(three, (3,)), wants[2], Want(one, (2, 1)), Want(two, (0, 3)), Want(two, (1, 4))])
    assert store.get([], 10.0) == []
    assert host.usage_bytes() == sum(4 * [one.layout.nbytes] + 3 * [300_224])
    free(host, *wants)
    assert host.usage_bytes() == 0


def test_freed_blocks_are_refused_at_once_and_others_stay(host: MooncakeHost, store: MooncakeStore) -> None:
    wants = [write(host, store) for _ in range(4)]
    held = store.get(wants[1:2], 10.0)
    free(host, wants[1])
    free(host, wants[1])
    for read in (lambda: store.get(wants, 10.0), lambda: store.get([Want(wants[1].block, (1,))], 10.0)):
        started = time.monotonic()
        with pytest.raises(RowsCleared, match=f"/{wants[1].block.block_id} was freed"):
            read()
        assert time.monotonic() - started < 1.0, "no retries for what is gone"
    with pytest.raises(RowsCleared):
        store.settle(wants)
    other = write(host, store)
    np.testing.assert_array_equal(held[0][2], parts_of(wants[1].block.block_id)[2], "a buffer in use is not used again")
    rest = [wants[0], wants[2], wants[3], other]
    assert_hold(store, rest)
    free(host, *rest)


def test_block_that_arrives_after_its_reservation_ended_is_swept(host: MooncakeHost, store: MooncakeStore) -> None:
    block_id, layout = next(NEXT_BLOCK), layout_of(SIZES)
    assert host.allocate(block_id, layout.nbytes) == b""
    host.free(block_id, b"")
    store.put(block_id, b"", parts_of(block_id), layout.offsets, 10.0)
    free(host, write(host, store))
    with pytest.raises(RowsCleared):
        store.get([Want(BlockRef(block_id, b"", layout), (0,))], 10.0)


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
    assert_hold(store, held)
    limit = capacity + capacity // 4 + SLACK_BYTES
    assert host.allocate(1 << 40, limit - host.usage_bytes() + 1) is None
    assert host.allocate(1 << 41, limit - host.usage_bytes()) == b""
    assert host.allocate((1 << 41) + 1, 1) is None
    free(host, *held)
    host.free(1 << 41, b"")
    assert host.usage_bytes() == 0
    store.close()
    host.close()


def test_short_block_in_the_store_is_an_integrity_error(host: MooncakeHost, store: MooncakeStore) -> None:
    want = write(host, store)
    longer = BlockRef(want.block.block_id, want.block.location, layout_of((100, 0, 400_000)))
    with pytest.raises(IntegrityError, match="400000 bytes"):
        store.get([Want(longer, (2,))], 10.0)
    free(host, want)


def test_threads_share_a_store(host: MooncakeHost, store: MooncakeStore) -> None:
    wants, failures = [write(host, store) for _ in range(8)], []

    def read(turn: int) -> None:
        try:
            for _ in range(10):
                turned = wants[turn:] + wants[:turn]
                assert_hold(store, turned)
                block = turned[0].block
                parts, offsets = parts_of(block.block_id), block.layout.offsets
                store.put(block.block_id, b"", parts, offsets, 10.0)  # written before: the first write stays
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    free(host, *wants)


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
        with pytest.raises(StoreLost, match=rf"{name} pid={pid}") as caught:
            store.get(wants[:1], 1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 0.9 < time.monotonic() - started < 2.5 and caught.value.elapsed_s
    assert_hold(store, wants)
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


def test_a_master_that_was_stopped_during_a_clear_is_told_again(
    mooncake_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_store, "FREE_TIMEOUT_S", 0.5)
    host = MooncakeHost(fresh_run_id(), 8 << 20)
    store = MooncakeStore(host.spec)
    wants = [write(host, store) for _ in range(3)]
    pid = int(str(host.spec.address["pid"]))
    suspend(pid)
    try:
        free(host, *wants)
        held = sum(want.block.layout.nbytes for want in wants)
        assert host.unfreed_bytes() == host.usage_bytes() == held and f"pid={pid}" in host.shortage()
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: host.unfreed_bytes() == 0)
    assert host.usage_bytes() == 0 and host.shortage() == ""
    for want in wants:
        with pytest.raises(RowsCleared):
            store.get([want], 10.0)
    assert_hold(store, [later := write(host, store)])
    free(host, later)
    store.close()
    host.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
        spec = StoreSpec("mooncake", run_id, {**address, "protocol": "tcp", "device": ""})
        store = MooncakeStore(spec)
        store.put(1, b"", parts_of(1), layout_of(SIZES).offsets, 10.0)
        want = Want(BlockRef(1, b"", layout_of(SIZES)), ALL)
        assert_hold(store, [want])
        assert "mooncake_master" not in (master / "cmdline").read_text(), "TransferQueue kills what bears that name"
        assert listening_on(int(said[2])) == {"0100007F"}, "loopback, as the kernel writes it"
        owner.kill()
        started = time.monotonic()
        with pytest.raises(StoreLost, match=f"pid={said[2]}"):
            while True:
                store.get([want], 5.0)
        assert time.monotonic() - started < 5.0
        deadline = time.monotonic() + 5
        while not has_ended(int(said[2])) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert has_ended(int(said[2]))
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
