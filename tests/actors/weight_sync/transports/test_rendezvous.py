"""Tests of process groups: a process that leaves one may end at once, and one that no update waits for is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from headrace.actors.process.rendezvous_store import RendezvousServer, RendezvousStore
from headrace.actors.weight_sync.transports import collective, collective_receiver
from headrace.actors.weight_sync.transports.collective import CollectiveSender
from headrace.actors.weight_sync.transports.collective_receiver import CollectiveReceiver
from headrace.actors.weight_sync.transports.control_link import Hello, Link, LinkListener, Note
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup, WeightTransferError, WeightUpdate
from headrace.actors.weight_sync.transports.rendezvous import Group
from headrace.tests.actors.weight_sync.transports.sample_weights import plan_of, publish, weights
from headrace.tests.waiting import wait_until

KEY = b"key"
CPU = torch.device("cpu")
BOUND_S = 20.0
ENGINE = (ReceiverGroup("engine", 1),)

LEAVES_AND_ENDS = """
import torch
from headrace.actors.process.rendezvous_store import RendezvousServer, RendezvousStore
from headrace.actors.weight_sync.transports.rendezvous import Group

server = RendezvousServer("127.0.0.1", b"key")
store = RendezvousStore("127.0.0.1", server.port, b"key", 20.0)
group = Group(store, "alone", 0, 1, host="127.0.0.1", device=torch.device("cpu"), timeout_s=20.0)
assert group.broadcast(torch.zeros(8, dtype=torch.uint8)).ended(20.0)
group.leave()
"""


@pytest.mark.processes
def test_a_process_that_has_left_its_group_ends_well() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_AND_ENDS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)


# ------------------------------------------------------------------ abandoned groups


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RendezvousStore]:
    """The stores of groups that a sender or a receiver of this process has begun to join."""
    found: list[RendezvousStore] = []

    def noted(*args: object) -> RendezvousStore:
        found.append(RendezvousStore(*args))  # pyright: ignore[reportArgumentType]
        return found[-1]

    for end in (collective, collective_receiver):
        monkeypatch.setattr(end, "RendezvousStore", noted)
    return found


def join(port: int, name: str, rank: int) -> Group:
    store = RendezvousStore("127.0.0.1", port, KEY, BOUND_S)
    return Group(store, name, rank, 2, host="127.0.0.1", device=CPU, timeout_s=BOUND_S)


def is_closed(store: RendezvousStore) -> bool:
    return store._connection.fileno() == -1


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", KEY)
    yield server
    server.close()


def test_a_group_that_cannot_be_joined_keeps_no_connection(server: RendezvousServer) -> None:
    store = RendezvousStore("127.0.0.1", server.port, KEY, BOUND_S)
    with pytest.raises(RuntimeError):
        Group(store, "nowhere", 0, 1, host="203.0.113.1", device=CPU, timeout_s=BOUND_S)  # no address of this host
    assert is_closed(store)


def test_a_sender_leaves_a_group_that_is_joined_after_its_receiver_was_lost(stores: list[RendezvousStore]) -> None:
    sender = CollectiveSender("127.0.0.1", KEY, BOUND_S, CPU)
    plan, errors = plan_of(weights(1), 256), []
    host, port, number = sender.begin(1, plan, ENGINE).location.split("|")

    def send() -> None:
        with pytest.raises(WeightTransferError) as raised:
            publish(sender, plan, weights(1))
        errors.append(str(raised.value))

    sending = threading.Thread(target=send)
    sending.start()
    link = Link.connect(host, int(port), KEY, BOUND_S)
    link.send(Hello(int(number), 1, ""))
    start = link.receive(Note, BOUND_S)
    assert isinstance(start, Note)
    wait_until(lambda: stores)
    link.close()
    sending.join(BOUND_S)
    assert "making the group: engine worker 0 is lost" in errors[0]
    join(start.number, start.text.partition("|")[0], 1).leave()
    wait_until(lambda: is_closed(stores[0]))
    sender.close()


def test_a_receiver_leaves_a_group_that_is_joined_after_its_sender_gave_up(
    server: RendezvousServer, stores: list[RendezvousStore]
) -> None:
    listener, receiver = LinkListener("127.0.0.1", KEY), CollectiveReceiver("engine", 0, KEY, CPU)
    update = WeightUpdate(
        version=1, base=None, kind="collective", location=f"127.0.0.1|{listener.port}|1", num_bytes=0,
        receivers=ENGINE, timeout_s=BOUND_S,
    )  # fmt: skip
    errors: list[str] = []

    def receive() -> None:
        with pytest.raises(WeightTransferError) as raised:
            receiver.open(update)
        errors.append(str(raised.value))

    receiving = threading.Thread(target=receive)
    receiving.start()
    links: list[Link] = []
    wait_until(lambda: links.extend(filter(None, [listener.accept(BOUND_S)])) or links)
    links[0].send(Note("start", "group|gloo", server.port, plan_of(weights(1), 256).message))
    wait_until(lambda: stores)
    links[0].send(Note("abort", "another receiver is lost"))
    receiving.join(BOUND_S)
    assert "making the group: the sender has ended the update: another receiver is lost" in errors[0]
    join(server.port, "group", 0).leave()
    wait_until(lambda: is_closed(stores[0]))
    for end in (*links, receiver, listener):
        end.close()
