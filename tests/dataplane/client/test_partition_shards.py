"""A data plane of several directories, each of which serves the partitions that hash to it."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.partition_shards import shard_of
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import DataPlaneError, InvalidArgument
from headrace.dataplane.factory import connect, connect_async, open_data_plane
from headrace.testing.data_plane import fresh_run_id, open_plane

SCHEMA = Schema([Field("x", Kind.PER_SAMPLE, torch.int64)])
NAMES = ("train", "eval")
KEYS = ["a.0", "a.1"]


def values() -> dict[str, Any]:
    return {"x": torch.arange(2)}


def test_the_two_names_have_a_directory_each() -> None:
    assert {shard_of(name, 2) for name in NAMES} == {0, 1} and {shard_of(name, 1) for name in NAMES} == {0}


@pytest.mark.processes
def test_processes_that_join_by_text_reach_every_directory() -> None:
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=8), directory_shards=2, timeout_s=20)
    with open_data_plane(config, run_id=fresh_run_id(), process=True) as plane:
        names = {"directory", "unit-0", "directory-shard-1", "unit-0-shard-1"}
        assert set(plane.processes()) == names and len(set(plane.processes().values())) == 4
        with connect(plane.handle) as writer, connect(plane.handle.to_text()) as reader:
            metas = []
            for name in NAMES:
                writer.register(name, SCHEMA, ["t"], group_size=2)
                writer.put(name, KEYS, values())
                metas.append(reader.claim(name, "t", ["x"], 2))
                assert reader.get(metas[-1]).tensor("x").tolist() == [0, 1]
                writer.clear(name, KEYS[:1])
            status = reader.status()
            assert (status.partitions, status.rows, status.leases) == ({"train": 1, "eval": 1}, 2, 2)
            assert (status.bytes_capacity, status.store_kind, status.oldest_lease[:6]) == (8 << 20, "tcp", "task '")
            assert reader.status("eval").rows == 1 and reader.forget_unit() == {}


def test_the_status_of_directories_is_their_sum() -> None:
    with open_plane(directory_shards=2) as plane, connect(plane.handle) as client:
        one = client.status()
    first, second = (dataclasses.replace(one, directory_cpu_s=s, oldest_lease_s=s) for s in (1.5, 2.0))
    both = first.plus(second)
    assert (both.directory_cpu_s, both.oldest_lease_s, both.bytes_capacity) == (3.5, 2.0, 2 * one.bytes_capacity)


def test_rows_are_saved_and_loaded_across_directories(tmp_path: Path) -> None:
    with open_plane(directory_shards=2) as plane, connect(plane.handle) as client:
        client.register("train", SCHEMA, ["t"])
        client.put("train", KEYS, values())
        client.save("train", tmp_path / "rows")
        assert client.load(tmp_path / "rows", "eval") == "eval"
        assert client.get_keys("eval", KEYS, ["x"]).tensor("x").tolist() == [0, 1]

        async def use() -> None:
            async with connect_async(plane.handle) as twin:
                for name in NAMES:
                    assert len(await twin.lookup(name, KEYS)) == 2

        asyncio.run(use())
        wrong: Any = 7
        with pytest.raises(InvalidArgument, match="partition"):
            client.clear(wrong)
        with pytest.raises(ValueError, match="absent"):
            client.clear("absent")
    with pytest.raises(DataPlaneError):
        client.clear("train")
