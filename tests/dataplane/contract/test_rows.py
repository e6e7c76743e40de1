"""The data plane's contract, the same over every store: what put and get promise, what receipts are good for."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from headrace.codecs.jagged import pack, unpack
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.errors import (
    AlreadyWritten,
    CapacityExceeded,
    ClaimTimeout,
    DataPlaneError,
    DirectoryLost,
    DuplicateKeys,
    FieldsNotReady,
    KeysNotFound,
    RowsCleared,
    SchemaMismatch,
    StoreLost,
)
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.testing.data_plane import SCHEMA, assert_rows, fresh_run_id
from headrace.tests.dataplane.planes import OTHER_STORES, store_config, store_of
from headrace.tests.dataplane.rows import BYTES, FIRST, LATER, block_of, columns, keys_of, stop_after_first_block
from headrace.tests.waiting import wait_until

# ------------------------------------------------------------------ 1. get


@pytest.mark.also_over(*OTHER_STORES)
def test_get_returns_the_rows_asked_for_in_the_order_asked_for(client: Any, partition: str) -> None:
    keys = keys_of(range(12))
    for start in range(0, 48, 16):
        client.put(partition, keys[start : start + 16], columns(keys[start : start + 16]), versions=start)
    assert_rows(client.get_keys(partition, keys, FIRST), keys, FIRST)
    asked = [keys[40], keys[3], keys[3], keys[0], keys[47], keys[40], *keys[10:20]]
    assert_rows(client.get_keys(partition, asked, ("reward", "ids")), asked, ("reward", "ids"))
    assert_rows(client.get_keys(partition, keys[5:6], ("image",)), keys[5:6], ("image",))
    meta = client.lookup(partition, asked)
    assert meta.keys == tuple(asked) and set(meta.fields) == set(FIRST)
    assert meta.versions.tolist() == [keys.index(key) // 16 * 16 for key in asked]
    assert_rows(client.get(meta, ("info", "mask")), asked, ("info", "mask"))


def test_get_names_what_is_missing_and_never_returns_less(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    client.put(partition, keys, columns(keys))
    with pytest.raises(KeysNotFound, match=r"2 of 3 keys.*'nope.0', 'nope.1'"):
        client.get_keys(partition, ["nope.0", keys[0], "nope.1"], FIRST)
    with pytest.raises(FieldsNotReady, match="logp"):
        client.get_keys(partition, keys, ("ids", "logp"))
    client.put(partition, keys[:3], columns(keys[:3], ("logp",)))
    with pytest.raises(FieldsNotReady, match=f"logp.*{keys[3]}"):
        client.get_keys(partition, keys, ("ids", "logp"))
    assert set(client.lookup(partition, keys).fields) == set(FIRST), "fields that all the keys have"
    with pytest.raises(ValueError, match="lenght"):
        client.get_keys(partition, keys, ("lenght",))
    with pytest.raises(ValueError, match="'nowhere'"):
        client.get_keys("nowhere", keys, ("ids",))
    with pytest.raises(KeysNotFound):
        client.clear(partition, [keys[0], "nope"])
    assert client.status(partition).rows == 8


def test_a_lookup_waits_for_its_rows_and_rows_are_listed(client: Any, plane: DataPlane, partition: str) -> None:
    keys = keys_of(range(2))
    found: list[Any] = []

    def wait() -> None:
        other = connect(plane.handle)
        found.append(other.get(other.lookup(partition, keys, ("ids", "logp"), wait=True)))

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.put(partition, keys[:5], columns(keys[:5], ("logp",)), tags={"source": ["text"] * 5})
    for start, stop in ((0, 3), (3, 8)):
        client.put(partition, keys[start:stop], columns(keys[start:stop]))
    assert not found
    client.put(partition, keys[5:], columns(keys[5:], ("logp",)))
    waiting.join(10)
    assert_rows(found[0], keys, ("ids", "logp"))
    rows = client.rows(partition)
    assert rows.keys.tolist() == keys and rows.lengths.tolist() == found[0].lengths.tolist()
    assert rows.tagged["source"].tolist() == [True] * 5 + [False] * 3
    assert rows.written["logp"].all() and not rows.written["advantage"].any()
    assert client.lookup(partition, rows.keys[rows.tags["source"] == "text"]).keys == tuple(keys[:5])


# ------------------------------------------------------------------ 2. put


def test_fields_added_later_join_their_rows(client: Any, partition: str) -> None:
    keys = keys_of(range(6))
    first = client.put(partition, keys, columns(keys))
    back = list(reversed(keys))
    later = client.put(partition, back, columns(back, LATER))
    assert set(later.fields) == set(LATER)
    assert_rows(client.get(later), back, LATER)
    assert_rows(client.get_keys(partition, keys, ("ids", "logp", "advantage")), keys, ("ids", "logp", "advantage"))
    merged = first.merge_fields(later.select(np.arange(23, -1, -1)))
    assert_rows(client.get(merged), keys, FIRST + LATER)


def test_refused_put_leaves_nothing(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    good = columns(keys)
    bad: list[tuple[dict[str, Any], str]] = [
        (
            {**good, "ids": [row.long() + 2**33 for row in columns(keys)["ids"]]},
            r"ids.: row \d holds \d+, expected.*int32",
        ),
        ({**good, "reward": torch.zeros(len(keys), dtype=torch.float16)}, "reward.*float"),
        ({**good, "mask": [torch.ones(3, dtype=torch.bool)] * len(keys)}, "mask"),
        ({**good, "reward": torch.zeros(len(keys) - 1)}, "reward"),
        ({**good, "rewards": torch.zeros(len(keys))}, "rewards"),
    ]
    for fields, message in bad:
        with pytest.raises(ValueError, match=message):
            client.put(partition, keys, fields)
    with pytest.raises(DuplicateKeys, match=keys[0]):
        client.put(partition, [*keys[:-1], keys[0]], good)
    with pytest.raises(ValueError, match="tag"):
        client.put(partition, keys, good, tags={"bad": np.zeros(len(keys) + 1)})
    with pytest.raises(KeysNotFound):
        client.lookup(partition, keys[:1])
    assert client.status(partition).rows == 0


@pytest.mark.also_over(*OTHER_STORES)
def test_second_write_is_refused_unless_it_replaces(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    old = client.put(partition, keys, {"reward": torch.zeros(8)})
    new_keys = [*keys[:1], "new.0"]
    with pytest.raises(AlreadyWritten, match=f"reward.*{keys[0]}"):
        client.put(partition, new_keys, {"reward": torch.ones(2)})
    with pytest.raises(KeysNotFound):
        client.lookup(partition, ["new.0"])
    new = client.put(partition, keys, {"reward": torch.ones(8)}, replace=True)
    assert client.get(new).tensor("reward").tolist() == [1.0] * 8
    assert client.get_keys(partition, keys, ("reward",)).tensor("reward").tolist() == [1.0] * 8
    with pytest.raises(RowsCleared, match=keys[0]):
        client.get(old)


def test_lengths_and_dtypes_hold_for_a_rows_whole_life(client: Any, partition: str) -> None:
    client.put(partition, ["a.0"], {"ids": [torch.arange(5, dtype=torch.int32)]})
    with pytest.raises(SchemaMismatch, match="a.0"):
        client.put(partition, ["a.0"], {"logp": [torch.zeros(6)]})
    with pytest.raises(ValueError, match="ids"):
        client.put(partition, ["a.0"], {"ids": [torch.zeros(5)]}, replace=True)
    with pytest.raises(ValueError, match="schema"):
        client.register(partition, SCHEMA.subset(["ids"]), ("train", "eval"), group_size=4)
    client.register(partition, SCHEMA, ("train", "eval"), group_size=4)
    assert client.get_keys(partition, ["a.0"], ("ids",)).jagged("ids").values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.also_over(*OTHER_STORES)
def test_empty_batches_and_empty_rows_are_legal(client: Any, partition: str) -> None:
    empty = client.put(partition, [], columns([]))
    assert len(empty) == 0 and client.get(empty).num_rows == 0
    assert client.get_keys(partition, [], ("ids",)).num_rows == 0 and client.lookup(partition, []).keys == ()
    with pytest.raises(SchemaMismatch, match="nope"):
        client.put(partition, [], {"nope": []})
    assert client.status().blocks == 0
    none = {"ids": [torch.zeros(0, dtype=torch.int32)] * 3, "image": [torch.zeros((0, 4), dtype=torch.uint8)] * 3}
    client.put(partition, ["e.0", "e.1", "e.2"], none)
    batch = client.get_keys(partition, ["e.2", "e.0"], ("image", "ids"))
    assert batch.jagged("ids").lengths.tolist() == [0, 0] and batch.ragged("image").shapes.tolist() == [[0, 4], [0, 4]]


@pytest.mark.also_over(*OTHER_STORES)
def test_put_that_fails_between_two_blocks_shows_nothing(client: Any, partition: str, plane: DataPlane) -> None:
    writer, failed = connect(plane.handle, name="broken"), []

    def fail() -> None:
        failed.append(client.status().store_bytes)
        raise StoreLost("the store is lost", op="put", peer="a test")

    undo = stop_after_first_block(store_of(writer, partition), fail)
    keys = keys_of(range(8))
    try:
        with pytest.raises(StoreLost, match="a test"):
            writer.put(partition, keys, columns(keys))
    finally:
        undo()
    assert len(failed) == 1 and failed[0] > 0, "one block was written, and it is not to be seen"
    with pytest.raises(KeysNotFound):
        client.lookup(partition, keys[:1])
    assert client.status().store_bytes == 0 == client.status().bytes_reserved
    client.put(partition, keys, columns(keys))
    assert_rows(client.get_keys(partition, keys, FIRST), keys, FIRST)
    writer.close()


# ------------------------------------------------------------------ capacity


@pytest.mark.also_over(*OTHER_STORES)
def test_full_store_makes_a_put_wait_until_rows_are_cleared(tight_plane: DataPlane, partition: str) -> None:
    client, other = connect(tight_plane.handle, name="first"), connect(tight_plane.handle, name="second")
    client.register(partition, BYTES, ("train",))
    client.put(partition, [f"a.{n}" for n in range(8)], block_of(1, 8))
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match=r"no room for 30\d+ bytes: 80\d+ in use and 0 reserved of 1048576"):
        client.put(partition, ["b.0", "b.1", "b.2"], block_of(2, 3), timeout_s=0.3)
    assert 0.25 < time.monotonic() - started < 2.0
    done: list[Any] = []
    waiting = threading.Thread(
        target=lambda: done.append((other.put(partition, ["c.0", "c.1", "c.2"], block_of(3, 3)), time.monotonic()))
    )
    waiting.start()
    wait_until(lambda: client.status().waiting_puts == 1)
    assert not done
    with pytest.raises(KeysNotFound):
        client.lookup(partition, ["c.0"])
    relieved = time.monotonic()
    assert client.clear(partition, ["a.0"]) == 1
    client.clear(partition, [f"a.{n}" for n in range(1, 8)])
    waiting.join(10)
    assert len(done) == 1 and done[0][1] - relieved < 2.0
    assert client.get(done[0][0]).tensor("x").unique().tolist() == [3]
    started = time.monotonic()
    with pytest.raises(CapacityExceeded, match="more than the capacity"):
        client.put(partition, [f"d.{n}" for n in range(11)], block_of(4, 11))
    assert time.monotonic() - started < 2.0, "what can never fit is not waited for"
    client.clear(partition)
    assert client.status().store_bytes == 0


@pytest.mark.also_over(*OTHER_STORES)
def test_freed_rows_give_their_bytes_back_and_stay_with_their_lease(tight_plane: DataPlane, partition: str) -> None:
    client, other = connect(tight_plane.handle, name="first"), connect(tight_plane.handle, name="second")
    client.register(partition, BYTES, ("train", "eval"))
    keys = [f"a.{n}" for n in range(8)]
    receipt = client.put(partition, keys, block_of(1, 8), tags={"t": np.arange(8)})
    meta = client.claim(partition, "train", ["x"], 8)
    with pytest.raises(KeysNotFound, match="nope"):
        client.free(partition, [*keys, "nope"])
    done: list[Any] = []
    waiting = threading.Thread(target=lambda: done.append(other.put(partition, ["c.0", "c.1", "c.2"], block_of(3, 3))))
    waiting.start()
    wait_until(lambda: client.status().waiting_puts == 1)
    assert not done
    assert client.free(partition, keys) == 8
    waiting.join(10)
    assert len(done) == 1, "a put that waited for room goes on"
    with pytest.raises(RowsCleared):
        client.get(receipt)
    with pytest.raises(FieldsNotReady):
        client.lookup(partition, keys[:1], ["x"])
    assert client.rows(partition, keys).tags["t"].tolist() == list(range(8))
    assert client.status(partition).leased_rows == 8 and client.claim(partition, "eval", ["x"], 3).keys == done[0].keys
    client.release(meta.select(np.arange(4)), "train", "retry")
    with pytest.raises(ClaimTimeout):
        client.claim(partition, "train", ["x"], 4, timeout_s=0.0)  # three there are, and none of those that were freed
    assert client.clear(partition, keys) == 8 and client.status().store_bytes > 0
    client.clear(partition)
    assert client.status().store_bytes == 0
    client.close()
    other.close()


# ------------------------------------------------------------------ sharing inside a group

PROMPT, GROUP = 200, 4
SHARED = Schema(
    [
        Field("ids", Kind.PER_TOKEN, torch.int32, shared=True),
        Field("routes", Kind.PER_TOKEN, torch.uint8, (12, 8), pad_value=255, shared=True),
        Field("logp", Kind.PER_TOKEN, torch.float32),
    ]
)


@pytest.mark.also_over(*OTHER_STORES)
def test_a_groups_prompt_is_stored_once_and_every_row_is_read_whole(
    client: Any, plane: DataPlane, partition: str
) -> None:
    client.register(partition, SHARED, ("train",), group_size=GROUP, redefine=True)
    rng = np.random.default_rng(0)
    rows: dict[str, dict[str, np.ndarray]] = {}
    for prompt in range(3):
        ids, routes = rng.integers(0, 9, PROMPT), rng.integers(0, 99, (PROMPT, 12, 8))
        for sample in range(GROUP):
            rest = int(rng.integers(0, 30))
            rows[f"{prompt}.{sample}"] = {
                "ids": np.concatenate([ids, rng.integers(0, 9, rest)]).astype(np.int32),
                "routes": np.concatenate([routes, rng.integers(0, 99, (rest, 12, 8))]).astype(np.uint8),
                "logp": rng.random(PROMPT + rest).astype(np.float32),
            }
    keys = list(rows)
    fields = {name: [torch.from_numpy(row[name]) for row in rows.values()] for name in SHARED}
    meta = client.put(partition, keys, fields)
    written = client.status().bytes_used
    whole = sum(row[name].nbytes for row in rows.values() for name in SHARED)
    saved = 3 * (GROUP - 1) * PROMPT * (4 + 96)
    assert whole - saved <= written <= 1.01 * (whole - saved) + 1500, (written, whole, saved)

    def expect(receipt: Any, asked: list[str]) -> None:
        batch = client.get(receipt)
        for name in SHARED:
            column = batch.jagged(name)
            for key, values in zip(asked, np.split(column.values.numpy(), np.cumsum(column.lengths)[:-1]), strict=True):
                np.testing.assert_array_equal(values, rows[key][name])

    expect(meta, keys)
    asked = [keys[7], keys[2], keys[2], keys[11], keys[4]]
    expect(client.lookup(partition, asked), asked)
    expect(KVBatchMeta.from_bytes(meta.to_bytes()).select([9]), [keys[9]])
    for number, key in enumerate(keys[:-1]):
        client.clear(partition, [key])
        expect(client.lookup(partition, keys[number + 1 :]), keys[number + 1 :])
    assert client.status().bytes_used > 0
    client.clear(partition, keys[-1:])
    assert client.status().bytes_used == 0, "the last row's clear left the common tokens"


# ------------------------------------------------------------------ twins and the end


def test_async_client_is_the_same_client(client: Any, plane: DataPlane, partition: str) -> None:
    keys = keys_of(range(4))

    async def session() -> None:
        twin = connect_async(plane.handle, name="async")
        await twin.register(partition, SCHEMA, ("train", "eval"), group_size=4)
        waiting = asyncio.create_task(twin.claim(partition, "train", FIRST, 16, timeout_s=10))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(twin.put(partition, keys[n : n + 4], columns(keys[n : n + 4])) for n in range(0, 16, 4)))
        meta = await waiting
        assert_rows(await twin.get(meta), list(meta.keys), FIRST)
        assert sorted(meta.keys) == sorted(keys) and (await twin.status(partition)).leased_rows == 16
        with pytest.raises(ClaimTimeout):
            await twin.claim(partition, "train", FIRST, 1, timeout_s=0.02)
        with pytest.raises(KeysNotFound, match="nope"):
            await twin.get_keys(partition, ["nope"], FIRST)
        await twin.release(meta, "train", "done")
        assert await twin.free(partition, keys[:4]) == 4
        assert await twin.clear(partition) == 16
        with pytest.raises(RowsCleared):
            await twin.get(meta)
        await twin.close()

    asyncio.run(session())


def test_batches_and_nested_tensors_can_be_put(client: Any, partition: str) -> None:
    keys = keys_of(range(2))
    batch = pack(SCHEMA, columns(keys))
    client.put(partition, keys, batch)
    assert_rows(client.get_keys(partition, keys, FIRST), keys, FIRST)
    rows = unpack(pack(SCHEMA, columns(keys, ("logp",))))["logp"]
    client.put(partition, keys, {"logp": torch.nested.as_nested_tensor(rows, layout=torch.jagged)})
    assert_rows(client.get_keys(partition, keys, ("logp",)), keys, ("logp",))


@pytest.mark.also_over(*OTHER_STORES)
def test_closed_plane_ends_waits_and_refuses_calls(kind: str) -> None:
    config = DataPlaneConfig(store=store_config(kind, capacity_mib=8), trusted_network=True, timeout_s=30)
    plane = open_data_plane(config, run_id=fresh_run_id(), in_process=True)
    client = connect(plane.handle)
    client.register("p", SCHEMA, ("train",))
    meta = client.put("p", ["a.0"], columns(["a.0"]))
    errors: list[Exception] = []

    def wait() -> None:
        try:
            client.claim("p", "train", ("logp",), 1)
        except DataPlaneError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    plane.close()
    plane.close()
    waiting.join(5)
    assert len(errors) == 1 and isinstance(errors[0], DirectoryLost)
    started = time.monotonic()
    with pytest.raises(DirectoryLost):
        client.lookup("p", ["a.0"])
    with pytest.raises(DataPlaneError):
        client.get(meta)
    assert time.monotonic() - started < 5.0
    client.close()
