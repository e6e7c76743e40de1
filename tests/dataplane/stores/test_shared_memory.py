"""The pool behind store `shm`: ranges, generations, writers that come late, folders of dead runs."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import Want
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import CapacityExceeded, RowsCleared, StoreLost
from headrace.dataplane.factory import connect, open_data_plane
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.owned_folder import process_start, remove_stale_folders
from headrace.dataplane.store_choice import build_store_host, check_store
from headrace.dataplane.stores import shared_memory
from headrace.dataplane.stores.shared_memory import SharedMemoryHost, SharedMemoryStore, pool_bytes
from headrace.dataplane.stores.shm_folder import PIECE_BYTES, WRITER_PID, FreeRanges, free_memory
from headrace.testing.data_plane import fresh_run_id, open_plane
from headrace.tests.dataplane.stores.written import assert_hold, layout_of, parts_of, write

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[SharedMemoryHost]:
    host = SharedMemoryHost(fresh_run_id(), 64 * MIB)
    yield host
    host.close()


def test_free_ranges_against_a_byte_map() -> None:
    generator = random.Random(0)
    ranges, owner, held = FreeRanges(1000), [0] * 1000, {}
    for step in range(1, 3000):
        if generator.random() < 0.55:
            nbytes = generator.randint(1, 90)
            offset = ranges.take(nbytes)
            fits = any(not any(owner[start : start + nbytes]) for start in range(1000 - nbytes + 1))
            assert (offset is not None) == fits
            if offset is not None:
                assert not any(owner[offset : offset + nbytes])
                owner[offset : offset + nbytes] = [step] * nbytes
                held[step] = (offset, nbytes)
        elif held:
            offset, nbytes = held.pop(generator.choice(list(held)))
            owner[offset : offset + nbytes] = [0] * nbytes
            ranges.give(offset, nbytes)
        assert ranges.free_bytes == owner.count(0)
    for offset, nbytes in held.values():
        ranges.give(offset, nbytes)
    assert ranges.unused and ranges.take(1000) == 0


def test_views_are_read_only_aligned_and_exact(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    wants = [write(host, store, (100, 0, 5000, 1), block_id) for block_id in range(20)]
    for want in reversed(wants):
        assert_hold(store, want)
    (views,) = store.get([wants[0]], 1.0)
    assert all(view.ctypes.data % 64 == 0 for part, view in views.items())
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 1
    assert host.usage_bytes() == 20 * wants[0].block.layout.nbytes


def test_freed_block_is_never_served_nor_its_range_mistaken_for_it(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    old = write(host, store, (4096,), 0)
    store.get([old], 1.0)
    host.free(0, old.block.location)
    host.free(0, old.block.location)
    with pytest.raises(RowsCleared, match="block 0"):
        store.settle([old])
    new = write(host, store, (4096,), 1)
    assert old.block.location == new.block.location, "the range is reused, else this tests nothing"
    with pytest.raises(RowsCleared, match="block 0"):
        store.get([old], 1.0)
    with pytest.raises(RowsCleared, match="block 0"):
        store.put(0, old.block.location, parts_of(0, (4096,)), (0,), 1.0)
    assert_hold(store, new)


def test_pool_is_bounded_reused_and_takes_blocks_larger_than_a_segment(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    for round_number in range(3):
        small = [host.allocate(round_number * 1000 + n, MIB) for n in range(88)]
        assert all(small)
        assert host.allocate(99_999, MIB) is None, "capacity, an eighth of it and 16 MiB"
        for n, location in enumerate(small):
            host.free(round_number * 1000 + n, location or b"")
    assert host.usage_bytes() == 0
    large = write(host, store, (40 * MIB,), 5000)  # in the place of small ones
    assert_hold(store, large)
    assert memory_of(host) <= pool_bytes(64 * MIB) == 88 * MIB


def memory_of(host: SharedMemoryHost) -> int:
    """Bytes of memory that the pool takes now."""
    return 512 * (Path(str(host.spec.address["folder"])) / "pool").stat().st_blocks


@pytest.mark.parametrize("size", [8.01, 5.4, 9, 17, 33, 4.1, 0.3])
def test_blocks_of_any_one_size_fill_the_whole_capacity(host: SharedMemoryHost, size: float) -> None:
    nbytes = int(size * MIB)
    count = 64 * MIB // nbytes
    for round_number in range(2):
        locations = [host.allocate(round_number * 1000 + number, nbytes) for number in range(count)]
        assert None not in locations
        assert memory_of(host) <= 64 * MIB + PIECE_BYTES
        for number, location in enumerate(locations):
            host.free(round_number * 1000 + number, location or b"")


def test_readers_and_writers_meet_ranges_across_pieces_and_in_a_pool_that_has_grown(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    wants = [write(host, store, (PIECE_BYTES * 2 // 3, 77), block_id) for block_id in range(4)]
    late = SharedMemoryStore(host.spec)
    wants += [write(host, store, (PIECE_BYTES * 3 // 2,), block_id) for block_id in range(4, 7)]
    for want in wants:
        assert_hold(late, want)
        assert_hold(store, want)


@pytest.mark.long
def test_an_empty_part_may_lie_at_the_very_end_of_the_pool(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    assert_hold(store, write(host, store, (pool_bytes(64 * MIB), 0), 0))


def test_a_store_that_has_no_room_says_why(host: SharedMemoryHost, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [host.allocate(number, MIB) for number in range(88)]
    for number in range(0, 88, 2):
        host.free(number, held[number] or b"")
    assert host.allocate(1000, 2 * MIB) is None
    assert host.shortage() == f"the largest free range has {MIB} of {44 * MIB} free bytes"

    def no_more(pid: int) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    host._slots[1:89, WRITER_PID] = os.getpid()
    for number in range(1, 88, 2):
        monkeypatch.setattr(shared_memory, "process_start", no_more)
        host.free(number, held[number] or b"")
        assert host.unfreed_bytes() == MIB * (number + 1) // 2, "a writer that cannot be looked up may be alive"
    assert host.shortage() == f"unfinished writers still use {44 * MIB} bytes of cleared blocks"
    monkeypatch.setattr(shared_memory, "process_start", lambda pid: None)
    assert host.unfreed_bytes() == host.usage_bytes() == 0, "no range is lost"
    assert host.allocate(1000, 88 * MIB) is not None


@pytest.mark.long
def test_an_error_names_what_a_put_waited_for() -> None:
    rows = {"x": torch.ones(4, MIB, dtype=torch.uint8)}
    schema = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (MIB,))])
    with open_plane("shm", timeout_s=0.2) as plane, connect(plane.handle) as client:
        client.register("t", schema)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "reserve_memory", _full)
            why = r"0 in use .*; /dev/shm has \d+ bytes free, \d+ are needed: No space"
            with pytest.raises(CapacityExceeded, match=why):
                client.put("t", [f"k.{n}" for n in range(4)], rows)
        client.put("t", [f"k.{n}" for n in range(4)], rows)
        failures = []

        def large() -> None:
            try:
                client.put("t", [f"l.{n}" for n in range(62)], {"x": rows["x"][:1].expand(62, MIB)}, timeout_s=1.0)
            except CapacityExceeded as error:
                failures.append(str(error))

        waiting = threading.Thread(target=large)
        waiting.start()
        while not client.status().waiting_puts:
            assert waiting.is_alive()
        with pytest.raises(CapacityExceeded, match=r", behind 1 put that waits for 650\d+ bytes for client pid=\d+"):
            client.put("t", ["s.0"], {"x": rows["x"][:1]})
        waiting.join()
        assert len(failures) == 1 and failures[0].startswith("no room for 650")


def test_a_put_is_woken_by_the_end_of_a_writer_in_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (48 * MIB,))])
    rows = {"x": torch.ones(1, 48 * MIB, dtype=torch.uint8)}
    with open_plane("shm", timeout_s=20) as plane:
        with connect(plane.handle) as client, connect(plane.handle) as other:
            client.register("t", schema)
            client.put("t", ["a.0"], rows)
            alive = True
            monkeypatch.setattr(SharedMemoryHost, "_writer_lives", lambda host, slot: alive)
            client.clear("t")
            assert client.status().bytes_unfreed > 48 * MIB and client.status().bytes_used == 0
            waiting = threading.Thread(target=lambda: client.put("t", ["b.0"], rows))
            waiting.start()
            while not other.status().waiting_puts:
                assert waiting.is_alive()
            alive = False  # the directory does not hear of it
            waiting.join(10)
            assert not waiting.is_alive() and other.status().rows == 1


def test_a_put_goes_on_when_other_programs_have_freed_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (MIB,))])
    with open_plane("shm", timeout_s=20) as plane, connect(plane.handle) as client:
        client.register("t", schema)
        refused = threading.Semaphore(0)
        real = shared_memory.reserve_memory

        def full(path: Path, offset: int, nbytes: int) -> None:
            refused.release()
            _full(path, offset, nbytes)

        monkeypatch.setattr(shared_memory, "reserve_memory", full)
        rows = {"x": torch.ones(1, MIB, dtype=torch.uint8)}
        waiting = threading.Thread(target=lambda: client.put("t", ["a.0"], rows))
        waiting.start()
        assert refused.acquire(timeout=10) and refused.acquire(timeout=10), "it is tried twice before it waits"
        monkeypatch.setattr(shared_memory, "reserve_memory", real)  # the directory does not hear of it
        waiting.join(10)
        assert not waiting.is_alive() and client.status().rows == 1


def _full(path: Path, offset: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_room_in_the_file_system_is_none_and_no_crash(
    host: SharedMemoryHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "reserve_memory", _full)
    assert host.allocate(0, 1000) is None
    monkeypatch.undo()
    assert host.allocate(0, 1000) is not None


def test_range_under_a_late_writer_waits_until_the_writer_is_out(
    host: SharedMemoryHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedMemoryStore(host.spec)
    location = host.allocate(0, 4096)
    assert location is not None
    inside, go_on, failures = threading.Event(), threading.Event(), []
    copy = np.copyto

    def slow(target: np.ndarray, source: np.ndarray) -> None:
        inside.set()
        assert go_on.wait(10)
        copy(target, source)

    def late_put() -> None:
        try:
            store.put(0, location, parts_of(0, (4096,)), (0,), 1.0)
        except RowsCleared as error:
            failures.append(error)

    monkeypatch.setattr(shared_memory.np, "copyto", slow)
    writer = threading.Thread(target=late_put)
    writer.start()
    assert inside.wait(10)
    monkeypatch.undo()
    host.free(0, location)  # its reservation ended
    other = write(host, store, (4096,), 1)
    assert other.block.location != location and host.usage_bytes() == 8192
    go_on.set()
    writer.join(10)
    assert len(failures) == 1, "a put whose block was freed must not report success"
    assert_hold(store, other)
    third = write(host, store, (4096,), 2)
    assert third.block.location == location, "the range is back"
    assert host.usage_bytes() == 8192


def test_a_writer_whose_block_goes_before_its_mark_is_seen_writes_nothing(
    host: SharedMemoryHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host frees the block and gives its range away between the writer's first look and its mark."""
    store, other, sizes = SharedMemoryStore(host.spec), SharedMemoryStore(host.spec), (4096,)
    write(host, other, sizes, 7)  # so that it knows its own process
    location = host.allocate(0, 4096)
    assert location is not None
    found = []

    def gone(pid: int) -> int | None:
        if not found:
            found.append(None)
            host.free(0, location)
            found[0] = write(host, other, sizes, 1)
        return process_start(pid)

    monkeypatch.setattr(shared_memory, "process_start", gone)  # asked for at a store's first put
    with pytest.raises(RowsCleared, match="block 0"):
        store.put(0, location, parts_of(0, sizes), (0,), 1.0)
    assert found[0].block.location == location, "the range is another block's by then, else this tests nothing"
    assert_hold(store, found[0])


