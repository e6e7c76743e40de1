"""Many senders in one process group: versions arrive whole, and faults are told apart. gloo stands in for NCCL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs import group_receiver, group_sender
from headrace.actors.weight_sync.pairs.group_wire import WIDTH, in_rounds
from headrace.actors.weight_sync.plan.transfer_plan import plan_transfer
from headrace.actors.weight_sync.transports.protocol import WeightTransferError
from headrace.tests.actors.weight_sync.pairs.group_members import SENDERS, SPECS, TP, Members, party

KIND = Members


def groups(members: Members) -> set[str]:
    """Names of the process groups that the members are in."""
    return {"" if one._group is None else one._group.name for one in (*members.senders, *members.receivers)}


@pytest.mark.parametrize("seed", range(4))
def test_rounds_are_bounded_and_the_same_for_both_ends(seed: int) -> None:
    """No process has more buckets in a round than buffers, none goes back, and no two processes wait in a circle."""
    generator = torch.Generator().manual_seed(seed)
    num = [int(torch.randint(1, 6, (), generator=generator)) for _ in range(2)]
    senders, receivers = (
        [party(axis, count, at, f"{axis} {at}") for at in range(count)] for axis, count in enumerate(num)
    )
    plan = plan_transfer(SPECS, senders, receivers, 64 * (seed + 1))
    sends = [in_rounds(plan, plan.sending(rank)) for rank in range(num[0])]
    takes = [in_rounds(plan, plan.taking(rank)) for rank in range(num[1])]
    assert all(len(one) <= WIDTH for rounds in (*sends, *takes) for one in rounds)
    for rounds, ordered in ((sends, plan.sending), (takes, plan.taking)):
        for rank, own in enumerate(rounds):
            assert [*itertools.chain(*own)] == ordered(rank)
    left, ready = len(plan.buckets.nbytes), True
    while left and ready:  # A round ends once all its buckets are in the present round of both ends.
        now = [{bucket.number for bucket in rounds[0]} if rounds else set() for rounds in sends]
        taken = [{bucket.number for bucket in rounds[0]} if rounds else set() for rounds in takes]
        moving = set().union(*now) & set().union(*taken)
        ready = False
        for rounds in (*sends, *takes):
            if rounds:
                before = len(rounds[0])
                rounds[0][:] = [bucket for bucket in rounds[0] if bucket.number not in moving]
                ready = ready or len(rounds[0]) < before
                if not rounds[0]:
                    rounds.pop(0)
        left -= len(moving)
    assert not left


def test_versions_arrive_whole_and_the_group_is_kept(members: Callable[..., Members]) -> None:
    ranks = members()
    assert all(len(in_rounds(ranks.plan, ranks.plan.sending(rank))) > 4 for rank in range(SENDERS))
    ranks.expect_whole(1)
    [group] = groups(ranks)
    for version in (2, 5):
        ranks.expect_whole(version)
    assert groups(ranks) == {group} and group


def test_a_damaged_bucket_is_told_and_harms_no_other(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members()
    numbers = itertools.count()
    original = group_sender.device_digest
    with monkeypatch.context() as patch:
        patch.setattr(group_sender, "device_digest", lambda payload: original(payload) ^ (next(numbers) == 0))
        sent, got = ranks.update(1)
    [hurt] = [rank for rank, error in enumerate(got) if error]
    assert re.search(r"sender \d at 127.0.0.1:\d+: bucket \d+ is damaged: its digest differs", got[hurt]), got
    assert all(one.startswith(f"engine-{hurt // TP}|") and "is damaged" in one for one in sent), sent
    assert all(ranks.has(1, rank) for rank in range(len(got)) if rank != hurt)
    ranks.expect_whole(2)


def test_a_lost_receiver_is_named_and_the_next_version_goes_on(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members()
    ranks.expect_whole(1)
    lost = ranks.receivers[1]

    def cut_off() -> None:
        for sender in lost._senders:
            sender.link.close()

    sent, got = ranks.update_without(monkeypatch, lost, 2, cut_off, 2)
    ranks.expect_lost_worker(sent, got)
    assert groups(ranks) == {""}
    ranks.expect_whole(3)


def test_a_lost_sender_is_no_fault_of_an_engine(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    members().expect_lost_rank(monkeypatch, 3)


def test_a_silent_receiver_is_at_fault_and_those_that_wait_are_not(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = members(3.0)
    ranks.expect_whole(1)
    hung = ranks.receivers[2]
    original = group_receiver.finish

    def finish(running: Any, deadline: Any, look: Any, late: Any) -> None:
        if deadline.end == hung._name:  # It says nothing, as a stopped process does, until the senders end it.
            deadline.wait(
                lambda: any(one.link.receive(group_receiver.Note, 0) for one in hung._senders), lambda: ("", ())
            )
            raise WeightTransferError("stopped")
        original(running, deadline, look, late)

    with monkeypatch.context() as patch:
        patch.setattr(group_receiver, "finish", finish)
        sent, got = ranks.update(2)
    ranks.expect_silence(sent, got, 3)


def test_an_abort_ends_an_update_at_any_moment(
    members: Callable[..., Members], monkeypatch: pytest.MonkeyPatch
) -> None:
    members().expect_abort(group_sender, monkeypatch)


def test_an_engine_that_has_started_again_gets_a_new_group(members: Callable[..., Members]) -> None:
    ranks = members()
    ranks.expect_whole(1)
    ranks.receivers[0].leave()
    ranks.receivers[0] = ranks.receiver(0)
    ranks.expect_whole(2)
    rendezvous = ranks.senders[0]._rendezvous
    assert rendezvous is not None
    [name] = {key.partition("/")[0] for key in rendezvous._values}
    ranks.senders[1]._leave()  # Only one sender: the receivers see that the senders do not agree.
    sent, got = ranks.update(3)
    assert all("not in the same process group" in one for one in got) and all(one[0] == "|" for one in sent), (
        sent,
        got,
    )
    ranks.expect_whole(4)
    [another] = {key.partition("/")[0] for key in rendezvous._values}
    assert another != name, "what a failed group has left is forgotten"
    ranks.receivers[0].leave()
