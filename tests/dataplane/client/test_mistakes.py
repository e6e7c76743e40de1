"""Mistakes of a caller are refused with the name and the value of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.errors import AlreadyWritten, ClaimTimeout, KeysNotFound, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect
from headrace.tests.dataplane.client.local_plane import ids


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
