"""Engine workers on the GPUs of trainer ranks: versions arrive whole, and faults are told apart.

Memory of CPUs stands in for that of GPUs, and gloo for NCCL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs import neighbour_receiver, neighbour_sender
from headrace.actors.weight_sync.pairs.device_slots import DeviceSlots, OpenSlots, neighbours
from headrace.actors.weight_sync.pairs.group_wire import WIDTH, PairGroup
from headrace.actors.weight_sync.pairs.neighbour_receiver import NeighbourReceiver
from headrace.actors.weight_sync.pairs.neighbour_sender import NeighbourSender
from headrace.actors.weight_sync.plan.packing import Unpacker
from headrace.actors.weight_sync.plan.transfer_plan import Bucket, plan_transfer
from headrace.actors.weight_sync.transports.protocol import Deadline, WeightTransferError
from headrace.tests.actors.weight_sync.pairs.group_members import SPECS, TP, Members, Tensors, party

GPUS = (0, 1, 2, 0)
"""The rank beside which each worker is: rank 0 has two."""
CPU = torch.device("cpu")


KIND = partial(Members, gpus=GPUS)


def test_a_worker_has_the_rank_on_its_gpu_or_one_on_its_host() -> None:
    ranks = ["a on 1", "b on 1", "a on 2"]
    assert neighbours(ranks, ["b on 1", "a on 1", "a on 2", "c on 1", "d on 1"]) == [1, 0, 2, 0, 1]
    with pytest.raises(ValueError, match="no train rank is on the host of worker 1"):
        neighbours(ranks, ["a on 1", "a on 3"])


@pytest.mark.parametrize(
    "gpus",
    [GPUS, (0, 0, 0, 0), (2, 2, 1, 1), (7, 7, 1, 8)],
    ids=["two beside one", "all beside one", "rank 0 alone", "gpus without a rank"],
)
def test_versions_arrive_whole_and_the_group_is_kept(members: Callable[..., Members], gpus: Sequence[int]) -> None:
    ranks = members(gpus=gpus)
    ranks.expect_whole(1)
    [group] = {sender._group.name for sender in ranks.senders if sender._group is not None}
    for version in (2, 5):
        ranks.expect_whole(version)
    assert {sender._group and sender._group.name for sender in ranks.senders} == {group}


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_bounded_and_the_same_for_both_ends(seed: int) -> None:
    """No rank has more buckets in a round than slots, and no two ranks wait in a circle."""
    generator = torch.Generator().manual_seed(seed)
    num = [int(torch.randint(1, 6, (), generator=generator)) for _ in range(2)]
    by = torch.randint(0, num[0], (num[1],), generator=generator).tolist()
    senders, receivers = (
        [party(axis, count, at, f"{axis} {at}") for at in range(count)] for axis, count in enumerate(num)
    )
    plan = plan_transfer(SPECS, senders, receivers, 64 * (seed + 1))
    every = []
    for rank in range(num[0]):
        sender = NeighbourSender.__new__(NeighbourSender)
        sender._neighbours = by
        every.append(sender._rounds(plan, rank))
        assert all(len(one.sends) <= WIDTH and len(one.hands) <= WIDTH for one in every[-1])
    handed = [one for rounds in every for part in rounds for one in part.hands]
    assert sorted(one.number for one in handed) == [*range(len(plan.buckets.nbytes))]
    for receiver in range(num[1]):
        numbers = [one.number for part in every[by[receiver]] for one in part.hands if one.receiver == receiver]
        assert numbers == [bucket.number for bucket in plan.taking(receiver)]
    left, moved = [len(rounds) for rounds in every], set[int]()
    while any(left):  # A bucket moves once it is in the present rounds of both ends; then a round can end.
        now = {rank: rounds[-more] for rank, (rounds, more) in enumerate(zip(every, left, strict=True)) if more}
        taken = {rank: {one.number for one in part.hands if one.sender != rank} for rank, part in now.items()}
        sent = {rank: {bucket.number for bucket in part.sends} for rank, part in now.items()}
        moved |= set().union(*sent.values()) & set().union(*taken.values())
        ended = [rank for rank in now if taken[rank] | sent[rank] <= moved]
        assert ended
        for rank in ended:
            left[rank] -= 1


def test_a_rank_alone_exchanges_nothing(members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are packed where the worker reads them: no other buffers are made."""
    made: list[int] = []
    original = PairGroup.buffers

    def buffers(self: PairGroup, nbytes: int) -> Sequence[torch.Tensor]:
        made.append(nbytes)
        return original(self, nbytes)

    monkeypatch.setattr(PairGroup, "buffers", buffers)
    monkeypatch.setattr("headrace.tests.actors.weight_sync.pairs.group_members.SENDERS", 1)
    ranks = members(gpus=(0, 0, 0, 0))
    for version in (1, 2):
        ranks.expect_whole(version)
    assert made == [0, 0]