@pytest.mark.processes
def test_range_of_a_writer_killed_half_way_is_reused(host: SharedMemoryHost) -> None:
    location = host.allocate(0, 4096)
    assert location is not None
    code = (
        "import sys, time, numpy as np\n"
        "from headrace.dataplane.block_store import StoreSpec\n"
        "from headrace.dataplane.stores import shared_memory\n"
        "def hang(target, source): print('inside', flush=True); time.sleep(60)\n"
        "shared_memory.np.copyto = hang\n"
        "spec = StoreSpec('shm', 'x', {'folder': sys.argv[1]})\n"
        "store, location = shared_memory.SharedMemoryStore(spec), bytes.fromhex(sys.argv[2])\n"
        "store.put(0, location, [np.ones(4096, np.uint8)], [0], 1.0)\n"
    )
    command = [sys.executable, "-c", code, str(host.spec.address["folder"]), location.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "inside\n"
        host.free(0, location)
        assert host.allocate(1, 4096) != location
        writer.send_signal(signal.SIGKILL)
    assert host.allocate(2, 4096) == location
    assert int(host._slots[int.from_bytes(location[:4], "little"), WRITER_PID]) == 0


def test_closed_pool_says_so_and_leaves_nothing() -> None:
    run_id = fresh_run_id()
    host = SharedMemoryHost(run_id, MIB)
    store = SharedMemoryStore(host.spec)
    want = write(host, store, (10,), 0)
    with pytest.raises(ValueError, match=run_id):
        SharedMemoryHost(run_id, MIB)
    host.close()
    host.close()
    assert not Path(str(host.spec.address["folder"])).exists()
    with pytest.raises(StoreLost, match=run_id):
        store.get([want], 1.0)
    with pytest.raises(StoreLost, match=run_id):
        SharedMemoryStore(host.spec)
    assert not list(Path("/dev/shm").glob(f"*{run_id}*"))


@pytest.mark.processes
def test_folder_of_a_killed_host_is_readable_then_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from headrace.dataplane.stores.shared_memory import SharedMemoryHost\n"
        "host = SharedMemoryHost('dead', 1 << 20, Path(sys.argv[1]))\n"
        "print(host.allocate(0, 64).hex(), flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        location = bytes.fromhex(process.stdout.readline())
        assert remove_stale_folders(tmp_path) == []
        process.send_signal(signal.SIGKILL)
    spec = shared_memory.StoreSpec("shm", "dead", {"folder": str(tmp_path / "headrace-dead")})
    store = SharedMemoryStore(spec)
    store.put(0, location, parts_of(0, (64,)), (0,), 1.0)
    assert_hold(store, Want(BlockRef(0, location, layout_of((64,))), (0,)))
    (tmp_path / "headrace-foreign").mkdir()
    host = SharedMemoryHost("next", MIB, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace-foreign", "headrace-next"]
    host.close()


def test_a_host_without_the_memory_is_told_at_the_start() -> None:
    free_mib = free_memory() >> 20
    config = DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=free_mib + 1000))
    sentence = (
        rf"dataplane.store.capacity_mib: got {free_mib + 1000}, but /dev/shm of host \S+ has \d+ MiB free.*--shm-size"
    )
    for start in (check_store, lambda config: open_data_plane(config, in_process=True)):
        with pytest.raises(ValueError, match=sentence):
            start(config)
    small = DataPlaneConfig(store=StoreConfig(kind="shm", capacity_mib=1))
    check_store(small)
    for start in (lambda: check_store(small, one_host=False), lambda: build_store_host(small, "x", "10.0.0.1")):
        with pytest.raises(ValueError, match="dataplane.store.kind: got 'shm' for a run on several hosts"):
            start()


