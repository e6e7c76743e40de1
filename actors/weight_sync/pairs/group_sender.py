"""`GroupSender` sends one trainer rank's part of a version in a process group of all senders and receivers.

    all here -> group -> pack a round -> exchange it, digest it -> ... -> digests -> all done

Messages go over the links that `PairSender` has, one to every receiver. A member that is lost ends the update for all,
because the group cannot go on without it; the next update makes a new group.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

import torch

from ....codecs.weights.gpu_scatter import device_digest
from ...process.rendezvous_store import RendezvousServer
from ..plan.packing import pack
from ..plan.transfer_plan import TransferPlan
from ..transports.control_link import Note, ReceiverTracker
from ..transports.protocol import Deadline, ReceiverGroup, WeightUpdate
from .group_wire import WIDTH, Exchange, Meeting, PairGroup, finish, in_rounds, join
from .pair_sender import RankSender, number_of

_TICK_S = 5e-5
_SILENT_S = 2.0
"""Seconds without a message after which a receiver may be at fault for an update that does not move."""


class GroupSender(RankSender):
    """One of the senders of a version, over NCCL if its weights are on a GPU, else over gloo."""

    def __init__(self, rank: int, host: str, key: bytes, timeout_s: float, device: torch.device) -> None:
        """Listen on `host` for receivers, as `RankSender` does. rank: number of the sender in the plan. Sender 0 serves
        the rendezvous. device: device of the weights."""
        super().__init__(host, key, timeout_s)
        self._host, self._key, self._device = host, key, device
        self._rendezvous = RendezvousServer(host, key) if rank == 0 else None
        port = 0 if self._rendezvous is None else self._rendezvous.port
        self.address = f"{host}|{self._links.port}|{port}|{'nccl' if device.type == 'cuda' else 'gloo'}"
        self._group: PairGroup | None = None
        self._members: tuple[ReceiverGroup, ...] = ()
        """Receivers in the group."""

    def send(self, update: WeightUpdate, plan: TransferPlan, rank: int, tensors: Mapping[str, torch.Tensor]) -> int:
        """Send this rank's buckets of `plan`: as `PairSender.send`, with the local tensors on the sender's device."""
        deadline = Deadline(f"sender {rank}", update.version, self._timeout_s - min(1.0, 0.1 * self._timeout_s))
        self._number = number_of(update)
        self._tracker = tracker = ReceiverTracker(self._number, update.receivers, self._links, self._timeout_s)
        look = functools.partial(self._look, tracker, deadline)
        try:
            self._meet(update, plan, rank, tracker, deadline)
            for receiver, digests in self._stream(plan, rank, tensors, tracker, deadline).items():
                tracker.tell(Note("end", data=digests), receiver + 1)
            deadline.wait(lambda: look(None) or tracker.over, lambda: self._blame(tracker, "not confirmed"))
            if tracker.failed or tracker.gave_up:
                raise deadline.error(*self._blame(tracker, "not received"))
        except BaseException as error:
            self._leave()
            self.abort(f"{type(error).__name__}: {error}")
            tracker.end(self._links.ended(self._number))  # An abort just before the start did not know the tracker.
            raise
        finally:
            self._tracker = None
            tracker.close()
        self.needs = {rank - 1: data for rank, data in tracker.needs.items()}
        self.hosts = {rank - 1: host for rank, host in tracker.hosts.items()}
        return int(plan.bytes_sent[rank])

    def close(self) -> None:
        super().close()
        self._leave()
        if self._rendezvous is not None:
            self._rendezvous.close()

    # ---------------- These methods are private.

    def _meet(
        self, update: WeightUpdate, plan: TransferPlan, rank: int, tracker: ReceiverTracker, deadline: Deadline
    ) -> None:
        """Wait until all receivers have connected, and make the group, unless all are still in the last one."""
        look, meeting = functools.partial(self._look, tracker, deadline), Meeting.of(update)
        assert meeting is not None
        others = tracker.world - 1
        deadline.wait(
            lambda: look("at the start") or len(tracker.groups) == others, lambda: tracker.blame("not here"), _TICK_S
        )
        old = None if self._group is None else self._group.name
        kept = self._members == update.receivers and {old} == {*tracker.groups.values()}
        name = old if kept and old else f"group-{meeting.port}-{self._number}"
        self._tell_start(name, update, plan, rank, tracker, deadline)
        if name == old:
            return
        self._leave()
        num_senders = update.location.count(";")
        if self._rendezvous is not None:
            self._rendezvous.clear_others(name)
        place = rank, num_senders, num_senders + (0 if meeting.only_senders else others)
        what = functools.partial(look, "making the group")
        self._group = join(meeting, self._key, name, place, self._host, self._device, deadline, what)
        self._members = update.receivers

    def _tell_start(
        self, name: str, update: WeightUpdate, plan: TransferPlan, rank: int, tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Tell all receivers the name of the group in which the update is sent."""
        tracker.tell(Note("start", name))

    def _stream(
        self, plan: TransferPlan, rank: int, tensors: Mapping[str, torch.Tensor], tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> dict[int, bytes]:  # fmt: skip
        """Send the buckets in rounds. Returns for each receiver the digests of its buckets in order, int64."""
        group, what = self._group, "not taken"
        assert group is not None
        buckets = plan.sending(rank)
        memory = group.buffers(max((bucket.nbytes for bucket in buckets), default=0))
        running: list[Exchange | None] = [None, None]
        late = functools.partial(self._blame, tracker, what)
        done = functools.partial(finish, deadline=deadline, look=lambda: self._look(tracker, deadline, what), late=late)
        found: dict[int, list[torch.Tensor]] = defaultdict(list)
        for number, part in enumerate(in_rounds(plan, buckets)):
            done(running[number % 2])
            payloads = [memory[number % 2 * WIDTH + slot][: bucket.nbytes] for slot, bucket in enumerate(part)]
            for bucket, payload in zip(part, payloads, strict=True):
                pack(bucket, tensors, payload)
            to = [(group.num_senders + bucket.receiver, bucket.number) for bucket in part]
            running[number % 2] = group.exchange([(one, *at) for one, at in zip(payloads, to, strict=True)], ())
            for bucket, payload in zip(part, payloads, strict=True):  # While it travels.
                found[bucket.receiver].append(device_digest(payload))
            self.num_moves += 1
        for one in running:
            done(one)
        empty = {receiver: b"" for receiver in range(tracker.world - 1)}
        return empty | {to: torch.stack(each).cpu().numpy().tobytes() for to, each in found.items()}

    def _look(self, tracker: ReceiverTracker, deadline: Deadline, what: str | None) -> None:
        """Read the receivers' messages. Raises WeightTransferError if the update was aborted, or if a receiver is lost
        and `what` is not None. what: operation to name in that error."""
        self._check(deadline)
        heard = tracker.num_heard
        tracker.poll()
        if tracker.num_heard > heard and what is None:
            deadline.moved()
        if what is not None and tracker.lost:
            raise deadline.error(*self._blame(tracker, what))

    def _blame(self, tracker: ReceiverTracker, what: str) -> tuple[str, list[str]]:
        return tracker.blame_silent(what, min(_SILENT_S, self._timeout_s / 2))

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
