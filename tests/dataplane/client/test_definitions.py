"""Definitions of partitions change as declared, and mistakes in arguments are named before anything happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import (
    AlreadyWritten,
    ClaimTimeout,
    FieldsNotReady,
    KeysNotFound,
    RowsCleared,
    SchemaMismatch,
)
from headrace.dataplane.factory import DataPlane, connect
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids
from headrace.tests.waiting import wait_until

LATER = [Field("logp", Kind.PER_TOKEN, torch.float32), Field("label", Kind.OBJECT)]


def logp(lengths: list[int]) -> list[torch.Tensor]:
    return [torch.ones(length) for length in lengths]


def test_fields_are_added_and_all_goes_on(client: DataPlaneClient, plane: DataPlane) -> None:
    old = connect(plane.handle)
    before = old.put("p", ["a.0", "a.1"], {"ids": ids(2)})
    client.add_fields("p", LATER)
    client.add_fields("p", Schema(LATER[:1]))
    with pytest.raises(FieldsNotReady, match="'logp' is not written"):
        client.lookup("p", ["a.0"], ["logp"])
    old.put("p", ["b.0"], {"ids": ids(1)})  # by the schema of before
    after = client.put("p", ["a.0", "a.1"], {"logp": logp([0, 1]), "label": ["x", "y"]})
    old.put("p", ["b.0"], {"label": ["z"]})  # a field that its client does not know
    joined = old.get(before.merge_fields(after))
    assert set(joined) == {"ids", "logp", "label"} and joined.jagged("logp").lengths.tolist() == [0, 1]
    assert old.get(before).jagged("ids").lengths.tolist() == [0, 1]
    assert old.get_keys("p", ["b.0"], ["label"]).objects("label") == ["z"]
    assert client.claim("p", "a", ["ids", "logp"], 2, whole_groups=True).keys == ("a.0", "a.1")
    with pytest.raises(SchemaMismatch, match="got 3 tokens for 'a.1', expected 1"):
        client.put("p", ["a.1"], {"logp": logp([3])}, replace=True)
    client.register("p", SCHEMA, ("a",), group_size=2)  # as a process does that starts later
    old.put("p", ["c.0"], {"label": ["w"]})
    assert client.status("p").ready["label"] == 4 and client.clear("p") == 4
    assert client.status().bytes_used == 0


def test_a_field_of_another_declaration_is_refused(client: DataPlaneClient) -> None:
    wrong = Field("ids", Kind.PER_TOKEN, torch.int64)
    with pytest.raises(ValueError, match=r"add_fields 'p': got Field\(name='ids'.*int64.*, but .*int32"):
        client.add_fields("p", [*LATER, wrong])
    with pytest.raises(SchemaMismatch, match="unknown field 'label'"):
        client.put("p", ["a.0"], {"label": ["x"]})
    with pytest.raises(ValueError, match="'nowhere': not registered"):
        client.add_fields("nowhere", LATER)


def test_a_partition_is_registered_anew(client: DataPlaneClient, plane: DataPlane) -> None:
    receipt = client.put("p", ["a.0", "a.1", "b.0"], {"ids": ids(3)})
    client.claim("p", "a", ["ids"], 1)
    ended: list[str] = []

    def wait() -> None:
        with pytest.raises(ValueError, match="task 'a': partition 'p' has .'b'.") as caught:
            connect(plane.handle).claim("p", "a", ["ids"], 8)
        ended.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: client.status().waiting_claims)
    with pytest.raises(ValueError, match=r"tasks \['b .*\], but .* with \['a .*redefine=True replaces it.*unregister"):
        client.register("p", SCHEMA, ("b",), group_size=2)
    with pytest.raises(ValueError, match="sampler 'nope'"):
        client.register("p", SCHEMA, [TaskConfig("b", "nope")], redefine=True)
    assert client.status("p").rows == 3, "a mistake drops nothing"
    for _ in range(2):  # the second time does nothing, even once there are rows
        client.register("p", SCHEMA, ("b",), redefine=True)
        client.put("p", [f"new.{client.status('p').rows}"], {"ids": ids(1)})
    thread.join(5)
    assert len(ended) == 1
    status = client.status()
    assert (status.partitions, status.leases, status.waiting_claims) == ({"p": 2}, 0, 0)
    assert client.claim("p", "b", ["ids"], 2).keys == ("new.0", "new.1")
    with pytest.raises(RowsCleared):
        client.get(receipt)


def test_errors_name_what_they_are_about(client: DataPlaneClient) -> None:
    with pytest.raises(SchemaMismatch, match=r"'idz', did you mean 'ids'.*op=put partition='p' keys=\['a.0'\]"):
        client.put("p", ["a.0"], {"idz": ids(1)})
    client.put("p", ["a.0"], {"ids": ids(1)})
    with pytest.raises(AlreadyWritten, match="a.0"):
        client.put("p", ["a.0"], {"ids": ids(1)})
    with pytest.raises(ClaimTimeout, match=r"fields \['score'\] of 2 rows; 0 of the partition's 1 rows.*elapsed=0.05"):
        client.claim("p", "a", ("score",), 2, timeout_s=0.05)
    with pytest.raises(ValueError, match="timeout_s"):
        client.status(timeout_s=-1)
    assert client.claim("p", "a", ("ids",), 1, timeout_s=0).keys == ("a.0",), "0: whatever is there now"


def test_errors_count_all_keys(client: DataPlaneClient) -> None:
    client.put("p", [f"k{i}" for i in range(99)], {"score": torch.zeros(99)})
    with pytest.raises(AlreadyWritten, match=r"'k4', ... 94 more\]"):
        client.put("p", [f"k{i}" for i in range(99)], {"score": torch.zeros(99)})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda client: client.claim("p", "a", ["ids"], 1.0), "n: got 1.0, expected an integer"),
        (
            lambda client: client.claim("p", "a", ["ids"], 1, min_version="3"),
            "min_version: got '3', expected an integer",
        ),
        (
            lambda client: client.put("p", ["a"], {"ids": ids(1)}, groups=[3]),
            "groups: got 3, expected non-empty strings",
        ),
        (lambda client: client.put("p", ["\udc80"], {"ids": ids(1)}), "keys: got '.udc80', expected .* valid Unicode"),
        (lambda client: client.lookup("p", ["a\0b"]), "keys: got 'a.x00b', expected .* without NUL"),
    ],
)
def test_mistakes_in_arguments_are_named(client: DataPlaneClient, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(client)
    assert len(client.put("p", ["\U0001f99c\n.0"], {"ids": ids(1)})) == 1
    assert len(client.claim("p", "a", ["ids"], cast(Any, np.int64(1)))) == 1


def test_numbers_that_do_not_travel_are_refused(plane: DataPlane) -> None:
    client = connect(plane.handle)
    client.register("wide", Schema([Field("none", Kind.PER_TOKEN, torch.uint8, trailing=(0,))]), ["a"])
    long = torch.empty(((1 << 31) + 5, 0), dtype=torch.uint8)  # of no bytes
    with pytest.raises(SchemaMismatch, match="'b.1' has 2147483653 tokens, expected at most 2147483647"):
        client.put("wide", ["b.0", "b.1"], {"none": [long[:3], long]})
    with pytest.raises(KeysNotFound):
        client.lookup("wide", ["b.0"])
    client.put("wide", ["b.2"], {"none": [long[: (1 << 31) - 1]]})
    assert client.get_keys("wide", ["b.2"], ["none"]).jagged("none").lengths.tolist() == [(1 << 31) - 1]
    for versions in (1 << 63, np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError, match="versions: got 9223372036854775808, expected at most 9223372036854775807"):
            client.put("wide", ["v.0"], {"none": [long[:1]]}, versions=versions)
    receipt = client.put("wide", ["v.0"], {"none": [long[:1]]}, versions=np.array([(1 << 63) - 1], np.uint64))
    assert receipt.versions.tolist() == client.lookup("wide", ["v.0"]).versions.tolist() == [(1 << 63) - 1]
    with pytest.raises(ValueError, match="min_version: got 9223372036854775808"):
        client.claim("wide", "a", ["none"], 1, min_version=1 << 63)


def test_a_block_of_more_rows_than_a_slot_can_name_is_refused() -> None:
    with pytest.raises(ValueError, match="block_rows"):
        DataPlaneConfig(block_rows=(1 << 24) + 1)
    assert DataPlaneConfig(block_rows=1 << 24).block_rows == 1 << 24


def test_a_row_without_dimensions_is_no_ragged_field() -> None:
    with pytest.raises(ValueError, match="'img': ndim 0, expected at least 1"):
        Field("img", Kind.RAGGED, torch.uint8, ndim=0)
