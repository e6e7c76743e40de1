"""Units of several hosts: what is lost with one of them is told and cleared, and each host has room of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import holder_of
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import KeysNotFound, LeaseLost, StoreLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.stores.tcp.link import UnitLink
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.process_pool import kill

pytestmark = pytest.mark.processes
SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])


def ids(count: int, length: int = 100) -> dict[str, Any]:
    return {"ids": [torch.full((length,), number, dtype=torch.int32) for number in range(count)]}


def holders(meta: KVBatchMeta) -> set[int]:
    return {holder_of(ref.location) for ref in meta.blocks}


@pytest.fixture
def two_units() -> Iterator[DataPlane]:
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=8, num_units=2), timeout_s=10)
    with open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane:
        yield plane


@pytest.mark.parametrize("dies", [True, False])
def test_rows_of_a_lost_unit_are_cleared_by_whole_groups_and_named(two_units: DataPlane, dies: bool) -> None:
    """The unit's process dies, or is declared dead, as on a host that is cut off for good."""
    with connect(two_units.handle.over_sockets()) as client:
        client.register("p", SCHEMA, ("a",), group_size=2)
        client.register("other", SCHEMA, ("a",))
        metas = [client.put("p", [f"{group}.0", f"{group}.1"], ids(2)) for group in "abcd"]
        assert [len(holders(meta)) for meta in metas] == [1] * 4 and len({*map(frozenset, map(holders, metas))}) == 2
        lost, kept = ([meta for meta in metas if holders(meta) == {unit}] for unit in (1, 0))
        # A column of a group that was kept is in the lost unit.
        columns = [client.put("p", [meta.keys[0]], {"reward": torch.ones(1)}) for meta in kept]
        also = [meta for meta, column in zip(kept, columns, strict=True) if holders(column) == {1}]
        expected = {key for meta in (*lost, *also) for key in meta.keys}
        claimed = client.claim("p", "a", ["ids"], 8, whole_groups=True)
        name = two_units.handle.store.address["units"][1][0]  # type: ignore[index]
        assert client.forget_unit() == {}
        if dies:
            kill(two_units.processes()[name])
        found = client.forget_unit("" if dies else name)
        assert list(found) == ["p"] and set(found["p"]) == expected and len(expected) in (4, 6)
        assert client.forget_unit() == {} and client.status("p").lost_rows == 0
        if dies:
            with pytest.raises(StoreLost, match=f"storage unit {name} pid=.* host="):
                client.get(lost[0])
        with pytest.raises(KeysNotFound):
            client.lookup("p", list(lost[0].keys), ["ids"])
        with pytest.raises(LeaseLost):
            client.release(claimed, "a", "done")  # the others are released
        assert client.task_status("p", "a").done == 8 - len(expected)
        again = client.put("p", list(lost[0].keys), ids(2))
        assert holders(again) == {0} and client.claim("p", "a", ["ids"], 2).keys == lost[0].keys


def test_all_far_units_are_asked_before_the_first_answer(two_units: DataPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    send, answer = UnitLink.send, UnitLink.answer

    def sends(link: UnitLink, *arguments: Any, **named: Any) -> Any:
        events.append(f"ask {link.address.name}")
        return send(link, *arguments, **named)

    def answers(link: UnitLink, sent: Any) -> Any:
        events.append(f"hear {link.address.name}")
        return answer(link, sent)

    with connect(two_units.handle.over_sockets()) as client:
        client.register("p", SCHEMA)
        metas = [client.put("p", [f"{group}.0"], ids(1)) for group in range(4)]
        both = metas[0].concat(*metas[1:])
        assert holders(both) == {0, 1}
        monkeypatch.setattr(UnitLink, "send", sends)
        monkeypatch.setattr(UnitLink, "answer", answers)
        assert client.get(both).jagged("ids").values.shape == (400,)
        assert events == ["ask unit-0", "ask unit-1", "hear unit-0", "hear unit-1"]
        # An error of the first answer leaves no reply of the second in a connection that is used again.
        with monkeypatch.context() as patch:
            patch.setattr(UnitLink, "answer", lambda link, sent: sent.connection.close() or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                client.get(both)
        for _ in range(2):
            assert client.get(both).jagged("ids").values.shape == (400,)
