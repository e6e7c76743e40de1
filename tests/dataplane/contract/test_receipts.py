"""The data plane's contract: what a receipt is good for, and when it says that its rows are gone."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from headrace.dataplane.errors import DataPlaneError, IntegrityError, KeysNotFound, RowsCleared
from headrace.dataplane.factory import DataPlane, connect
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.owned_folder import process_start
from headrace.dataplane.stores.registry import store_entry
from headrace.testing.data_plane import assert_rows
from headrace.tests.dataplane.planes import LENDING, OTHER_STORES, SOCKETS, catch_reads, store_of
from headrace.tests.dataplane.rows import BYTES, FIRST, block_of, columns, keys_of


def test_receipts_are_read_without_the_directory_and_cut_at_will(client: Any, partition: str) -> None:
    keys = keys_of(range(8))
    tags = {"score": np.arange(32, dtype=np.float32)}
    meta = client.put(partition, keys, columns(keys), tags=tags)
    assert meta.keys == tuple(keys) and meta.tags["score"].tolist() == list(range(32))
    calls = client.stats.directory_calls
    assert_rows(client.get(meta), keys, FIRST)
    assert_rows(client.get(meta.select([31, 0, 0, 7])), [keys[i] for i in (31, 0, 0, 7)], FIRST)
    left, middle, right = meta.split([5, 20, 7])
    assert_rows(client.get(middle, ("ids",)), keys[5:25], ("ids",))
    assert_rows(client.get(right.concat(left)), keys[25:] + keys[:5], FIRST)
    assert_rows(client.get(meta.where(meta.tags["score"] >= 30)), keys[30:], FIRST)
    for copy in (KVBatchMeta.from_bytes(meta.to_bytes()), pickle.loads(pickle.dumps(meta))):
        assert_rows(client.get(copy.select([9])), [keys[9]], FIRST)
    assert client.stats.directory_calls == calls


@pytest.mark.also_over(*OTHER_STORES)
def test_a_data_plane_lists_its_processes(plane: DataPlane) -> None:
    processes = plane.processes()
    directories = {processes.pop(name) for name in [*processes] if name.startswith("directory")}
    assert directories == {os.getpid()}, "they are in this process"
    expected = {"local": 0, "shm": 0, "tcp": 2, "ray": 1, "simple": 2, "mooncake": 2}
    assert len(processes) == expected[plane.handle.store.kind]
    assert all(process_start(pid) is not None for pid in processes.values())


def test_an_unknown_kind_of_store_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'tape', expected auto or one of local, shm, tcp, ray, simple, mooncake"):
        store_entry("tape")


def test_cleared_rows_are_refused_and_their_neighbours_stay(client: Any, partition: str) -> None:
    keys = keys_of(range(8))
    meta = client.put(partition, keys, columns(keys))
    assert client.clear(partition, keys[:16]) == 16
    with pytest.raises(RowsCleared, match=keys[0]):
        client.get(meta)
    assert_rows(client.get(meta.select(np.arange(16, 32))), keys[16:], FIRST)
    with pytest.raises(KeysNotFound, match=keys[0]):
        client.get_keys(partition, keys, FIRST)
    with pytest.raises(KeysNotFound):
        client.clear(partition, [keys[20], keys[0]])
    assert_rows(client.get_keys(partition, keys[16:], FIRST), keys[16:], FIRST)
    assert client.clear(partition) == 16 and client.clear(partition) == 0


@pytest.mark.also_over(*OTHER_STORES)
def test_receipt_never_shows_the_bytes_of_rows_that_came_after(client: Any, plane: DataPlane, partition: str) -> None:
    raw = f"{partition}-raw"
    client.register(raw, BYTES, ("train",))
    held = []
    for generation in range(20):
        meta = client.put(raw, [f"{n}.{generation}" for n in range(4)], block_of(generation, 4))
        assert client.get(meta).tensor("x").unique().tolist() == [generation]
        held.append(meta)
        for old in held[:-1]:
            with pytest.raises(RowsCleared):
                client.get(old)
        if generation < 19:
            client.clear(raw)
    client.clear(raw)


@pytest.mark.also_over(*OTHER_STORES)
def test_rows_overwritten_while_they_are_read_are_never_torn(
    client: Any, plane: DataPlane, partition: str, kind: str
) -> None:
    """Every other read pauses between its views and its copies until the writer has come around to their memory."""
    raw = f"{partition}-raw"
    client.register(raw, BYTES, ("train",))
    keys = [f"r.{n}" for n in range(4)]
    client.put(raw, keys, block_of(0, 4), versions=0)
    stop, failures, written, pauses = threading.Event(), [], threading.Condition(), [False]
    latest = [0]
    writer, reader = connect(plane.handle, name="writer"), connect(plane.handle, name="reader")

    def overwrite() -> None:
        try:
            while not stop.is_set():
                value = latest[0] + 1
                writer.put(raw, keys, block_of(value % 256, 4), versions=value, replace=True)
                with written:
                    latest[0] = value
                    written.notify_all()
        except DataPlaneError as error:
            failures.append(error)
            stop.set()

    def pause(_: object) -> None:
        if pauses[0]:
            upto = latest[0] + 4  # two blocks are written in turn
            with written:
                assert written.wait_for(lambda: latest[0] >= upto or stop.is_set(), 30)

    catch_reads(store_of(reader, partition), kind, pause)
    thread = threading.Thread(target=overwrite)
    thread.start()
    refused = 0
    try:
        for number in range(24):
            meta = reader.lookup(raw, keys, ("x",))
            pauses[0] = number % 2 == 1
            try:
                values = reader.get(meta).tensor("x")
            except RowsCleared:
                refused += 1
                continue
            finally:
                pauses[0] = False
            assert values.unique().tolist() == [int(meta.versions[0]) % 256], "the receipt's rows, and no others"
    finally:
        stop.set()
        thread.join(30)
    assert not failures and (refused >= 12 or kind not in LENDING), (failures, refused)
    meta = reader.lookup(raw, keys, ("x",))
    assert reader.get(meta).tensor("x").unique().tolist() == [int(meta.versions[0]) % 256]
    writer.close()
    reader.close()
    client.clear(raw)


@pytest.mark.also_over(*OTHER_STORES)
def test_rows_replaced_between_two_bytes_of_a_read(client: Any, plane: DataPlane, partition: str, kind: str) -> None:
    """The worst moment: views are handed out, then their block goes and its memory is overwritten."""
    raw = f"{partition}-raw"
    client.register(raw, BYTES, ("train",))
    keys = [f"r.{n}" for n in range(4)]
    meta = client.put(raw, keys, block_of(1, 4))
    reader, writer = connect(plane.handle, name="reader"), connect(plane.handle, name="writer")
    waiting, overwritten = [True], []

    def replace(views: list[dict[int, np.ndarray]]) -> None:
        if waiting.pop() if waiting else False:
            writer.put(raw, keys, block_of(2, 4), replace=True)
            # Writers without credit take the first room there is, so that one of them meets the old rows' memory.
            for number in range(100 if kind in LENDING else 2):
                with connect(plane.handle, name=f"other{number}") as other:
                    other.put(raw, [f"o{number}.{n}" for n in range(3)], block_of(3, 3))  # and no checksum fits
                if any((part == 3).any() for found in views for part in found.values() if len(part) > 100_000):
                    overwritten.append(number)
                    break

    catch_reads(store_of(reader, raw), kind, replace)
    try:
        assert reader.get(meta).tensor("x").unique().tolist() == [1], "views that pinned the old bytes"
    except RowsCleared as error:
        assert "r.0" in str(error)
    assert not waiting and (overwritten or kind not in LENDING), "the memory was overwritten, else this tests nothing"
    assert client.get_keys(raw, keys, ("x",)).tensor("x").unique().tolist() == [2]
    client.clear(raw)
    reader.close()
    writer.close()


@pytest.mark.also_over(*OTHER_STORES)
def test_damaged_bytes_are_refused_and_told_from_cleared_ones(
    client: Any, plane: DataPlane, partition: str, kind: str
) -> None:
    raw = f"{partition}-raw"
    client.register(raw, BYTES, ("train",))
    reader = connect(plane.handle, name="reader")
    clear_first = False

    def damage(views: list[dict[int, np.ndarray]]) -> Any:
        if not kind.endswith(SOCKETS):
            views = [{part: view.copy() for part, view in found.items()} for found in views]
        views[0][1][5] ^= 1
        if clear_first:
            client.clear(raw)
        return views

    meta = client.put(raw, ["r.0", "r.1"], block_of(1, 2))
    catch_reads(store_of(reader, raw), kind, damage)
    with pytest.raises(IntegrityError, match="r.0"):
        reader.get(meta)
    clear_first = kind in LENDING  # the others' views are their own copy, or pin the block
    with pytest.raises(RowsCleared if clear_first else IntegrityError, match="r.0"):
        reader.get(meta)
    client.clear(raw)
    reader.close()
