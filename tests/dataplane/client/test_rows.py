"""The list of a partition's rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.errors import KeysNotFound
from headrace.dataplane.status import PartitionRows
from headrace.tests.dataplane.client.local_plane import ids
from headrace.tests.dataplane.directory.directory_puts import SCHEMA, put


def test_rows_are_listed_with_all_but_their_content(client: DataPlaneClient) -> None:
    client.put(
        "p", ["a.0", "a.1"], {"ids": ids(2)}, versions=3, tags={"source": ["x", "y"], "n": np.array([1, 2], "f4")}
    )
    client.put("p", ["c", "d"], {"score": torch.zeros(2)}, groups=["g", "g"])
    client.put("p", ["gone"], {"score": torch.zeros(1)}, tags={"only": [True]})
    client.clear("p", ["gone"])
    client.put("p", ["late"], {"ids": [torch.arange(7)]}, tags={"n": np.array([5], "f4")})  # reuses the row of `gone`
    client.put("p", ["d"], {"ids": [torch.arange(7)]})
    rows = client.rows("p")
    assert rows.partition == "p" and len(rows) == 5
    assert rows.keys.tolist() == ["a.0", "a.1", "c", "d", "late"]
    assert rows.lengths.tolist() == [0, 1, 0, 7, 7] and rows.versions.tolist() == [3, 3, -1, -1, -1]
    assert rows.group_names.tolist() == ["a", "a", "g", "g", "late"]
    assert rows.groups.tolist() == client.lookup("p", rows.keys[[0, 1]]).groups.tolist() + rows.groups[2:].tolist()
    assert len(set(rows.groups.tolist())) == 3
    assert rows.tags["source"].tolist() == ["x", "y", "", "", ""] and set(rows.tags) == {"source", "n"}
    assert rows.tagged["source"].tolist() == [True, True, False, False, False]
    assert rows.tags["n"].dtype == np.float32 and rows.tags["n"].tolist() == [1, 2, 0, 0, 5]
    assert rows.written["ids"].tolist() == [True, True, False, True, True]
    assert rows.written["score"].tolist() == [False, False, True, True, False]
    assert not rows.written["blob"].any() and list(rows.written) == ["ids", "score", "blob", "note"]
    assert client.lookup("p", rows.keys[rows.tags["source"] == "y"], ["ids"]).keys == ("a.1",)


def test_some_rows_are_listed_in_the_order_asked_for(client: DataPlaneClient) -> None:
    client.put("p", ["a.0", "a.1"], {"ids": ids(2)}, tags={"n": [1, 2]})
    rows = client.rows("p", ["a.1", "a.0", "a.1"])
    assert rows.keys.tolist() == ["a.1", "a.0", "a.1"] and rows.tags["n"].tolist() == [2, 1, 2]
    with pytest.raises(KeysNotFound, match=r"1 of 2 keys .*op=rows partition='p' keys=\['b.0'\]"):
        client.rows("p", ["a.0", "b.0"])
    assert len(client.rows("p", [])) == 0


def test_an_empty_partition_has_no_rows(client: DataPlaneClient) -> None:
    rows = client.rows("p")
    assert len(rows) == 0 and rows.keys.dtype == object and rows.tags == {}
    assert {name: flags.shape for name, flags in rows.written.items()}["ids"] == (0,)


def test_many_rows_take_few_bytes() -> None:
    directory = Directory(capacity_bytes=1 << 30, lease_s=10.0, reserve_s=5.0)
    directory.register("p", SCHEMA, (), 8)
    number = 20_000
    keys = [f"{prompt:06x}-3f2a.{sample}" for prompt in range(number // 8) for sample in range(8)]
    source = np.array([("math", "code")[n % 2] for n in range(number)], dtype=object)
    put(directory, keys, ("ids",), (np.arange(number) % 1000).tolist(), tags={"source": source})
    listed = directory.rows("p", None)
    data = listed.to_bytes()
    assert len(data) < 12 * number
    read = PartitionRows.from_bytes(data)
    for field in dataclasses.fields(PartitionRows):
        one, other = getattr(listed, field.name), getattr(read, field.name)
        for left, right in [(one, other)] if not isinstance(one, dict) else [(one[name], other[name]) for name in one]:
            np.testing.assert_array_equal(left, right, strict=True)
    for damaged in (data[:-1], b"", data.replace(b"rows1", b"rows2")):
        with pytest.raises(ValueError, match="not a list of rows"):
            PartitionRows.from_bytes(damaged)
