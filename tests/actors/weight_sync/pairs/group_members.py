"""Trainer ranks and engine workers of this process that take part in updates over a process group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from headrace.actors.weight_sync.pairs.group_receiver import GroupReceiver
from headrace.actors.weight_sync.pairs.group_sender import GroupSender
from headrace.actors.weight_sync.pairs.neighbour_receiver import NeighbourReceiver
from headrace.actors.weight_sync.pairs.neighbour_sender import NeighbourSender
from headrace.actors.weight_sync.pairs.pair_sender import KIND, location_of
from headrace.actors.weight_sync.plan.layouts import held
from headrace.actors.weight_sync.plan.regions import Party
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup, WeightUpdate
from headrace.dataplane.security.handshake import new_key
from headrace.tests.actors.weight_sync.pairs.outcomes import expect_abort_while_sending, outcomes

SPECS = {"w": (torch.float32, (64, 40)), "odd": (torch.bfloat16, (7, 3)), "scalar": (torch.float32, ())}
SENDERS, ENGINES, TP = 3, 2, 2
GROUPS = tuple(ReceiverGroup(f"engine-{number}", TP) for number in range(ENGINES))
KEY, CPU = new_key(), torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def weights(version: int) -> Tensors:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SPECS.items()}


def part(whole: Tensors, axis: int, num: int, index: int) -> Tensors:
    """Part of each weight; a weight without this axis is not cut."""
    cut = {name: one.chunk(num, axis) if one.ndim > axis else (one,) * num for name, one in whole.items()}
    return {name: parts[index].clone() for name, parts in cut.items()}


def party(axis: int, num: int, index: int, host: str) -> Party:
    cuts = {name: [(axis, num, index)] if len(shape) > axis else [] for name, (_, shape) in SPECS.items()}
    return Party(host, tuple(one for name, (_, shape) in SPECS.items() for one in held(name, shape, cuts[name])))


class Members:
    """Three trainer ranks with the rows of weights, and two engines of two workers with their columns."""

    def __init__(self, timeout_s: float, gpus: Sequence[int] = ()) -> None:
        """gpus: the rank beside which each worker is, by number of the worker; () if all have GPUs of their own."""
        self.timeout_s = timeout_s
        self.places = [*itertools.product(range(ENGINES), range(TP))]
        self.senders: list[GroupSender] = []
        self.receivers: list[GroupReceiver] = []
        for rank in range(SENDERS):
            own = (rank, "127.0.0.1", KEY, timeout_s, CPU)
            self.senders.append(NeighbourSender(*own, f"gpu {rank}") if gpus else GroupSender(*own))
        for number in range(len(self.places)):
            self.receivers.append(self.receiver(number, gpus))
        self.plan: TransferPlan = plan_transfer(
            SPECS,
            [party(0, SENDERS, rank, f"trainer {rank}") for rank in range(SENDERS)],
            [party(1, TP, worker, f"{engine} {worker}") for engine, worker in self.places],
            640,
        )
        self.staged = [part(weights(0), 1, TP, worker) for _, worker in self.places]
        self._number = itertools.count(1)

    def receiver(self, number: int, gpus: Sequence[int] = ()) -> GroupReceiver:
        """A worker that has just started."""
        engine, worker = self.places[number]
        own = (f"engine-{engine}", worker, KEY, CPU)
        return NeighbourReceiver(*own, f"gpu {gpus[number]}") if gpus else GroupReceiver(*own)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers:
            receiver.close() if isinstance(receiver, NeighbourReceiver) else receiver.leave()

    def update(self, version: int) -> tuple[list[str], list[str]]:
        """Bring all workers to a version. Returns how sending and receiving ended, as `outcomes` does."""
        location = location_of(next(self._number), [sender.address for sender in self.senders])
        update = WeightUpdate(version, None, KIND, location, 0, GROUPS, self.timeout_s)
        rows = [part(weights(version), 0, SENDERS, rank) for rank in range(SENDERS)]
        return outcomes(self.senders, self.receivers, self.plan, update, rows, self.staged)

    def has(self, version: int, rank: int) -> bool:
        expected = part(weights(version), 1, TP, self.places[rank][1])
        return all(torch.equal(self.staged[rank][name], one) for name, one in expected.items())

    def expect_whole(self, version: int) -> None:
        assert self.update(version) == ([""] * SENDERS, [""] * len(self.receivers))
        assert all(self.has(version, rank) for rank in range(len(self.receivers)))

    def expect_silence(self, sent: Sequence[str], got: Sequence[str], version: int) -> None:
        """Expect that an update has blamed the engine 1, which hung, alone, and that the next one goes on."""
        assert all(got) and all(one.startswith(("engine-1|", "|")) for one in sent), (sent, got)
        assert any(one.startswith("engine-1|") and "engine-1 worker 0 is silent" in one for one in sent), sent
        self.expect_whole(version)

    def expect_abort(self, sending: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Abort an update while it is sent, and one before it begins. sending: module of the senders, which packs."""
        expect_abort_while_sending(self, sending, monkeypatch)
        self.senders[1].abort("an engine failed", 2)  # Before the update has begun.
        sent, got = self.update(2)
        assert "aborted: an engine failed" in sent[1] and all(sent) and all(got), (sent, got)
        self.expect_whole(3)
