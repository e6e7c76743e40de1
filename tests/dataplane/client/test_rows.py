"""Lists of a partition's rows, and the tags of rows."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.samplers import Candidates, ClaimRequest, TaskConfig
from headrace.dataplane.errors import DuplicateKeys, KeysNotFound, SchemaMismatch
from headrace.dataplane.factory import connect
from headrace.dataplane.status import PartitionRows
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids, small_plane
from headrace.tests.dataplane.directory.directory_rows import SCHEMA as DIRECTORY_SCHEMA
from headrace.tests.dataplane.directory.directory_rows import put
from headrace.tests.waiting import wait_until


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
    directory.register("p", DIRECTORY_SCHEMA, (), 8)
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


KEYS = ["a.0", "a.1", "b.0", "b.1"]


class OneSource:
    """Takes rows of the source `math` only."""

    order = "version"
    looks_ahead = None
    arguments = ()

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        if "source" not in candidates.tags:
            return np.empty(0, np.int64)
        return np.flatnonzero((candidates.tags["source"] == "math").all(axis=1))[: request.most]


ONE_SOURCE = f"{__name__}:OneSource"


@pytest.fixture
def picky() -> Iterator[DataPlaneClient]:
    with (
        small_plane(samplers=(ONE_SOURCE,)) as plane,
        connect(plane.handle) as client,
    ):
        client.register("q", SCHEMA, [TaskConfig("a", ONE_SOURCE)])
        yield client


def test_texts_come_back_with_receipts(client: DataPlaneClient) -> None:
    given = client.put("p", KEYS, {"ids": ids(4)}, tags={"source": ["math", "code", "", "math\0\u2603"], "n": range(4)})
    later = client.put("p", KEYS[:2], {"score": torch.zeros(2)})
    for meta in (given, client.lookup("p", KEYS), client.claim("p", "a", ["ids"], 4)):
        assert meta.tags["source"].tolist() == ["math", "code", "", "math\0\u2603"]
    assert later.tags["source"].tolist() == ["math", "code"] and later.tags["n"].tolist() == [0, 1]
    assert given.where(given.tags["source"] == "math").keys == ("a.0",)


def test_a_sampler_chooses_by_text(picky: DataPlaneClient) -> None:
    picky.put("q", KEYS, {"ids": ids(4)}, tags={"source": np.array(["code", "math", "code", "math"])})
    assert picky.claim("q", "a", ["ids"], 2).keys == ("a.1", "b.1")


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        (["math"], [1.0], "tag 't': got float64, expected text as before"),
        ([1.0], ["math"], "tag 't': got text, expected float64 as before"),
        ([1], [True], "tag 't': got bool, expected int64 as before"),
    ],
)
def test_a_tag_keeps_its_type(client: DataPlaneClient, first: Any, then: Any, words: str) -> None:
    client.put("p", ["a.0"], {"ids": ids(1)}, tags={"t": first})
    with pytest.raises(SchemaMismatch, match=words):
        client.put("p", ["b.0"], {"ids": ids(1)}, tags={"t": then})
    with pytest.raises(SchemaMismatch, match=f"{words}.*op=tag partition='p' keys=.'a.0'."):
        client.tag("p", ["a.0"], {"t": then})
    with pytest.raises(SchemaMismatch, match="tag 'position': got text, expected integers"):
        client.tag("p", ["a.0"], {"position": ["first"]})
    assert client.lookup("p", ["a.0"]).tags["t"].tolist() == first


def test_tags_are_set_without_a_put(client: DataPlaneClient) -> None:
    before = client.put("p", KEYS, {"ids": ids(4)}, tags={"old": np.arange(4)})
    client.tag("p", KEYS[1:3], {"old": [10, 20], "source": ["x", "y"]})
    found = client.lookup("p", KEYS[1:3])
    assert found.tags["old"].tolist() == [10, 20] and found.tags["source"].tolist() == ["x", "y"]
    assert before.tags["old"].tolist() == [0, 1, 2, 3] and "source" not in client.lookup("p", KEYS).tags
    with pytest.raises(KeysNotFound, match=r"2 of 3 keys not found .*keys=\['c.0', 'c.1'\]"):
        client.tag("p", ["c.0", "a.0", "c.1"], {"old": [7, 7, 7], "new": [1, 1, 1]})
    with pytest.raises(DuplicateKeys, match="more than once in one tag .*'a.0'"):
        client.tag("p", ["a.0", "a.0"], {"old": [7, 7]})
    with pytest.raises(ValueError, match="tag 'old': got int64 .1., expected one number or string for each of 2 rows"):
        client.tag("p", ["a.0", "a.1"], {"old": [7]})
    found = client.lookup("p", KEYS)
    assert found.tags["old"].tolist() == [0, 10, 20, 3] and "new" not in found.tags


def test_a_tag_wakes_a_claim_whose_sampler_waits_for_it(picky: DataPlaneClient) -> None:
    picky.put("q", KEYS, {"ids": ids(4)})
    claimed: list[tuple[str, ...]] = []

    def wait() -> None:
        claimed.append(picky.claim("q", "a", ["ids"], 2).keys)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: picky.status().waiting_claims)
    picky.tag("q", KEYS, {"source": ["math", "code", "code", "math"]})
    thread.join(5)
    assert claimed == [("a.0", "b.1")]


def test_a_new_position_moves_a_group_in_the_prompt_stream(client: DataPlaneClient) -> None:
    client.register("q", SCHEMA, [TaskConfig("a", "in_order")])
    client.put("q", ["a", "b"], {"ids": ids(2)}, tags={"position": [1, 2]})
    client.tag("q", ["a", "b"], {"position": [1, 0]})
    assert client.claim("q", "a", ["ids"], 2).keys == ("b", "a")


def test_strings_of_numpy_are_keys_and_groups(client: DataPlaneClient) -> None:
    keys, groups = np.array(KEYS), np.array(["g", "g", "h", "h"], dtype=object)
    client.put("p", keys, {"ids": ids(4)}, groups=groups)
    client.put("p", [np.str_("a.0"), "a.1"], {"score": torch.zeros(2)}, groups=[np.str_("g"), "g"])
    assert client.lookup("p", keys[::-1]).keys == tuple(KEYS[::-1])
    assert client.get_keys("p", np.array(KEYS[:2], dtype=object), ["ids", "score"]).num_rows == 2
    client.tag("p", keys, {"source": keys})
    assert client.lookup("p", keys).tags["source"].tolist() == KEYS
    assert client.claim("p", "a", ["ids"], 2, whole_groups=True).keys == ("a.0", "a.1")
    assert client.clear("p", keys[1:]) == 3
