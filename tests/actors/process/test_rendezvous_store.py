"""The store through which process groups are formed: what torch asks of it, and what is refused."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError  # pyright: ignore[reportPrivateImportUsage]

from headrace.actors.process import rendezvous_store
from headrace.actors.process.rendezvous_store import SERVICE, RendezvousServer, RendezvousStore
from headrace.dataplane.security.authenticated_listener import connect_authenticated
from headrace.dataplane.security.handshake import HandshakeError, new_key
from headrace.tests.waiting import wait_until

KEY = new_key()


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", KEY)
    yield server
    server.close()


@pytest.fixture
def join(server: RendezvousServer) -> Iterator[Callable[[], RendezvousStore]]:
    stores: list[RendezvousStore] = []

    def build() -> RendezvousStore:
        stores.append(RendezvousStore("127.0.0.1", server.port, KEY, 30.0))
        return stores[-1]

    yield build
    for store in stores:
        store.close()


def test_torch_reads_and_writes_through_it(join: Callable[[], RendezvousStore]) -> None:
    one, other = join(), join()
    mine, theirs = PrefixStore("group", one), PrefixStore("group", other)
    mine.set("a", "1")
    assert theirs.get("a") == b"1" and other.get("group/a") == b"1"
    assert (mine.add("count", 2), theirs.add("count", 3), theirs.get("count")) == (2, 5, b"5")
    assert theirs.check(["a", "count"]) and not theirs.check(["a", "b"])
    assert theirs.num_keys() == 2
    assert theirs.delete_key("a") and not mine.delete_key("a")
    assert mine.compare_set("c", "", "new") == b"new" and theirs.compare_set("c", "old", "newer") == b"new"
    assert theirs.compare_set("c", "new", "newer") == b"newer" and mine.get("c") == b"newer"
    assert theirs.compare_set("absent", "old", "new") == b"old" and not mine.check(["absent"])
    with pytest.raises(DistStoreError, match="add: group/c is not a number"):
        mine.add("c", 1)


def test_a_wait_is_woken_by_the_last_of_its_keys(join: Callable[[], RendezvousStore]) -> None:
    waiting, found = join(), []

    def wait() -> None:
        waiting.wait(["a", "b"], timedelta(seconds=30))
        found.append(waiting.get("b"))

    thread = threading.Thread(target=wait)
    thread.start()
    writer = join()
    writer.set("a", b"")
    assert not found
    writer.set("b", b"value")
    thread.join(30)
    assert found == [b"value"]


def test_a_wait_ends_in_time_and_the_store_goes_on(
    server: RendezvousServer, join: Callable[[], RendezvousStore]
) -> None:
    store = join()
    with pytest.raises(DistStoreError, match="wait never: never not set within 0.1 s"):
        store.wait(["never"], timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistStoreError, match="get never: never not set within 0.1 s"):
        store.get("never")
    store.set("a", b"1")
    assert store.get("a") == b"1" and not server._awaited


def test_a_clone_asks_while_the_store_waits(join: Callable[[], RendezvousStore]) -> None:
    store = join()
    clone = PrefixStore("group", store).clone()  # pyright: ignore[reportAttributeAccessIssue]
    thread = threading.Thread(target=store.wait, args=(["group/late"],))
    thread.start()
    clone.set("late", "now")
    thread.join(30)
    assert not thread.is_alive()


def test_who_waits_and_leaves_is_forgotten(
    server: RendezvousServer, join: Callable[[], RendezvousStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "_LOOK_S", 0.01)
    store = join()
    failed: list[Exception] = []

    def wait() -> None:
        try:
            store.wait(["never"])
        except DistNetworkError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: "never" in server._awaited)
    store.close()
    thread.join(30)
    assert "the connection is lost" in str(failed[0])
    wait_until(lambda: not server._awaited and not server._connections)


def test_members_know_when_the_server_has_gone(server: RendezvousServer, join: Callable[[], RendezvousStore]) -> None:
    store = join()
    store.set("a", b"1")
    server.close()
    for _ in range(2):
        with pytest.raises(
            DistNetworkError, match=f"rendezvous at 127.0.0.1:{server.port}: get a: the connection is lost"
        ):
            store.get("a")


def test_without_the_key_nobody_joins(server: RendezvousServer) -> None:
    with pytest.raises(HandshakeError, match="not the rendezvous of this run"):
        RendezvousStore("127.0.0.1", server.port, new_key(), 30.0)
    with pytest.raises(ValueError, match="rendezvous: got no key"):
        RendezvousServer("127.0.0.1", b"")


def test_what_is_no_request_ends_its_connection_and_no_other(
    server: RendezvousServer, join: Callable[[], RendezvousStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = join()
    store.set("a", b"1")
    for bad in (struct.pack("<I", 1 << 30), struct.pack("<I", 3) + b"\xc1\x00\x00"):
        with connect_authenticated("127.0.0.1", server.port, KEY, SERVICE, 30) as member:
            member.sendall(bad)
            assert member.recv(100) == b""
    assert f"got a message of {1 << 30} bytes, expected at most" in caplog.text
    with pytest.raises(DistStoreError, match="got operation 'run', which the server does not know"):
        store._ask(rendezvous_store.Request("run", ("a",)))
    with pytest.raises(DistStoreError, match="set: got 2 keys, expected 1"):
        store._ask(rendezvous_store.Request("set", ("a", "b")))
    assert store.get("a") == b"1"


def test_values_have_a_largest_size_together(
    server: RendezvousServer, join: Callable[[], RendezvousStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous_store, "MAX_VALUES_BYTES", 100)
    store = join()
    store.set("a", bytes(60))
    store.set("a", bytes(90))
    with pytest.raises(DistStoreError, match="b: no room for 60 bytes beside 91"):
        store.set("b", bytes(60))
    store.delete_key("a")
    store.set("b", bytes(60))
    server.clear()
    store.set("a", bytes(90))
    assert store.num_keys() == 1


def test_keys_of_one_prefix_are_forgotten(server: RendezvousServer, join: Callable[[], RendezvousStore]) -> None:
    store = join()
    for key in ("generation 1/a", "generation 1/b", "generation 11/a"):
        store.set(key, b"x")
    server.clear("generation 1/")
    assert store.num_keys() == 1 and store.get("generation 11/a") == b"x"
