"""Partitions that are saved into a file come back exactly; other files load nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.codecs import messages
from headrace.codecs.batch import Batch
from headrace.codecs.blobs import Blob, blob_field
from headrace.codecs.jagged import unpack
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client import saving
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.client.operations import Operations
from headrace.dataplane.client.saving import PartitionReader, PartitionWriter
from headrace.dataplane.directory.partition import PartitionState, TaskState
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import CapacityExceeded, ClaimTimeout, RowsCleared
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.status import PartitionRows
from headrace.testing.data_plane import SCHEMA
from headrace.tests.dataplane.client.local_plane import SCHEMA as SMALL
from headrace.tests.dataplane.client.local_plane import ids, small_plane
from headrace.tests.dataplane.rows import FIRST, LATER, columns
from headrace.tests.example_counts import examples

TASKS = ("train", TaskConfig("eval", "ready_first"), TaskConfig("stream", "windowed", {"window": 3}))
GROUP = 2


@pytest.fixture(scope="module")
def roomy() -> Iterator[DataPlane]:
    """A data plane that the examples of a property share."""
    with small_plane(capacity_mib=64) as plane:
        yield plane


def listed(rows: PartitionRows) -> dict[str, Any]:
    """Return what the list of rows says, without the partition's name and the groups' numbers."""
    tags = {name: (str(values.dtype), values.tobytes() if values.dtype != object else values.tolist())
            for name, values in rows.tags.items()}  # fmt: skip
    flags = {name: column.tolist() for name, column in [*rows.tagged.items(), *rows.written.items()]}
    plain = [column.tolist() for column in (rows.keys, rows.lengths, rows.versions, rows.group_names)]
    return {"plain": plain, "tags": tags, "flags": flags}


def bits(batch: Batch) -> list[list[Any]]:
    """The rows of a batch, to the bit."""
    found = unpack(batch)
    return [
        [(str(value.dtype), list(value.shape), value.reshape(-1).view(torch.uint8).tolist())
         if isinstance(value, torch.Tensor) else value for value in found[name]]
        for name in sorted(found)
    ]  # fmt: skip


def contents(client: DataPlaneClient, partition: str) -> dict[str, list[list[Any]]]:
    rows = client.rows(partition)
    return {
        name: bits(client.get_keys(partition, rows.keys[flags], [name]))
        for name, flags in rows.written.items()
        if flags.any()
    }


def remaining(client: DataPlaneClient, partition: str) -> dict[str, list[str]]:
    """Return the keys that each task still claims, in its order. The caller has given leased rows back before."""
    found: dict[str, list[str]] = {}
    held = []  # A receipt that is dropped gives its rows back.
    for task, whole in (("train", False), ("eval", False), ("stream", True)):
        found[task] = []
        while True:
            try:
                meta = client.claim(partition, task, ["ids"], GROUP if whole else 1, whole_groups=whole, timeout_s=0)
            except ClaimTimeout:
                break
            held.append(meta)
            found[task] += meta.keys
    return found


def fill(client: DataPlaneClient, partition: str, seed: int) -> list[Any]:
    """Register a partition and let random things happen to it. Returns its leases."""
    chance = random.Random(seed)
    client.register(partition, SCHEMA, TASKS, group_size=GROUP)
    leases = []
    for number in range(chance.randint(0, 8)):
        keys = [f"p{seed}-{number}.{sample}" for sample in range(chance.randint(1, GROUP))]
        groups = [f"group {number}"] * len(keys) if chance.random() < 0.5 else None
        tags: dict[str, Any] = {"position": [number] * len(keys)}
        if chance.random() < 0.5:
            tags["source"] = [chance.choice(["math", "", "co\0de", "\u2603"]) for _ in keys]
        if chance.random() < 0.5:
            tags["score"] = np.array([chance.random() for _ in keys], np.float32)
        first = chance.choice([FIRST, ("ids",), ("reward", "info"), ("image",)])
        version = chance.randint(-1, 3)
        client.put(partition, keys, columns(keys, first), versions=version, groups=groups, tags=tags)
        if chance.random() < 0.6:
            some = keys[: chance.randint(1, len(keys))]
            client.put(partition, some, columns(some, LATER))
        if chance.random() < 0.3:
            client.put(partition, keys, columns(keys, FIRST), versions=9, replace=True)
        if chance.random() < 0.5:
            task = chance.choice(["train", "eval", "stream"])
            try:
                meta = client.claim(partition, task, ["ids"], GROUP, whole_groups=task == "stream", timeout_s=0)
            except ClaimTimeout:
                continue
            if chance.random() < 0.6:
                client.release(meta, task, "done")
            else:
                leases.append((meta, task))
        if chance.random() < 0.2:
            held = {key for meta, _ in leases for key in meta.keys}
            client.clear(partition, [key for key in keys if key not in held])
    return leases


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(0, 10**6))
def test_a_partition_comes_back_exactly(roomy: DataPlane, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "saved"
    with connect(roomy.handle) as client:
        leases = fill(client, "p", seed)
        rows, was = client.rows("p"), contents(client, "p")
        assert client.save("p", path) == len(rows)
        assert client.load(path, "q") == "q"
        loaded = client.rows("q")
        assert listed(loaded) == listed(rows) and contents(client, "q") == was
        group_of = dict(zip(rows.groups.tolist(), loaded.groups.tolist(), strict=True))
        assert [group_of[number] for number in rows.groups.tolist()] == loaded.groups.tolist()
        for meta, task in leases:
            client.release(meta, task, "retry")
        assert client.status("q").leases == 0
        client.register("q", SCHEMA, TASKS, group_size=GROUP)  # by the same definition
        of_q, of_p = remaining(client, "q"), remaining(client, "p")
        assert sorted(of_q.pop("eval")) == sorted(of_p.pop("eval")), "what became ready first is not saved"
        assert of_q == of_p
        client.unregister("p")
        client.unregister("q")
        assert client.status().bytes_used == 0


def test_many_chunks_and_a_client_for_asyncio(
    monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient, plane: DataPlane, tmp_path: Path
) -> None:
    monkeypatch.setattr(saving, "CHUNK_BYTES", 2000)
    keys = [f"k{number}.0" for number in range(50)]
    client.put("p", keys, {"ids": ids(50)})
    client.put("p", keys[::2], {"note": [{"n": number} for number in range(25)]})
    was = contents(client, "p")

    async def save_and_load() -> None:
        async with connect_async(plane.handle) as twin:
            assert await twin.save("p", tmp_path / "saved") == 50
            assert await twin.load(tmp_path / "saved", "q") == "q"

    asyncio.run(save_and_load())
    assert contents(client, "q") == was
    client.unregister("p")
    assert client.load(tmp_path / "saved") == "p" and contents(client, "p") == was
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


RANKS = TaskConfig("ranks", "rank_aware", {"num_ranks": 2})


def shares(client: DataPlaneClient, partition: str, rank: int, count: int) -> list[tuple[str, ...]]:
    """Return the keys of the next `count` claims of two rows that a rank makes."""
    claim = {"arguments": {"rank": rank}, "timeout_s": 0}
    receipts = [client.claim(partition, "ranks", ["ids"], 2, **claim) for _ in range(count)]
    return [receipt.keys for receipt in receipts]


def test_ranks_find_the_shares_that_were_dealt_before_a_save(client: DataPlaneClient, tmp_path: Path) -> None:
    client.register("r", SMALL, [RANKS])
    client.put("r", [f"k{number}.0" for number in range(12)], {"ids": ids(12)})
    first, leased = (client.claim("r", "ranks", ["ids"], 2, arguments={"rank": 0}) for _ in range(2))
    client.release(first, "ranks", "done")  # rank 1 is behind: the shares of two rounds wait for it
    client.save("r", tmp_path / "saved")
    client.load(tmp_path / "saved", "s")
    client.release(leased, "ranks", "retry")  # as a load gives leased rows back
    expected = [shares(client, "r", 1, 3), shares(client, "r", 0, 2)]
    assert expected == [
        [("k1.0", "k3.0"), ("k5.0", "k7.0"), ("k9.0", "k11.0")],
        [("k4.0", "k6.0"), ("k8.0", "k10.0")],
    ]
    assert [shares(client, "s", 1, 3), shares(client, "s", 0, 2)] == expected


def rewrite(path: Path, change: Callable[[TaskState], Any]) -> None:
    """Save the partition in a file of one chunk again, with other states of its tasks."""
    reader = PartitionReader(path)
    state = messages.decode(reader.saved.state, PartitionState)
    changed = {"schema": state.schema, "group_size": state.group_size, "tasks": [change(task) for task in state.tasks]}
    writer = PartitionWriter(path)
    writer.begin(replace(reader.saved, state=messages.encode(changed)))
    writer.add(0, reader.chunk(0)[1])
    writer.finish()


def test_a_file_without_notes_is_loaded_and_damaged_notes_load_nothing(
    client: DataPlaneClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "saved"
    client.register("r", SMALL, [RANKS])
    client.put("r", ["a.0", "b.0", "c.0", "d.0"], {"ids": ids(4)})
    assert shares(client, "r", 0, 1) == [("a.0", "c.0")]
    client.save("r", path)
    rewrite(path, lambda task: replace(task, notes=task.notes[:3]))
    with pytest.raises(ValueError, match=r"task 'ranks' has notes int64 \[3\], expected int64 for each of 4 rows"):
        client.load(path, "s")
    assert "s" not in client.status().partitions
    with monkeypatch.context() as patch:
        patch.setattr(saving, "MAGIC", b"hrpart1\n")
        kept = ("config", "done", "first_prompt", "settled")
        rewrite(path, lambda task: {name: getattr(task, name) for name in kept})
    assert path.read_bytes().startswith(b"hrpart1\n")
    client.load(path, "s")
    assert shares(client, "s", 1, 1) == [("b.0", "d.0")], "its ranks are dealt shares again"
    path.write_bytes(path.read_bytes().replace(b"hrpart1", b"hrpart9"))
    with pytest.raises(ValueError, match="begins with b'hrpart9"):
        client.load(path, "t")


def saved_bytes(client: DataPlaneClient, path: Path, prompt: str = "a") -> bytes:
    client.put(
        "p", [f"{prompt}.0", f"{prompt}.1"], {"ids": ids(2, 3), "note": ["x", "y"]}, tags={"source": ["math", "code"]}
    )
    client.save("p", path)
    return path.read_bytes()


def test_other_files_load_nothing(client: DataPlaneClient, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    data = saved_bytes(client, path)
    spoilt = {cut: data[:cut] for cut in (0, 5, 8, 20, 100, len(data) - 1)}
    for at in range(8, len(data), 37):
        spoilt[-at] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    for content in (*spoilt.values(), data + b"\0", b"PK\3\4" + data, b"\x80\x04."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"saved: (not a saved partition|truncated|damaged)"):
            client.load(path, "q")
    with pytest.raises(FileNotFoundError):
        client.load(tmp_path / "nowhere", "q")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"'p' is registered already; expected another name .partition=., or unreg"):
        client.load(path)
    assert client.status().partitions == {"p": 2} and client.status().bytes_reserved == 0
    assert client.load(path, "q") == "q"


def test_a_load_that_fails_leaves_nothing(client: DataPlaneClient, tmp_path: Path) -> None:
    client.put("p", ["a.0"], {"blob": torch.zeros(1, 100_000, dtype=torch.uint8)})
    saved_bytes(client, tmp_path / "saved", "b")
    client.unregister("p")
    client.register("full", SMALL)
    keys = [f"k{number}" for number in range(10)]
    client.put("full", keys, {"blob": torch.zeros(10, 100_000, dtype=torch.uint8)})
    with pytest.raises(CapacityExceeded):
        client.load(tmp_path / "saved", timeout_s=0.05)
    assert client.status().partitions == {"full": 10}
    client.clear("full")
    assert client.load(tmp_path / "saved") == "p"


def test_a_save_that_fails_leaves_the_file_of_before(
    monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    before = saved_bytes(client, path)
    with pytest.raises(FileNotFoundError):
        client.save("p", tmp_path / "no folder" / "saved")
    with pytest.raises(ValueError, match="'nowhere': not registered"):
        client.save("nowhere", path)
    other = connect(client._operations.handle)
    read = Operations.get

    def cleared_meanwhile(*arguments: Any) -> Any:
        other.clear("p")
        return read(*arguments)

    monkeypatch.setattr(Operations, "get", cleared_meanwhile)
    with pytest.raises(RowsCleared, match="a.0"):
        client.save("p", path)
    assert path.read_bytes() == before and [found.name for found in tmp_path.iterdir()] == ["saved"]


def test_a_cancelled_load_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, client: DataPlaneClient, plane: DataPlane, tmp_path: Path
) -> None:
    saved_bytes(client, tmp_path / "saved")
    client.put("p", ["b.0", "b.1"], {"ids": ids(2)})
    client.save("p", tmp_path / "saved")

    async def cancel() -> None:
        async with connect_async(plane.handle) as twin:
            loading = asyncio.create_task(twin.load(tmp_path / "saved", "q"))
            while "q" not in (await twin.status()).partitions:
                await asyncio.sleep(0)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading

    real = Operations.put

    def put_slowly(*arguments: Any) -> Any:
        yield saving.Work("load", lambda: time.sleep(0.1))
        return (yield from real(*arguments))

    monkeypatch.setattr(Operations, "put", put_slowly)
    asyncio.run(cancel())
    assert client.status().partitions == {"p": 4}


def test_the_pictures_of_rows_come_back_and_stay_shared(roomy: DataPlane, tmp_path: Path) -> None:
    parts = [Field("pixels", Kind.RAGGED, torch.uint8, ndim=2), Field("alt", Kind.OBJECT)]
    images = blob_field("images", [*parts, Field("grid", Kind.PER_SAMPLE, torch.int32, trailing=(3,))])
    pixels, grid = torch.arange(60_000).to(torch.uint8).view(100, 600), torch.tensor([1, 10, 10], dtype=torch.int32)
    one, other = (Blob(images, {"pixels": pixels, "grid": grid, "alt": {"text": name}}) for name in ("one", "other"))
    with connect(roomy.handle) as client:
        client.register("p", Schema([Field("x", Kind.PER_SAMPLE, torch.float32), images]))
        listed = [[one, other], [], [one], [one, one]]
        client.put("p", list("abcd"), {"x": torch.arange(4.0), "images": listed})
        client.put("p", ["e"], {"x": torch.zeros(1)})
        used = client.status().bytes_used
        client.save("p", tmp_path / "saved")
        assert (tmp_path / "saved").stat().st_size < 2.2 * pixels.numel()
        client.unregister("p")
        assert client.load(tmp_path / "saved", "q") == "q" and client.status().bytes_used <= used
        found = client.get_blobs(client.lookup("q", list("abcd"), ["images"]), "images")
        names = [[found.references.names[i] for i in found.of(row)] for row in range(4)]
        assert names == [[blob.name for blob in row] for row in listed]
        back = unpack(found.blobs)
        assert back["alt"] == [{"text": "one"}, {"text": "other"}] and all(
            (one == pixels).all() for one in back["pixels"]
        )
        assert client.unregister("q") == 5 and client.status().bytes_used == 0
