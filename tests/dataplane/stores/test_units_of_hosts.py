"""Units of several hosts: what is lost with one of them is told and cleared, and each host has room of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.block_store import holder_of
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig, StoreConfig
from headrace.dataplane.errors import CapacityExceeded, KeysNotFound, LeaseLost, StoreLost
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.meta import KVBatchMeta
from headrace.dataplane.stores import counting_host
from headrace.dataplane.stores.tcp import host, store
from headrace.dataplane.stores.tcp.link import UnitLink
from headrace.dataplane.stores.tcp.unit import StorageUnit
from headrace.dataplane.stores.tcp.wire import Connection
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.process_pool import kill
from headrace.tests.waiting import wait_until

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


class UnitOfAHost(StorageUnit):
    """A unit in this process, which counts as one on the host of its number."""

    def __init__(self, run_id: str, name: str, key: bytes, host: str, capacity_bytes: int) -> None:
        super().__init__(run_id, name, key, host, capacity_bytes)
        self.address = replace(self.address, memory=f"{name} shm", host_name=f"host of {name}")

    silent_until: ClassVar[dict[str, threading.Event]] = {}

    def _free(self, connection: Connection, head: bytes, raw_bytes: int) -> None:
        if self.address.name in self.silent_until:
            self.silent_until[self.address.name].wait(30)
        super()._free(connection, head, raw_bytes)

    def has_died(self) -> bool:
        return False


@contextmanager
def on_host(number: int, plane: DataPlane) -> Iterator[DataPlaneClient]:
    """A client on the host of unit `number`; beside all hosts for a number without a unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "memory_id", lambda: f"unit-{number} shm")
        client = connect(plane.handle)
    with client:
        yield client


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[DataPlane]:
    monkeypatch.setattr(host, "UnitProcess", UnitOfAHost)
    config = DataPlaneConfig(store=StoreConfig(kind="tcp", capacity_mib=4, num_units=2), timeout_s=10)
    with open_data_plane(config, run_id=fresh_run_id(), in_process=True) as plane:
        yield plane


HALF_MIB = 130_000


def test_each_host_has_room_of_its_own_and_keeps_some_for_its_writers(two_hosts: DataPlane) -> None:
    with on_host(0, two_hosts) as here, on_host(1, two_hosts) as there, on_host(9, two_hosts) as beside:
        here.register("p", SCHEMA)
        own = [here.put("p", [f"own.{number}"], ids(1, HALF_MIB)) for number in range(8)]
        assert [holders(meta) for meta in own] == [{0}] * 8
        status = there.status()
        assert status.bytes_by_host == {"host of unit-0": status.bytes_used, "host of unit-1": 0}
        assert status.bytes_capacity == 8 << 20 and not status.puts_elsewhere
        spilled = [here.put("p", [f"more.{number}"], ids(1, HALF_MIB)) for number in range(6)]
        assert [holders(meta) for meta in spilled] == [{1}] * 6 and here.status().puts_elsewhere == 6
        both = own[0].concat(spilled[0])
        assert there.hosts_of(both).tolist() == there.hosts_of(both.select([0, 1])).tolist() == ["unit-0", "unit-1"]
        assert here.get(spilled[0]).jagged("ids").lengths.tolist() == [HALF_MIB]
        with ThreadPoolExecutor() as pool:  # A put that waits for room on its host does not hold up another host.
            waits = pool.submit(here.put, "p", ["late.0"], ids(1, 2 * HALF_MIB), timeout_s=2)
            wait_until(lambda: there.status().waiting_puts == 1)
            assert holders(there.put("p", ["passes.0"], ids(1, 1000), timeout_s=1)) == {1} and not waits.done()
            assert isinstance(waits.exception(), CapacityExceeded)
        there.clear("p", ["passes.0"])
        with pytest.raises(CapacityExceeded, match=r"on 2 hosts, free: \d+ on host of unit-0, \d+ on host of unit-1"):
            here.put("p", ["too.0"], ids(1, 2 * HALF_MIB), timeout_s=0.2)
        assert holders(there.put("p", ["far.0"], ids(1, HALF_MIB))) == {1}
        here.clear("p", [own[0].keys[0]])
        assert holders(here.put("p", ["again.0"], ids(1, HALF_MIB))) == {0}
        here.clear("p", [key for meta in spilled for key in meta.keys])
        # A client without a unit takes the host with the most room, and is not counted.
        assert holders(beside.put("p", ["any.0"], ids(1, HALF_MIB))) == {1}
        assert here.status().puts_elsewhere == 6
        used = here.status().bytes_by_host
        assert here.forget_unit("unit-1")["p"] == ("far.0", "any.0")
        assert here.status().bytes_by_host == {"host of unit-0": used["host of unit-0"]}
        assert here.status().bytes_capacity == 4 << 20 and here.status().bytes_used == used["host of unit-0"]


def test_credit_is_room_on_the_writers_own_host(two_hosts: DataPlane) -> None:
    with on_host(0, two_hosts) as here, on_host(1, two_hosts) as there:
        here.register("p", SCHEMA)
        for number in range(3):
            assert holders(here.put("p", [f"a.{number}"], ids(1, HALF_MIB))) == {0}
            assert holders(there.put("p", [f"b.{number}"], ids(1, HALF_MIB))) == {1}
        credit = here.status().bytes_credit
        assert credit >= 2 * HALF_MIB * 4
        # The far writer fills its own host up to its last row, and the credit of the near one stays.
        for number in range(3, 8):
            assert holders(there.put("p", [f"b.{number}"], ids(1, HALF_MIB))) == {1}
        assert HALF_MIB * 4 <= here.status().bytes_credit < credit


@pytest.mark.parametrize("silent", [0, 1])
def test_a_host_that_frees_nothing_does_not_make_others_wait(
    two_hosts: DataPlane, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting_host, "FREE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(counting_host, "RETRY_TIMEOUT_S", 0.05)
    go_on = threading.Event()
    with on_host(silent, two_hosts) as its, on_host(1 - silent, two_hosts) as other:
        its.register("p", SCHEMA)
        for number in range(6):
            its.put("p", [f"a.{number}"], ids(1, HALF_MIB))
        monkeypatch.setitem(UnitOfAHost.silent_until, f"unit-{silent}", go_on)
        its.clear("p")
        assert its.status().bytes_unfreed > 1 << 20
        for number in range(8):
            assert holders(other.put("p", [f"b.{number}"], ids(1, HALF_MIB), timeout_s=5)) == {1 - silent}
        go_on.set()
