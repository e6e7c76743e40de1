"""The pool behind store `shm`: ranges, generations, writers that come late, folders of dead runs."""

from __future__ import annotations

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

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.owned_folder import process_start, remove_stale_folders
from headrace.dataplane.block_store import Want
from headrace.dataplane.errors import RowsCleared, StoreLost
from headrace.dataplane.meta import BlockRef
from headrace.dataplane.stores import shared_memory
from headrace.dataplane.stores.free_ranges import FreeRanges
from headrace.dataplane.stores.shared_memory import SEGMENT_BYTES, SharedMemoryHost, SharedMemoryStore
from headrace.dataplane.stores.shm_folder import WRITER_PID
from headrace.tests.dataplane.rows import fresh_run_id

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[SharedMemoryHost]:
    host = SharedMemoryHost(fresh_run_id(), 64 * MIB)
    yield host
    host.close()


def parts_of(seed: int, sizes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def layout_of(sizes: tuple[int, ...]) -> BlockLayout:
    return BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=sizes)


def write(host: SharedMemoryHost, store: SharedMemoryStore, block_id: int, sizes: tuple[int, ...]) -> Want:
    layout = layout_of(sizes)
    location = host.allocate(block_id, layout.nbytes)
    assert location is not None
    location = store.put(block_id, location, parts_of(block_id, sizes), layout.offsets, 1.0)
    return Want(BlockRef(block_id, location, layout), tuple(range(len(sizes))))


def assert_holds(store: SharedMemoryStore, want: Want) -> None:
    (views,) = store.get([want], 1.0)
    for part, expected in enumerate(parts_of(want.block.block_id, want.block.layout.part_bytes)):
        np.testing.assert_array_equal(views[part], expected)
    store.settle([want])


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
    wants = [write(host, store, block_id, (100, 0, 5000, 1)) for block_id in range(20)]
    for want in reversed(wants):
        assert_holds(store, want)
    (views,) = store.get([wants[0]], 1.0)
    assert all(view.ctypes.data % 64 == 0 for part, view in views.items())
    with pytest.raises(ValueError, match="read-only"):
        views[0][0] = 1
    assert host.usage_bytes() == 20 * wants[0].block.layout.nbytes


def test_freed_block_is_never_served_nor_its_range_mistaken_for_it(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    old = write(host, store, 0, (4096,))
    store.get([old], 1.0)
    host.free(0, old.block.location)
    host.free(0, old.block.location)
    with pytest.raises(RowsCleared, match="block 0"):
        store.settle([old])
    new = write(host, store, 1, (4096,))
    assert old.block.location == new.block.location, "the range is reused, else this tests nothing"
    with pytest.raises(RowsCleared, match="block 0"):
        store.get([old], 1.0)
    with pytest.raises(RowsCleared, match="block 0"):
        store.put(0, old.block.location, parts_of(0, (4096,)), (0,), 1.0)
    assert_holds(store, new)


def test_pool_is_bounded_reused_and_takes_blocks_larger_than_a_segment(host: SharedMemoryHost) -> None:
    store = SharedMemoryStore(host.spec)
    for round_number in range(3):
        small = [host.allocate(round_number * 1000 + n, MIB) for n in range(96)]
        assert all(small)
        assert host.allocate(99_999, MIB) is None, "capacity and a quarter and one segment"
        for n, location in enumerate(small):
            host.free(round_number * 1000 + n, location or b"")
    assert host.usage_bytes() == 0
    large = write(host, store, 5000, (40 * MIB,))  # its segment takes the place of unused small ones
    assert_holds(store, large)
    folder = Path(str(host.spec.address["folder"]))
    assert sum(path.stat().st_size for path in folder.glob("seg-*")) <= 64 * MIB * 5 // 4 + SEGMENT_BYTES


def test_no_room_in_the_file_system_is_none_and_no_crash(
    host: SharedMemoryHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory, "reserve_memory", full)
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
    other = write(host, store, 1, (4096,))
    assert other.block.location != location and host.usage_bytes() == 8192
    go_on.set()
    writer.join(10)
    assert len(failures) == 1, "a put whose block was freed must not report success"
    assert_holds(store, other)
    third = write(host, store, 2, (4096,))
    assert third.block.location == location, "the range is back"
    assert host.usage_bytes() == 8192


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
    assert int(host._slots[int.from_bytes(location[4:8], "little"), WRITER_PID]) == 0


def test_closed_pool_says_so_and_leaves_nothing() -> None:
    run_id = fresh_run_id()
    host = SharedMemoryHost(run_id, MIB)
    store = SharedMemoryStore(host.spec)
    want = write(host, store, 0, (10,))
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
    assert_holds(store, Want(BlockRef(0, location, layout_of((64,))), (0,)))
    (tmp_path / "headrace-foreign").mkdir()
    host = SharedMemoryHost("next", MIB, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["headrace-foreign", "headrace-next"]
    host.close()


@pytest.mark.processes
def test_process_start_tells_processes_apart() -> None:
    own = process_start(os.getpid())
    assert own is not None and own == process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None, "a zombie writes no more"
    assert process_start(child.pid) is None
