"""Trainer ranks and engine workers of this process that take part in updates."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.actors.weight_sync.pairs.group_receiver import GroupReceiver
from headrace.actors.weight_sync.pairs.group_sender import GroupSender
from headrace.actors.weight_sync.pairs.group_wire import PairGroup
from headrace.actors.weight_sync.pairs.neighbour_receiver import NeighbourReceiver
from headrace.actors.weight_sync.pairs.neighbour_sender import NeighbourSender
from headrace.actors.weight_sync.pairs.pair_sender import KIND, location_of
from headrace.actors.weight_sync.plan.regions import Party, held
from headrace.actors.weight_sync.plan.transfer_plan import TransferPlan, plan_transfer
from headrace.actors.weight_sync.transports.protocol import ReceiverGroup, WeightTransferError, WeightUpdate
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
    """Three trainer ranks with the rows of weights, and two engines of two workers with their columns.

    They meet in process groups; a subclass has other senders and receivers.
    """

    def __init__(self, timeout_s: float = 20.0, gpus: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        """gpus: the rank beside which each worker is, by number of the worker; () if all have GPUs of their own. hosts:
        that of each worker; () if each is on its own."""
        self.timeout_s = timeout_s
        self.gpus = gpus
        self.places = [*itertools.product(range(ENGINES), range(TP))]
        hosts = hosts or [f"{engine} {worker}" for engine, worker in self.places]
        self.senders = [self.sender(rank) for rank in range(SENDERS)]
        self.receivers = [self.receiver(number) for number in range(len(self.places))]
        self.plan: TransferPlan = plan_transfer(
            SPECS,
            [party(0, SENDERS, rank, f"trainer {rank}") for rank in range(SENDERS)],
            [party(1, TP, worker, host) for host, (_, worker) in zip(hosts, self.places, strict=True)],
            640,
        )
        self.staged = [part(weights(0), 1, TP, worker) for _, worker in self.places]
        self._number = itertools.count(1)

    def sender(self, rank: int) -> Any:
        """A rank that has just started."""
        own = (rank, "127.0.0.1", KEY, self.timeout_s, CPU)
        return NeighbourSender(*own, f"gpu {rank}") if self.gpus else GroupSender(*own)

    def receiver(self, number: int) -> Any:
        """A worker that has just started."""
        engine, worker = self.places[number]
        own = (f"engine-{engine}", worker, KEY, CPU)
        return NeighbourReceiver(*own, f"gpu {self.gpus[number]}") if self.gpus else GroupReceiver(*own)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        for receiver in self.receivers:
            receiver.leave() if type(receiver) is GroupReceiver else receiver.close()

    def announced(self, version: int, number: int) -> WeightUpdate:
        location = location_of(number, [sender.address for sender in self.senders])
        return WeightUpdate(version, None, KIND, location, 0, GROUPS, self.timeout_s)

    def update(self, version: int, during: Callable[[], None] = lambda: None) -> tuple[list[str], list[str]]:
        """Bring all workers to a version. Returns how sending and receiving ended, as `outcomes` does."""
        announced = self.announced(version, next(self._number))
        rows = [part(weights(version), 0, SENDERS, rank) for rank in range(SENDERS)]
        return outcomes(self.senders, self.receivers, self.plan, announced, rows, self.staged, during)

    def has(self, version: int, rank: int) -> bool:
        expected = part(weights(version), 1, TP, self.places[rank][1])
        return all(torch.equal(self.staged[rank][name], one) for name, one in expected.items())

    def expect_whole(self, version: int) -> None:
        assert self.update(version) == ([""] * SENDERS, [""] * len(self.receivers))
        assert all(self.has(version, rank) for rank in range(len(self.receivers)))

    def expect_lost_worker(self, sent: Sequence[str], got: Sequence[str]) -> None:
        """Expect that an update has blamed the worker 1 of the engine 0, which was lost, and ended for all."""
        assert "killed" in got[1] and all(got) and all(sent)
        assert all(one.startswith("engine-0|") and "engine-0 worker 1 is lost" in one for one in sent), sent
        assert all("has ended the update" in got[rank] for rank in (0, 2, 3)), got

    def update_without(
        self, monkeypatch: pytest.MonkeyPatch, lost: Any, at: int, cut_off: Callable[[], None], version: int
    ) -> Any:
        """Update to a version, and lose a member at a round of its group: it is cut off and fails."""
        rounds, original = itertools.count(), PairGroup.exchange

        def exchange(group: PairGroup, sends: Any, takes: Any) -> Any:
            if group is lost._group and next(rounds) == at:
                cut_off()
                raise WeightTransferError("killed")
            return original(group, sends, takes)

        with monkeypatch.context() as patch:
            patch.setattr(PairGroup, "exchange", exchange)
            return self.update(version)

    def expect_lost_rank(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        """Lose the rank 2 at a round of its group, and expect that no engine is blamed and the next version goes on."""
        lost = self.senders[2]
        sent, got = self.update_without(monkeypatch, lost, at, lambda: lost._tracker.close(), 1)
        told = r"sender 2 at 127.0.0.1:\d+.*is lost|gave up|has ended the update"
        assert all(re.search(told, one) for one in got) and any("sender 2" in one for one in got), got
        assert all(one.startswith("|") for one in sent), sent
        self.expect_whole(2)

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
