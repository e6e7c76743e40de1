"""Many senders: each version arrives whole and verified from all of them, or its faults are told apart."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs import pair_receiver, pair_sender
from headrace.actors.weight_sync.pairs.pair_receiver import PairReceiver
from headrace.actors.weight_sync.pairs.pair_sender import KIND, PairSender, location_of
from headrace.actors.weight_sync.pairs.payload_wire import receive_payload
from headrace.actors.weight_sync.pairs.shared_slots import SharedSlots
from headrace.actors.weight_sync.plan.layouts import held
from headrace.actors.weight_sync.plan.regions import Party
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from headrace.actors.weight_sync.transports.protocol import (
    BucketFrame,
    ReceiverGroup,
    WeightTransferError,
    WeightUpdate,
)
from headrace.codecs.weights.buckets import checksum
from headrace.dataplane.security.handshake import new_key
from headrace.dataplane.security.run_key import RunKey
from headrace.tests.actors.weight_sync.pairs.outcomes import expect_abort_while_sending, outcomes
from headrace.tests.waiting import wait_until

SPECS = {"w": (torch.float32, (64, 40)), "odd": (torch.bfloat16, (7, 3)), "scalar": (torch.float32, ())}
SENDERS, ENGINES, TP = 3, 2, 2
GROUPS = tuple(ReceiverGroup(f"engine-{number}", TP) for number in range(ENGINES))
KEY = new_key()
Tensors = dict[str, torch.Tensor]


def cut(whole: torch.Tensor, axis: int, num: int, index: int) -> torch.Tensor:
    """Part of a weight; a weight without this axis is not cut."""
    parts = whole.chunk(num, axis) if whole.ndim > axis else (whole,) * num
    return parts[index].contiguous() if index < len(parts) else whole[:0]


def weights(version: int) -> Tensors:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SPECS.items()}


def party(axis: int, num: int, index: int, host: str) -> Party:
    regions = [
        region
        for name, (_, shape) in SPECS.items()
        for region in held(name, shape, [(axis, num, index)] if len(shape) > axis else [])
    ]
    return Party(host, tuple(regions))


class Fleet:
    """Three trainer ranks with the rows of weights, and two engines of two workers with their columns."""

    def __init__(self, timeout_s: float, key: bytes, shared: bool) -> None:
        """shared: whether workers of the same number are on one host."""
        self.timeout_s = timeout_s
        self.senders = [PairSender("127.0.0.1", key, timeout_s) for _ in range(SENDERS)]
        places = [*itertools.product(range(ENGINES), range(TP))]
        self.receivers = [PairReceiver(f"engine-{engine}", worker, key) for engine, worker in places]
        self.plan: TransferPlan = plan_transfer(
            SPECS,
            [party(0, SENDERS, rank, f"trainer {rank}") for rank in range(SENDERS)],
            [party(1, TP, worker, f"host {worker}" if shared else f"{engine} {worker}") for engine, worker in places],
            640,
        )
        self.staged = [self._columns(weights(0), worker) for _, worker in places]
        self._number = itertools.count(1)

    def _columns(self, whole: Mapping[str, torch.Tensor], worker: int) -> Tensors:
        return {name: cut(one, 1, TP, worker).clone() for name, one in whole.items()}

    def announced(self, version: int, number: int) -> WeightUpdate:
        location = location_of(number, [sender.address for sender in self.senders])
        return WeightUpdate(version, None, KIND, location, 0, GROUPS, self.timeout_s)

    def update(self, version: int, during: Callable[[], None] = lambda: None) -> tuple[list[str], list[str]]:
        """Bring all workers to a version. Returns how sending and receiving ended, as `outcomes` does."""
        announced = self.announced(version, next(self._number))
        rows = [{name: cut(one, 0, SENDERS, rank) for name, one in weights(version).items()} for rank in range(SENDERS)]
        return outcomes(self.senders, self.receivers, self.plan, announced, rows, self.staged, during)

    def has(self, version: int, rank: int) -> bool:
        expected = self._columns(weights(version), rank % TP)
        return all(torch.equal(self.staged[rank][name], expected[name]) for name in SPECS)

    def expect_whole(self, version: int) -> None:
        assert self.update(version) == ([""] * SENDERS, [""] * len(self.receivers))
        assert all(self.has(version, rank) for rank in range(len(self.receivers)))


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    with ExitStack() as stack:

        def build(timeout_s: float = 20.0, key: bytes = KEY, *, shared: bool = False) -> Fleet:
            made = Fleet(timeout_s, key, shared)
            for sender in made.senders:
                stack.callback(sender.close)
            return made

        yield build


@pytest.mark.parametrize("tls", [False, True])
def test_versions_arrive_whole_from_all_senders(fleet: Callable[..., Fleet], tls: bool) -> None:
    ranks = fleet(key=RunKey.make(new_key(), "", "run", tls=tls))
    assert all(len(ranks.plan.sending(rank)) > 2 * pair_sender.SLOTS for rank in range(SENDERS))
    for version in (1, 2, 5):
        ranks.expect_whole(version)


def test_a_damaged_bucket_is_told_and_harms_no_other(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = fleet()
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


def test_a_lost_sender_is_no_fault_of_an_engine(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fleet()

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


def test_a_lost_receiver_harms_no_other(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fleet()
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


def test_an_abort_tells_its_reason(fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fleet()
    expect_abort_while_sending(ranks, pair_sender, monkeypatch)
    ranks.expect_whole(2)


def test_an_abort_that_comes_before_the_sending_is_not_lost(fleet: Callable[..., Fleet]) -> None:
    """Receivers that come before, while or after the ranks learn of it are all told the reason."""
    ranks = fleet()

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


def test_a_receiver_that_never_comes_is_named(fleet: Callable[..., Fleet]) -> None:
    ranks = fleet(2.0)
    known = ranks.receivers[3]
    ranks.receivers[3] = PairReceiver("engine-1", 1, new_key())
    sent, got = ranks.update(1)
    assert "cannot be reached" in got[3] and all(got)
    assert any("engine-1 worker 1 did not join" in error and error.startswith("engine-1|") for error in sent), sent
    ranks.receivers[3] = known
    ranks.expect_whole(2)


def test_bytes_come_over_the_link_once_for_all_receivers_of_a_host(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = fleet(shared=True)
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


def harmed(ranks: Fleet, owner: int) -> set[int]:
    """The owner of memory, and those that read in it."""
    found = {owner, *itertools.chain.from_iterable(ranks.plan.passing(owner).values())}
    assert 1 < len(found) < len(ranks.receivers)
    return found


@pytest.mark.parametrize("says_why", [True, False])
def test_a_receiver_that_fails_harms_those_that_read_its_memory_in_this_version_only(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, says_why: bool
) -> None:
    ranks = fleet(shared=True)
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
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused the version even if its bytes were right, because its slot could have been used again."""
    ranks = fleet(4.0, shared=True)
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
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = fleet(2.0, shared=True)
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
