"""Partitions whose definition changes: fields that are added, and partitions that are registered again."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.errors import FieldsNotReady, RowsCleared, SchemaMismatch
from headrace.dataplane.factory import DataPlane, connect
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids

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
    while not client.status().waiting_claims:
        time.sleep(0.005)
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
