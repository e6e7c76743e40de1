"""`NeighbourSender` sends one trainer rank's part of a version where engine workers are on the trainers' GPUs.

    pack a round -> exchange it between ranks -> hand what came, and own buckets, to the worker on this GPU -> ...

NCCL cannot have two processes of a group on one GPU, so the group has only ranks. A worker reads its buckets in the
memory of its neighbour, the rank on its GPU (`device_slots`). Digests are those of the ranks that packed the buckets.
With one rank nothing is exchanged.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ....codecs.weights.gpu_scatter import device_digest
from ..plan.packing import pack
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.control_link import Note, ReceiverTracker
from ..transports.protocol import BucketFrame, Deadline, WeightUpdate
from .device_slots import DeviceSlots, neighbours, place_of
from .group_sender import GroupSender
from .group_wire import WIDTH, Exchange, Part, finish, rounds_of

_TICK_S = 5e-5


@dataclass(frozen=True, slots=True)
class _Handed:
    """A bucket that a rank hands to a worker."""

    number: int
    sender: int
    receiver: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Round:
    """The buckets of one round of a rank."""

    sends: list[Bucket] = field(default_factory=list[Bucket])
    """Buckets for workers of other ranks."""
    hands: list[_Handed] = field(default_factory=list[_Handed])
    """Buckets for this rank's own workers."""


class NeighbourSender(GroupSender):
    """One of the senders of a version, each with its engine workers beside it. The ranks' group is over NCCL if weights
    are on a GPU, else over gloo."""

    def __init__(self, rank: int, host: str, key: bytes, timeout_s: float, device: torch.device, gpu: str = "") -> None:
        """Listen on `host` for receivers, as `GroupSender` does. gpu: as for `place_of`."""
        super().__init__(rank, host, key, timeout_s, device)
        self.place = place_of(device, gpu)
        """GPU and host of this rank."""
        self.address += f"|{self.place}"
        self._slots: DeviceSlots | None = None
        self._neighbours: Sequence[int] = ()
        """The rank that hands each worker its buckets, by number of the worker in the plan."""

    def close(self) -> None:
        super().close()
        self._slots = None

    # ---------------- These methods are private.

    def _tell_start(
        self, name: str, update: WeightUpdate, plan: TransferPlan, rank: int, tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Tell all receivers the name of the group, and this rank's own workers where its slots are."""
        ranks = [address.split("|")[4] for address in update.location.split(";")[1:]]
        try:
            self._neighbours = neighbours(ranks, [tracker.hosts[worker] for worker in sorted(tracker.hosts)])
        except ValueError as error:
            raise deadline.error(str(error)) from error
        columns = plan.buckets.receiver.tolist(), plan.buckets.nbytes.tolist()
        own = [nbytes for worker, nbytes in zip(*columns, strict=True) if self._neighbours[worker] == rank]
        kept = self._group is not None and self._group.name == name
        # Buckets of an update that has failed can still come into the slots of the group before.
        if self._slots is None or not kept or self._slots.nbytes < max(own, default=0):
            self._slots = None
            self._slots = DeviceSlots(max(own, default=0), self._device)
        for worker, neighbour in enumerate(self._neighbours):
            tracker.tell(Note("start", name, data=self._slots.message if neighbour == rank else b""), worker + 1)

    def _rounds(self, plan: TransferPlan, rank: int) -> list[_Round]:
        """Return the rounds of this rank. An exchanged bucket is in rounds of equal number at both ends."""
        columns = plan.buckets.sender.tolist(), plan.buckets.receiver.tolist(), plan.buckets.nbytes.tolist()
        every = [_Handed(number, *one) for number, one in enumerate(zip(*columns, strict=True))]
        by = self._neighbours
        # A bucket that is not exchanged keeps only the rank busy that hands it over.
        ends = [
            {("hands", by[one.receiver]), ("hands" if by[one.receiver] == one.sender else "sends", one.sender)}
            for one in every
        ]
        made: dict[int, _Round] = defaultdict(_Round)
        own = {bucket.number: bucket for bucket in plan.sending(rank)}
        for one, number in zip(every, rounds_of(ends), strict=True):
            if by[one.receiver] == rank:
                made[number].hands.append(one)
            elif one.sender == rank:
                made[number].sends.append(own[one.number])
        return [made[number] for number in sorted(made)]

    def _stream(
        self, plan: TransferPlan, rank: int, tensors: Mapping[str, torch.Tensor], tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> dict[int, bytes]:  # fmt: skip
        """Send and hand over all rounds. Returns for each receiver the digests of its buckets in order, int64."""
        group, slots = self._group, self._slots
        assert group is not None and slots is not None
        group.slots = slots.slots
        rounds, own = self._rounds(plan, rank), {bucket.number: bucket for bucket in plan.sending(rank)}
        memory = group.buffers(max((one.nbytes for part in rounds for one in part.sends), default=0))
        running: deque[tuple[Exchange, int, Sequence[_Handed]]] = deque()
        found: dict[int, list[torch.Tensor]] = defaultdict(list)
        for number, part in enumerate(rounds):
            first = number % 2 * WIDTH
            if number >= 2:
                self._await_room(rounds[number - 2].hands, tracker, deadline)
            packed: list[tuple[int, torch.Tensor]] = []
            sends: list[Part] = []
            takes: list[Part] = []
            for at, one in enumerate(part.hands, first):
                payload = slots.slots[at][: one.nbytes]
                if one.sender == rank:
                    pack(own[one.number], tensors, payload)
                    packed.append((one.receiver, payload))
                else:
                    takes.append((payload, one.sender, one.number))
            for at, bucket in enumerate(part.sends, first):
                payload = memory[at][: bucket.nbytes]
                pack(bucket, tensors, payload)
                packed.append((bucket.receiver, payload))
                sends.append((payload, self._neighbours[bucket.receiver], bucket.number))
            running.append((group.exchange(sends, takes), first, part.hands))
            for receiver, payload in packed:  # While they travel.
                found[receiver].append(device_digest(payload))
            # The next round is packed while the workers read this one, and while the ranks exchange it.
            while len(running) > (1 if sends or takes else 0):
                self._hand_over(*running.popleft(), tracker, deadline)
            self.num_moves += 1
        while running:
            self._hand_over(*running.popleft(), tracker, deadline)
        empty = {receiver: b"" for receiver in range(tracker.world - 1)}
        return empty | {to: torch.stack(each).cpu().numpy().tobytes() for to, each in found.items()}

    def _await_room(self, before: Sequence[_Handed], tracker: ReceiverTracker, deadline: Deadline) -> None:
        """Wait until the workers are through with the buckets that were in the slots before."""
        what, moved = "not taken", -1

        def through() -> bool:
            nonlocal moved
            self._look(tracker, deadline, what)
            num_through = sum(tracker.through[one.receiver + 1] >= one.number for one in before)
            if num_through > moved:
                moved = num_through
                deadline.moved()
            return num_through == len(before)

        deadline.wait(through, lambda: self._blame(tracker, what), _TICK_S)

    def _hand_over(
        self, running: Exchange, first: int, hands: Sequence[_Handed], tracker: ReceiverTracker, deadline: Deadline
    ) -> None:
        """Wait until the buckets of a round are in the slots from `first` on, and tell their workers."""
        what = "not taken"
        look = functools.partial(self._look, tracker, deadline, what)
        finish(running, deadline, look, functools.partial(self._blame, tracker, what))
        for slot, one in enumerate(hands, first):
            frame = BucketFrame(one.number, "whole", one.nbytes, 0)
            tracker.tell(Note("frame", number=slot, frame=frame), one.receiver + 1)
