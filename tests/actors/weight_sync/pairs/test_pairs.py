"""Many senders: each version arrives whole and verified from all of them, or its faults are told apart."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs import pair_receiver, pair_sender
from headrace.actors.weight_sync.pairs.pair_receiver import PairReceiver
from headrace.actors.weight_sync.pairs.pair_sender import PairSender
from headrace.actors.weight_sync.pairs.payload_wire import receive_payload
from headrace.actors.weight_sync.pairs.shared_slots import SharedSlots
from headrace.actors.weight_sync.transports.protocol import (
    BucketFrame,
    WeightTransferError,
)
from headrace.codecs.weights.buckets import checksum
from headrace.dataplane.security.handshake import new_key
from headrace.dataplane.security.run_key import RunKey
from headrace.tests.actors.weight_sync.pairs.group_members import ENGINES, KEY, SENDERS, TP, Members, weights
from headrace.tests.actors.weight_sync.pairs.outcomes import expect_abort_while_sending
from headrace.tests.waiting import wait_until


class Fleet(Members):
    """Members whose connections carry the buckets."""

    def __init__(self, timeout_s: float = 20.0, key: bytes = KEY, *, shared: bool = False) -> None:
        """shared: whether workers of the same number are on one host."""
        self.key = key
        super().__init__(timeout_s, hosts=[f"host {number % TP}" for number in range(ENGINES * TP)] if shared else ())

    def sender(self, rank: int) -> PairSender:
        return PairSender("127.0.0.1", self.key, self.timeout_s)

    def receiver(self, number: int) -> PairReceiver:
        engine, worker = self.places[number]
        return PairReceiver(f"engine-{engine}", worker, self.key)


KIND = Fleet


@pytest.mark.parametrize("tls", [False, True])
def test_versions_arrive_whole_from_all_senders(members: Callable[..., Members], tls: bool) -> None:
    ranks = members(key=RunKey.make(new_key(), "", "run", tls=tls))
    assert all(len(ranks.plan.sending(rank)) > 2 * pair_sender.SLOTS for rank in range(SENDERS))
    for version in (1, 2, 5):
        ranks.expect_whole(version)


def test_a_damaged_bucket_is_told_and_harms_no_other(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members()
    numbers = itertools.count()

    def wrong(payload: torch.Tensor) -> int:
        return checksum(payload) ^ (next(numbers) == 0)

    with monkeypatch.context() as patch:
        patch.setattr(pair_sender, "checksum", wrong)
        sent, got = ranks.update(1)
    assert sum(map(bool, got)) == 1, got
    [hurt] = [rank for rank, error in enumerate(got) if error]
    assert re.search(r"sender \d at 127.0.0.1:\d+: bucket \d+ is damaged: its checksum is", got[hurt]), got
    engine = f"engine-{hurt // TP}"
    for error in filter(None, sent):  # A sender that had nothing for it does not know.
        assert error.startswith(f"{engine}|") and "is damaged" in error, error
    assert any(sent) and all(ranks.has(1, rank) for rank in range(len(got)) if rank != hurt)
    ranks.expect_whole(2)


def test_a_lost_sender_is_no_fault_of_an_engine(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members()

    original = pair_sender.PairSender._run

    def run(self: PairSender, lane: pair_sender._Lane) -> None:
        if self is ranks.senders[2]:
            lane.link.close()
        original(self, lane)

    with monkeypatch.context() as patch:
        patch.setattr(pair_sender.PairSender, "_run", run)
        sent, got = ranks.update(1)
    assert all(re.search(r"sender 2 at 127.0.0.1:\d+.* the sender is lost|sender 2 at \S+ is lost", one) for one in got)
    for error in sent[:2]:
        assert error.startswith("|") and "gave up waiting" in error, error
    ranks.expect_whole(2)


def test_a_lost_receiver_harms_no_other(members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = members()
    original = PairReceiver._receive

    def receive(self: PairReceiver, *args: object) -> None:
        if self is ranks.receivers[1]:
            lane = args[0]
            lane.link.close()  # pyright: ignore[reportAttributeAccessIssue]
            lane.connection.close()  # pyright: ignore[reportAttributeAccessIssue]
        original(self, *args)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(PairReceiver, "_receive", receive)
        sent, got = ranks.update(1)
    assert got[1] and got[0] == got[2] == got[3] == ""
    assert all(ranks.has(1, rank) for rank in (0, 2, 3))
    # A sender that still had a connection to it when it failed hears that it gave up, which blames nobody.
    told = [error for error in sent if error]
    assert all("engine-0 worker 1 is lost" in error or "engine-0 worker 1 gave up" in error for error in told), told
    blamed = {error.partition("|")[0] for error in told if "is lost" in error}
    assert blamed == {"engine-0"}, told
    ranks.expect_whole(2)


def test_an_abort_tells_its_reason(members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = members()
    expect_abort_while_sending(ranks, pair_sender, monkeypatch)
    ranks.expect_whole(2)


def test_an_abort_that_comes_before_the_sending_is_not_lost(members: Callable[..., Members]) -> None:
    """Receivers that come before, while or after the ranks learn of it are all told the reason."""
    ranks = members()

    def receive(number: int) -> None:
        with pytest.raises(WeightTransferError, match="has ended the update: an engine failed"):
            ranks.receivers[0].receive(ranks.announced(1, number), ranks.plan, 0, ranks.staged[0])

    for sender in ranks.senders:
        sender.abort("an engine failed", 1)
    receive(1)
    sent, got = ranks.update(1)
    assert all("aborted: an engine failed" in error for error in sent), sent
    assert all("has ended the update: an engine failed" in error for error in got), got
    receive(1)
    with ThreadPoolExecutor() as pool:
        early = pool.submit(receive, 2)
        wait_until(lambda: bool(ranks.senders[0]._links._waiting))
        for sender in ranks.senders:
            sender.abort("an engine failed", 2)
        early.result()
    assert next(ranks._number) == 2
    ranks.expect_whole(2)


def test_a_receiver_that_never_comes_is_named(members: Callable[..., Members]) -> None:
    ranks = members(2.0)
    known = ranks.receivers[3]
    ranks.receivers[3] = PairReceiver("engine-1", 1, new_key())
    sent, got = ranks.update(1)
    assert "cannot be reached" in got[3] and all(got)
    assert any("engine-1 worker 1 did not join" in error and error.startswith("engine-1|") for error in sent), sent
    ranks.receivers[3] = known
    ranks.expect_whole(2)


def test_bytes_come_over_the_link_once_for_all_receivers_of_a_host(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members(shared=True)
    taken: dict[socket.socket, int] = {}

    def receive(connection: socket.socket, *args: Any) -> None:
        receive_payload(connection, *args)
        taken[connection] = int.from_bytes(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[-8:], "little"
        )

    monkeypatch.setattr(pair_receiver, "receive_payload", receive)
    before = len(os.listdir("/proc/self/fd"))
    for version in (1, 2):
        taken.clear()
        ranks.expect_whole(version)
        nbytes, handshakes = sum(one.nbytes for one in weights(0).values()), 2000 * len(taken)
        assert nbytes <= sum(taken.values()) - int(ranks.plan.bytes_sent.sum()) + nbytes < nbytes + handshakes
        assert int(ranks.plan.bytes_sent.sum()) < 1.1 * nbytes
    assert all(ranks.plan.bytes_over_links)
    for receiver in ranks.receivers:
        receiver.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def harmed(ranks: Members, owner: int) -> set[int]:
    """The owner of memory, and those that read in it."""
    found = {owner, *itertools.chain.from_iterable(ranks.plan.passing(owner).values())}
    assert 1 < len(found) < len(ranks.receivers)
    return found


@pytest.mark.parametrize("says_why", [True, False])
def test_a_receiver_that_fails_harms_those_that_read_its_memory_in_this_version_only(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, says_why: bool
) -> None:
    ranks = members(shared=True)
    original = SharedSlots.pass_on
    last = max(ranks.plan.passing(0))  # By then all senders have begun, and the reader lacks this bucket for sure.

    def pass_on(self: SharedSlots, slot: int, frame: BucketFrame, readers: Collection[int]) -> None:
        if self._deadline.end == "engine-0 worker 0" and frame.bucket == last:
            wait_until(lambda: bool(self._readers))
            if not says_why:
                self.close()
            raise self._deadline.error("out of order")
        original(self, slot, frame, readers)

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlots, "pass_on", pass_on)
        sent, got = ranks.update(1)
    hurt = harmed(ranks, 0)
    assert {rank for rank, error in enumerate(got) if error} == hurt, got
    for rank in hurt - {0}:
        why = "it has failed: .* out of order" if says_why else "it is lost"
        assert re.search(f"engine-0 worker 0, which takes buckets for this host: {why}", got[rank]), got
    assert all(ranks.has(1, rank) for rank in range(len(got)) if rank not in hurt)
    assert any(sent) and all(error.startswith("|") and "gave up waiting" in error for error in filter(None, sent))
    ranks.expect_whole(2)


def test_a_receiver_that_reads_too_slowly_is_not_waited_for(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused the version even if its bytes were right, because its slot could have been used again."""
    ranks = members(4.0, shared=True)
    original, done = SharedSlots.serve, threading.Event()

    def serve(self: SharedSlots, *args: Any) -> None:
        original(self, *args)
        if self._deadline.end == "engine-0 worker 0":
            done.set()

    def verify(self: PairReceiver, frame: BucketFrame, payload: torch.Tensor, of: str, deadline: Any) -> None:
        if self is ranks.receivers[2] and "engine-0 worker 0, which" in of:
            assert done.wait(20)

    with monkeypatch.context() as patch:
        patch.setattr(SharedSlots, "serve", serve)
        patch.setattr(PairReceiver, "_verify", verify)
        _, got = ranks.update(1)
    assert "engine-0 worker 0, which takes buckets for this host: it is lost, or did not wait" in got[2], got
    assert ranks.has(1, 0) == (got[0] == "") and not any(
        got[rank] for rank in (0, 1, 2, 3) if rank not in harmed(ranks, 2)
    )
    ranks.expect_whole(2)


def test_a_receiver_that_does_nothing_is_blamed_alone(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members(2.0, shared=True)
    stuck, original = threading.Event(), PairReceiver._run_all

    def run_all(self: PairReceiver, *args: Any) -> None:
        if self is ranks.receivers[0]:
            assert stuck.wait(20)
        original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(PairReceiver, "_run_all", run_all)
        sent, got = ranks.update(1, lambda: (wait_until(lambda: not ranks.senders[0]._tracker), stuck.set())[1])
    for rank in harmed(ranks, 0) - {0}:
        assert "engine-0 worker 0, which takes buckets for this host: it has done nothing for 1.0 s" in got[rank], got
    assert sent[0].startswith("engine-0|") and "engine-0 worker 0 before its first bucket" in sent[0], sent
    ranks.expect_whole(2)
