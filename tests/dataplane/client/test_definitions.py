"""Definitions of partitions change as declared, and mistakes in arguments are named before anything happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client import saving
from headrace.dataplane.client.arguments import checked
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.client.operations import Operations
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import (
    AlreadyWritten,
    ClaimTimeout,
    DataPlaneError,
    FieldsNotReady,
    InvalidArgument,
    KeysNotFound,
    RowsCleared,
    SchemaMismatch,
)
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.streaming import StreamingDataset
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
    _held = client.claim("p", "a", ["ids"], 1)
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
        (lambda client: client.claim("p", "a", "score", 1), r"fields: got 'score', expected a sequence .*op=claim"),
        (lambda client: client.lookup("p", 3), "keys: got 3, expected a sequence of strings"),
        (lambda client: client.get(["a.0"]), r"meta: got \['a.0'\], expected a receipt .*op=get"),
        (lambda client: client.release(None, "a", "done"), "meta: got None, expected a receipt"),
        (lambda client: client.release(client.put("p", ["q"], {"ids": ids(1)}), "a", "fine"), "outcome: got 'fine'"),
        (lambda client: client.put("p", ["a"], [("ids", 1)]), "fields: got .*expected a mapping from field to rows"),
        (lambda client: client.put(3, ["a"], {"ids": ids(1)}), "partition: got 3, expected a non-empty string.*op=put"),
        (lambda client: client.tag("p", ["a"], {"s": [None]}), r"tag 's': got object \[1\], expected one number"),
        (lambda client: client.tag("p", ["a"], "s"), "tags: got 's', expected a mapping"),
        (lambda client: client.register("u", {"x": torch.float32}), "schema: got a dict, expected a list of Fields"),
        (lambda client: client.register("u", [Kind.OBJECT]), "schema: got .*in the list, expected Fields"),
        (lambda client: client.register("u", SCHEMA, "trainer"), "tasks: got 'trainer', expected a sequence of names"),
        (lambda client: client.register("u", SCHEMA, group_size=0), "group_size: got 0, expected an integer from 1"),
        (lambda client: client.status(timeout_s="5"), "timeout_s: got '5', expected a finite number of seconds"),
        (lambda client: client.lookup("p", ["a"], wait="yes"), "wait: got 'yes', expected True or False"),
        (lambda client: client.save("p", ""), "path: got '', expected a path"),
        (lambda client: client.claim("nope", "a", ["ids"], 1), "'nope'"),
    ],
)
def test_mistakes_in_arguments_are_named(client: DataPlaneClient, call: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        call(client)
    assert len(client.put("p", ["\U0001f99c\n.0"], {"ids": ids(1)})) == 1
    assert len(client.claim("p", "a", ["ids"], cast(Any, np.int64(1)))) == 1


@pytest.mark.parametrize(
    "obj", [(1, 2), np.float32(1), {3}, 2**70, torch.ones(1), [object()]], ids=lambda obj: type(obj).__name__
)
def test_an_object_that_cannot_be_stored_is_a_mismatch_that_names_its_row(client: DataPlaneClient, obj: object) -> None:
    client.register("objects", [Field("log", Kind.OBJECT), Field("x", Kind.PER_SAMPLE, torch.float32)])
    with pytest.raises(SchemaMismatch, match=r"field 'log', row 1: object.*op=put partition='objects' keys=\['b'\]"):
        client.put("objects", ["a", "b"], {"log": [{"fine": 1}, obj]})
    with pytest.raises(SchemaMismatch, match="field 'x': the dense tensor is on the device meta"):
        client.put("objects", ["a"], {"x": torch.ones(1, device="meta")})
    assert client.status("objects").rows == 0


def test_zero_rows_do_nothing_with_and_without_fields(client: DataPlaneClient) -> None:
    assert len(client.put("p", [], {})) == len(client.put("p", [], {"ids": []})) == 0
    with pytest.raises(SchemaMismatch, match="got no fields"):
        client.put("p", ["a"], {})


def test_every_argument_of_a_client_has_a_check() -> None:
    """The blocking and the asyncio client share the operations, whose decorator needs a check for each argument."""

    def operation(self: object, partition: str, novelty: int) -> Any:
        yield

    with pytest.raises(KeyError, match="novelty"):
        checked(operation)
    public = [name for name, member in vars(DataPlaneClient).items() if callable(member) and not name.startswith("_")]
    owners = [vars(Operations), vars(saving)]
    for name in public:
        found = next(owner[name] for owner in owners if name in owner)
        assert name == "close" or hasattr(found, "__wrapped__"), name


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
    with pytest.raises(ValueError, match="'img': got ndim 0, expected at least 1"):
        Field("img", Kind.RAGGED, torch.uint8, ndim=0)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    return found if not depth else [nested(depth - 1)]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
ODD: dict[str, Any] = {
    "None in a list": [None],
    "meta": torch.ones(1, device="meta"),
    "sparse": torch.eye(1).to_sparse(),
    "bf16": torch.ones(1, dtype=torch.bfloat16),
    "grad": torch.ones(1, requires_grad=True),
    "0-d tensor": torch.tensor(True),
    "0-d array": np.array("a.0"),
    "structured": np.zeros(1, dtype=[("a", "i4")]),
    "2^64": 1 << 64,
    "10^400": 10**400,
    "10^5000": 10**5000,
    "deep": nested(400),
    "cycle": CYCLE,
}
CALLS: dict[str, Callable[[DataPlaneClient, Any], Any]] = {
    "versions": lambda client, odd: client.put("p", ["a"], {"ids": ids(1)}, versions=odd),
    "tags": lambda client, odd: client.tag("p", ["a"], {"t": odd}),
    "put tags": lambda client, odd: client.put("p", ["a"], {"ids": ids(1)}, tags={"t": odd}),
    "positions": lambda client, odd: client.skip("p", "a", odd),
    "keys": lambda client, odd: client.lookup("p", odd),
    "groups": lambda client, odd: client.put("p", ["a"], {"ids": ids(1)}, groups=odd),
    "fields": lambda client, odd: client.claim("p", "a", odd, 1, timeout_s=0),
    "tasks": lambda client, odd: client.add_tasks("p", odd),
    "max_hold_s": lambda client, odd: client.add_tasks("p", [TaskConfig("b", max_hold_s=odd)]),
    "options": lambda client, odd: client.add_tasks("p", [TaskConfig("b", "windowed", {"window": odd})]),
    "schema": lambda client, odd: client.register("q", odd),
    "n": lambda client, odd: client.claim("p", "a", ["ids"], odd, timeout_s=0),
    "at_least": lambda client, odd: client.claim("p", "a", ["ids"], 1, at_least=odd, timeout_s=0),
    "group_size": lambda client, odd: client.register("q", SCHEMA, group_size=odd),
    "arguments": lambda client, odd: client.claim("p", "a", ["ids"], 1, arguments={"rank": odd}),
    "outcome": lambda client, odd: client.release(client.put("p", ["r"], {"ids": ids(1)}, replace=True), "a", odd),
    "path": lambda client, odd: client.save("p", odd),
    "older_than_s": lambda client, odd: client.revoke("p", "a", older_than_s=odd),
    "stop_after": lambda client, odd: StreamingDataset(
        client._operations.handle, "p", "a", ["ids"], batch_size=1, stop_after=odd
    ),
    "world": lambda client, odd: StreamingDataset(
        client._operations.handle, "p", "a", ["ids"], batch_size=1, rank=0, world=odd
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_odd_argument_is_an_error_of_the_data_plane(
    client: DataPlaneClient, call: Callable[[DataPlaneClient, Any], Any]
) -> None:
    """numpy, torch and msgspec raise errors of many types, and none of them leaves a call."""
    for odd in ODD.values():
        with contextlib.suppress(DataPlaneError):
            call(client, odd)


@pytest.mark.parametrize("returned", [b"rows", "", 3])
def test_an_odd_path_is_refused(client: DataPlaneClient, returned: Any) -> None:
    class Odd(os.PathLike[str]):
        def __fspath__(self) -> str:
            return returned

    for call in (lambda: client.save("p", Odd()), lambda: client.load(Odd())):
        with pytest.raises(InvalidArgument, match="path: got a Odd, expected a"):
            call()


@pytest.mark.parametrize("seconds", [1e10, 1e300, 1 << 64, 10**5000], ids=["1e10", "1e300", "2^64", "10^5000"])
def test_a_time_limit_without_an_end_is_a_long_one(plane: DataPlane, client: DataPlaneClient, seconds: Any) -> None:
    client.put("p", ["a.0", "a.1"], {"ids": ids(2)}, timeout_s=seconds)
    assert len(client.get(client.claim("p", "a", ["ids"], 2, timeout_s=seconds), timeout_s=seconds)["ids"].lengths) == 2  # type: ignore[union-attr]

    async def use() -> None:
        async with connect_async(plane.handle) as twin:
            assert (await twin.lookup("p", ["a.0"], wait=True, timeout_s=seconds)).keys == ("a.0",)

    asyncio.run(use())
    with pytest.raises(ValueError, match="timeout_s"):
        DataPlaneConfig(timeout_s=1e10)
