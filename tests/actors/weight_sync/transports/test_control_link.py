"""Links between a sender and its receivers: a peer without the run's key is kept out, and delays no other."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.actors.weight_sync.config import SyncConfig
from headrace.actors.weight_sync.inbox import WeightInbox
from headrace.actors.weight_sync.transports import control_link
from headrace.actors.weight_sync.transports.control_link import (
    MAX_REPORT_BYTES,
    SERVICE,
    Hello,
    Link,
    LinkListener,
    Note,
    ReceiverTracker,
)
from headrace.actors.weight_sync.transports.ends import Sender
from headrace.actors.weight_sync.transports.factory import build_sender
from headrace.actors.weight_sync.transports.protocol import (
    ReceiverConfig,
    ReceiverGroup,
    SenderConfig,
    WeightTransferError,
    WeightUpdate,
)
from headrace.dataplane.security.authenticated_listener import connect_authenticated
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.transports.sample_weights import plan_of, publish, weights
from headrace.tests.waiting import wait_until

KEY = new_key()
RECEIVERS = (ReceiverGroup("engine", 1),)


@pytest.fixture
def listener() -> Iterator[LinkListener]:
    listener = LinkListener("127.0.0.1", KEY)
    yield listener
    listener.close()


@pytest.fixture
def tracker(listener: LinkListener) -> Iterator[ReceiverTracker]:
    tracker = ReceiverTracker(7, RECEIVERS, listener, 10.0)
    yield tracker
    tracker.close()


def heard(tracker: ReceiverTracker, what: Callable[[], bool]) -> None:
    wait_until(lambda: bool(tracker.poll() or what()))


def test_messages_go_both_ways(listener: LinkListener, tracker: ReceiverTracker) -> None:
    link = Link.connect("127.0.0.1", listener.port, KEY, 10.0)
    link.send(Hello(7, 1, "old group"))
    heard(tracker, lambda: tracker.groups == {1: "old group"})
    tracker.tell(Note("start", "group|gloo", 5, b"plan" * 100_000))
    got = link.receive(Note, 10.0)
    assert isinstance(got, Note) and got.data == b"plan" * 100_000
    for bucket in range(1000):
        link.send(Note("through", number=bucket))
    link.send(Note("done"))
    heard(tracker, lambda: tracker.over)
    assert tracker.through == {1: 999} and not tracker.failed
    link.close()


def test_a_message_that_is_too_large_or_none_costs_its_receiver_the_link(
    listener: LinkListener, tracker: ReceiverTracker
) -> None:
    connection = connect_authenticated("127.0.0.1", listener.port, KEY, SERVICE, 10.0)
    connection.sendall(struct.pack("<I", MAX_REPORT_BYTES + 1))
    link = Link.connect("127.0.0.1", listener.port, KEY, 10.0)
    link.send(Hello(7, 1, ""))
    heard(tracker, lambda: 1 in tracker.groups and not tracker._arrivals)
    assert connection.recv(1) == b"", "closed before a byte of the message's body was read"
    connection.close()
    link._socket.sendall(struct.pack("<I", MAX_REPORT_BYTES + 1))
    heard(tracker, lambda: bool(tracker.failed))
    assert f"got a message of {MAX_REPORT_BYTES + 1} bytes, expected at most {MAX_REPORT_BYTES}" in tracker.failed[1]
    link.close()


def test_connections_that_no_update_takes_are_bounded(listener: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_link, "_MAX_WAITING", 3)
    with contextlib.ExitStack() as stack:
        early = [
            stack.enter_context(connect_authenticated("127.0.0.1", listener.port, KEY, SERVICE, 10.0)) for _ in range(5)
        ]
        assert early[0].recv(1) == early[1].recv(1) == b""
        link = listener.accept(10.0)
        assert link is not None and link._socket.getpeername() == early[2].getsockname()
        link.close()


def test_a_connection_that_is_accepted_while_another_thread_closes_the_tracker_is_closed(
    listener: LinkListener, tracker: ReceiverTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = listener.accept

    def closed_meanwhile(timeout_s: float) -> Link | None:
        link = accept(timeout_s)
        if link is not None:
            tracker.close()
        return link

    monkeypatch.setattr(listener, "accept", closed_meanwhile)
    link = Link.connect("127.0.0.1", listener.port, KEY, 10.0)
    wait_until(lambda: bool(listener._waiting))
    tracker.end("another update was begun")
    with pytest.raises(ConnectionError, match="closed by the other end"):
        link.receive(Note, 10.0)
    link.close()


class Ends:
    """A sender and a receiver of `collective` in this process."""

    def __init__(self, key: bytes) -> None:
        """key: the receiver's."""
        sync = SyncConfig(timeout_s=10.0)
        self.sender: Sender = build_sender("collective", SenderConfig("run", sync, key=KEY))
        self.inbox = WeightInbox(ReceiverConfig("engine", sync, key=key), 0)

    def update(self, during: Callable[[WeightUpdate], None] = lambda _: None) -> list[str]:
        """Send a version, and return the errors of both ends."""
        plan, errors = plan_of(weights(1), 256), []
        update = self.sender.begin(1, plan, RECEIVERS)
        during(update)

        def receive() -> None:
            try:
                self.inbox.prepare(update)
            except WeightTransferError as error:
                errors.append(str(error))
                self.sender.abort("the receiver failed")

        thread = threading.Thread(target=receive)
        thread.start()
        try:
            publish(self.sender, plan, weights(1))
        except WeightTransferError as error:
            errors.append(str(error))
        thread.join(30)
        return errors

    def close(self) -> None:
        self.inbox.close()
        self.sender.close()


def test_strangers_hold_up_no_update() -> None:
    ends = Ends(KEY)
    with contextlib.ExitStack() as stack:

        def crowd(update: WeightUpdate) -> None:
            host, port, _ = update.location.split("|")
            for _ in range(200):
                stranger = stack.enter_context(socket.create_connection((host, int(port)), 10))
                stranger.sendall(b"x")

        assert ends.update(crowd) == []
        staged = ends.inbox.staged
        assert staged is not None and all(torch.equal(staged.named[name], one) for name, one in weights(1).items())
    ends.close()


def test_a_receiver_and_a_sender_of_different_keys_refuse_each_other() -> None:
    ends = Ends(new_key())
    refused, aborted = sorted(ends.update())
    assert "cannot be reached: the peer is not the weights of this run" in refused
    assert "aborted: the receiver failed" in aborted
    ends.close()


def test_the_key_is_in_no_text_of_the_settings() -> None:
    for settings in (SenderConfig("run", key=KEY), ReceiverConfig("engine", SyncConfig(), key=KEY)):
        assert repr(KEY)[2:-1] not in repr(settings) and "key" not in repr(settings)