def test_memory_of_another_process_is_not_taken_for_that_of_the_rank() -> None:
    slots, reader = DeviceSlots(100, CPU), OpenSlots(CPU)
    slots.slots[3][:4] = 7
    deadline = Deadline("worker", 1, 1.0)
    assert reader.open(slots.message, deadline)[3][:4].tolist() == [7] * 4
    wrong = slots.message[:-1] + bytes([slots.message[-1] ^ 1])
    with pytest.raises(WeightTransferError, match="cannot be opened: .* belongs to another process"):
        reader.open(wrong, deadline)
    reader.close()


def test_a_damaged_bucket_is_told_and_harms_no_other(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is that of the rank that packed the bucket, so that damage on the way between ranks is noticed."""
    ranks = members()
    ranks.expect_whole(1)
    exchange, hurt = PairGroup.exchange, itertools.count()

    def damage(self: PairGroup, sends: Any, takes: Any) -> Any:
        if sends and next(hurt) == 0:
            sends = [(sends[0][0] + 1, *sends[0][1:]), *sends[1:]]
        return exchange(self, sends, takes)

    with monkeypatch.context() as patch:
        patch.setattr(PairGroup, "exchange", damage)
        sent, got = ranks.update(2)
    [worker] = [rank for rank, error in enumerate(got) if error]
    assert re.search(r"sender \d at 127.0.0.1:\d+: bucket \d+ is damaged: its digest differs", got[worker]), got
    assert all(one.startswith(f"engine-{worker // TP}|") and "is damaged" in one for one in sent), sent
    assert all(ranks.has(2, rank) for rank in range(len(got)) if rank != worker)
    ranks.expect_whole(3)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_lost_worker_is_named_at_any_bucket(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    ranks = members()
    ranks.expect_whole(1)
    lost, buckets = ranks.receivers[1], itertools.count()

    def take(self: Unpacker, key: str, bucket: Bucket, payload: torch.Tensor, tensors: Tensors, staying: Any) -> Any:
        if self is lost._unpacker and next(buckets) == at:
            for sender in lost._senders:
                sender.link.close()
            raise WeightTransferError("killed")
        return original(self, key, bucket, payload, tensors, staying)

    original = Unpacker.take
    with monkeypatch.context() as patch:
        patch.setattr(Unpacker, "take", take)
        sent, got = ranks.update(2)
    ranks.expect_lost_worker(sent, got)
    ranks.receivers[1] = ranks.receiver(1)
    ranks.expect_whole(3)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_lost_rank_is_no_fault_of_an_engine(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    members().expect_lost_rank(monkeypatch, at)


def test_bytes_that_come_late_for_a_failed_version_do_not_reach_the_next(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exchange that is given up can still write into the slots into which it takes buckets."""
    ranks, late = members(), list[torch.Tensor]()
    ranks.expect_whole(1)
    original = PairGroup.exchange

    def fail(self: PairGroup, sends: Any, takes: Any) -> Any:
        late.extend(one for one, *_ in takes)
        raise WeightTransferError("killed")

    def come_late(self: PairGroup, sends: Any, takes: Any) -> Any:
        for one in late:
            one.fill_(255)
        return original(self, sends, takes)

    with monkeypatch.context() as patch:
        patch.setattr(PairGroup, "exchange", fail)
        assert all(ranks.update(2)[1]) and late
        patch.setattr(PairGroup, "exchange", come_late)
        ranks.expect_whole(3)


def test_a_silent_worker_is_at_fault_and_those_that_wait_are_not(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members(3.0)
    ranks.expect_whole(1)
    hung = ranks.receivers[2]

    def ended() -> bool:
        notes = [one.link.receive(neighbour_receiver.Note, 0) for one in hung._senders]
        return any(isinstance(note, neighbour_receiver.Note) and note.kind == "abort" for note in notes)

    def take(self: Unpacker, key: str, bucket: Bucket, payload: torch.Tensor, tensors: Tensors, staying: Any) -> Any:
        if self is hung._unpacker:  # It says nothing, as a stopped process does, until the ranks end it.
            Deadline("hung", 2, 20.0).wait(ended, lambda: ("", ()))
            raise WeightTransferError("stopped")
        return original(self, key, bucket, payload, tensors, staying)

    original = Unpacker.take
    with monkeypatch.context() as patch:
        patch.setattr(Unpacker, "take", take)
        sent, got = ranks.update(2)
    ranks.expect_silence(sent, got, 3)


def test_an_abort_ends_an_update_at_any_moment(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    members().expect_abort(neighbour_sender, monkeypatch)


def test_a_worker_that_has_started_again_takes_the_next_version(members: Callable[..., Members]) -> None:
    ranks = members()
    ranks.expect_whole(1)
    receiver = ranks.receivers[0]
    assert isinstance(receiver, NeighbourReceiver)
    receiver.close()
    ranks.receivers[0] = ranks.receiver(0)
    ranks.expect_whole(2)