def test_folders_of_others_and_odd_ones_stop_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "headrace-folder" / "owner").mkdir(parents=True)
    (tmp_path / "headrace-pipe").mkdir()
    os.mkfifo(tmp_path / "headrace-pipe" / "owner")
    (tmp_path / "headrace-link").mkdir()
    (tmp_path / "precious").write_text("x")
    (tmp_path / "headrace-link" / "owner").symlink_to(tmp_path / "precious")
    (tmp_path / "headrace-file").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner").write_text("")
    (tmp_path / "headrace-away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "headrace-stale").mkdir()
    (tmp_path / "headrace-stale" / "owner").write_text("")
    before = {path.name for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # all of it is another user's
        assert remove_stale_folders(tmp_path) == []
    SharedMemoryHost("mine", MIB, tmp_path).close()
    assert {path.name for path in tmp_path.iterdir()} == before - {"headrace-stale"}


@pytest.mark.processes
def test_a_script_that_ends_without_close_leaves_nothing_and_its_fork_takes_nothing_along() -> None:
    code = (
        "import os, sys, torch\n"
        "from headrace import DataPlaneConfig, Field, Kind, Schema, StoreConfig, connect, open_data_plane\n"
        "config = DataPlaneConfig(store=StoreConfig(kind='shm', capacity_mib=4))\n"
        "plane = open_data_plane(config, in_process=True, run_id=sys.argv[1])\n"
        "client = connect(plane.handle)\n"
        "client.register('t', Schema([Field('x', Kind.PER_SAMPLE, torch.uint8)]))\n"
        "def rows(key): return 't', [key], {'x': torch.ones(1, dtype=torch.uint8)}\n"
        "client.put(*rows('a'))\n"
        "assert os.path.exists(f'/dev/shm/headrace-{sys.argv[1]}')\n"
    )
    # A child that ends does not take the parent's store along.
    code += "os.fork() or sys.exit(); os.wait(); client.put(*rows('b')); print('put'); raise KeyError\n"
    run_id = fresh_run_id()
    done = subprocess.run([sys.executable, "-c", code, run_id], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "put\n"), done.stderr
    assert not Path(f"/dev/shm/headrace-{run_id}").exists()


@pytest.mark.processes
def test_process_start_tells_processes_apart() -> None:
    own = process_start(os.getpid())
    assert own is not None and own == process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None, "a zombie writes no more"
    assert process_start(child.pid) is None
