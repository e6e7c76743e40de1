"""What a client was granted: space ahead of puts, which no other writer loses by it, and leases that it renews."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from headrace.codecs import messages
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.client.lease_renewal import RENEWALS, LeaseRenewal
from headrace.dataplane.client.put_credit import MAX_BYTES, Credit
from headrace.dataplane.directory import requests
from headrace.dataplane.directory.requests import Space
from headrace.dataplane.errors import AlreadyWritten, CapacityExceeded, DirectoryLost, RowsCleared
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane
from headrace.dataplane.rpc.links import Link
from headrace.testing.data_plane import fresh_run_id, open_plane
from headrace.tests.waiting import wait_until

SCHEMA = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, (50_000,))])
ROWS = 4


@pytest.fixture(params=["local", "shm"])
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlane]:
    """Room for 20 rows and a bit: puts of 4 rows take 200 kB."""
    with open_plane(request.param, capacity_mib=1, timeout_s=5, block_rows=2, reserve_s=30) as plane:
        yield plane


@pytest.fixture
def client(plane: DataPlane) -> Iterator[DataPlaneClient]:
    with connect(plane.handle, name="first") as client:
        client.register("p", SCHEMA, ("a",))
        yield client


def put(client: DataPlaneClient, name: str, rows: int = ROWS, **options: Any) -> Any:
    return client.put("p", [f"{name}.{n}" for n in range(rows)], {"x": values(name, rows)}, **options)


def values(name: str, rows: int) -> torch.Tensor:
    return torch.full((rows, 50_000), ord(name), dtype=torch.uint8)


def calls(client: DataPlaneClient) -> int:
    return client.stats.directory_calls


def test_puts_after_the_first_take_one_call(client: DataPlaneClient) -> None:
    put(client, "a")
    assert client.status().bytes_credit > 0
    for name in "bcd":
        client.clear("p")
        before = calls(client)
        receipt = put(client, name, ROWS if name != "d" else 2)  # a smaller one fits, too
        assert calls(client) - before == 1
        assert client.get(receipt).tensor("x").unique().tolist() == [ord(name)]
        assert client.get(client.lookup("p", receipt.keys)).num_rows == len(receipt)
    status = client.status()
    assert status.store_bytes == status.bytes_used and status.bytes_reserved == 0
    client.clear("p")
    assert (client.status().store_bytes, client.status().bytes_used) == (0, 0)


def test_a_larger_put_exchanges_its_space(client: DataPlaneClient) -> None:
    put(client, "a", 1)
    before = calls(client)
    put(client, "b", 6)
    assert calls(client) - before == 2
    status = client.status()
    assert status.bytes_used + status.bytes_credit + status.bytes_reserved <= status.bytes_capacity
    client.clear("p")
    before = calls(client)
    put(client, "c", 6)
    assert calls(client) - before == 1


def test_who_needs_the_room_gets_it_at_once(client: DataPlaneClient, plane: DataPlane) -> None:
    put(client, "a")
    credit = client.status().bytes_credit
    assert credit > 0
    with connect(plane.handle, name="second") as other:
        started = time.monotonic()
        put(other, "b", 16)
        assert time.monotonic() - started < 1, "credit is no reason to wait"
        assert client.status().bytes_credit == 0, "and there is none while space is short"
        receipt = other.lookup("p", [f"b.{n}" for n in range(16)])
        started = time.monotonic()
        with pytest.raises(CapacityExceeded, match="0 reserved"):
            put(client, "c", 4, timeout_s=0.2)
        assert 0.15 < time.monotonic() - started < 2
        other.clear("p", receipt.keys)
        assert client.get(put(client, "c")).tensor("x").unique().tolist() == [ord("c")]
        with pytest.raises(RowsCleared):
            other.get(receipt)


def test_room_taken_back_amid_a_write_is_nobodys_twice(
    client: DataPlaneClient, plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, "a")
    client.clear("p")
    store: Any = client._operations.store
    writing, go_on = threading.Event(), threading.Event()
    real = type(store).put
    writer = threading.get_ident()

    def slow(self: Any, *arguments: Any) -> bytes:
        if threading.get_ident() != writer and not writing.is_set():
            writing.set()
            assert go_on.wait(5)
        return real(self, *arguments)

    monkeypatch.setattr(type(store), "put", slow)
    receipts: list[Any] = []
    thread = threading.Thread(target=lambda: receipts.append(put(client, "b")))
    thread.start()
    assert writing.wait(5)
    with connect(plane.handle, name="second") as other:
        large = put(other, "c", 16)
        go_on.set()
        thread.join(10)
        assert client.get(receipts[0]).tensor("x").unique().tolist() == [ord("b")]
        assert other.get(large).tensor("x").unique().tolist() == [ord("c")]
        status = client.status()
        assert status.rows == 20 and status.bytes_used <= status.bytes_capacity
        client.clear("p")
        assert client.status().store_bytes == 0


def test_a_put_refused_at_commit_shows_nothing_and_keeps_nothing(client: DataPlaneClient) -> None:
    old = put(client, "a")
    with pytest.raises(AlreadyWritten, match=r"a\.0"):
        put(client, "a")
    with pytest.raises(AlreadyWritten):
        client.put("p", ["new.0", "a.3"], {"x": values("b", 2)})
    status = client.status()
    assert (status.rows, status.bytes_reserved) == (4, 0) and status.store_bytes == status.bytes_used
    assert client.get(old).tensor("x").unique().tolist() == [ord("a")]


def test_an_idle_writers_credit_expires_and_a_closed_ones_goes_at_once(plane: DataPlane) -> None:
    with connect(plane.handle) as reader:
        reader.register("p", SCHEMA)
        client = connect(plane.handle)
        put(client, "a")
        assert reader.status().bytes_credit > 0
        client.close()
        assert reader.status().bytes_credit == 0
    config = plane.handle.config.model_copy(update={"reserve_s": 0.3})
    with (
        open_data_plane(config, run_id=fresh_run_id(), in_process=True) as hasty,
        connect(hasty.handle) as idle,
        connect(hasty.handle) as watcher,
    ):
        idle.register("p", SCHEMA)
        put(idle, "a")
        wait_until(lambda: not watcher.status().bytes_credit)
        before = calls(idle)
        put(idle, "b")
        assert calls(idle) - before == 2
        idle.clear("p")
        assert watcher.status().store_bytes == 0


def test_puts_of_many_tasks_at_once_never_pass_the_capacity(plane: DataPlane, client: DataPlaneClient) -> None:
    async def use() -> None:
        async with connect_async(plane.handle) as one, connect_async(plane.handle) as two:

            async def cycle(twin: Any, name: str) -> None:
                for number in range(6):
                    keys = [f"{name}{number}.{row}" for row in range(2)]
                    receipt = await twin.put("p", keys, {"x": values(name, 2)})
                    assert (await twin.get(receipt)).tensor("x").unique().tolist() == [ord(name)]
                    status = await twin.status()
                    assert status.bytes_used + status.bytes_reserved + status.bytes_credit <= status.bytes_capacity
                    await twin.clear("p", keys)

            await asyncio.gather(*(cycle(twin, name) for name, twin in zip("abcdefgh", [one, two] * 4, strict=True)))

    asyncio.run(use())
    status = client.status()
    assert (status.bytes_used, status.bytes_reserved, status.bytes_credit, status.store_bytes) == (0, 0, 0, 0)


def test_what_is_asked_for() -> None:
    credit = Credit(lifetime_s=60)
    assert credit.next_request() == (0, 0) and credit.take(100_000, 3) == (None, ())
    assert credit.next_request() == (100_032, 4), "puts of one size leave no holes between their blocks"
    credit.take(90_000, 3)
    assert credit.next_request() == (110_016, 4), "as much more as they differ"
    credit.take(1000, 1)
    assert credit.next_request() == (125_056, 4), "a quarter more at most"
    for space_id, nbytes in enumerate((500, 200, 300)):
        credit.add(Space(space_id, 1, 2, nbytes, b""))
    space, _ = credit.take(250, 2)
    assert space is not None and space.space_id == 2, "the smallest that fits"
    assert credit.take(100, 3) == (None, (0, 1)), "too few blocks: they are given back"
    assert credit.drop_all() == ()
    credit.take(MAX_BYTES, 1)
    assert credit.next_request() == (0, 0)
    late = Credit(lifetime_s=0)
    late.add(Space(7, 1, 2, 500, b""))
    assert late.take(1, 1) == (None, (7,))


LEASE_S = 0.4


class OwnLink:
    """Answers renewals with what `answer` says for each call's number, from 1; None is no answer."""

    def __init__(self, answer: Callable[[int], list[int] | None], enough: int) -> None:
        """enough: number of calls after which `asked` is set."""
        self.asked = threading.Event()
        self._answer, self._enough = answer, enough
        self._calls = 0

    def call(self, op: str, payload: bytes, timeout_s: float, undo: Any = None) -> bytes:
        assert (op, messages.decode(payload, requests.Renew).lease_ids) == ("renew", (5,))
        self._calls += 1
        if self._calls >= self._enough:
            self.asked.set()
        live = self._answer(self._calls)
        if live is None:
            raise DirectoryLost("the directory did not answer", op=op)
        return requests.reply(messages.encode(live))


def renewing(link: OwnLink) -> LeaseRenewal:
    leases = LeaseRenewal(cast(Link, link), LEASE_S)
    leases.add(5, "p", ("a.0", "a.1"), np.zeros(2, np.int64))
    return leases


def test_a_renewal_that_fails_is_tried_again() -> None:
    link = OwnLink(lambda call: None if call % 2 else [5], enough=6)
    leases = renewing(link)
    assert link.asked.wait(10), "every other renewal fails, and the lease is renewed all the same"
    leases.end()


def test_a_lease_ends_when_the_directory_says_so_and_not_while_it_is_silent() -> None:
    ended = OwnLink(lambda call: [], enough=1)
    leases = renewing(ended)
    thread = leases._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive() and ended.asked.is_set() and not leases._held
    leases.end()
    silent = OwnLink(lambda call: None if call <= 2 * RENEWALS else [5], enough=2 * RENEWALS + 2)
    leases = renewing(silent)
    assert silent.asked.wait(10) and list(leases._held) == [5]
    leases.end()
