"""`GroupReceiver` takes an engine worker's part of a version in a process group of all senders and receivers.

    hello to all senders -> group -> take a round -> digest and unpack it -> ... -> compare the digests -> done

The parts are written to their places before they are verified, so that nothing waits for the GPU in between. Only when
all digests equal those of the senders does `receive` return.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..plan.packing import Unpacker
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.collective_receiver import next_note
from ..transports.control_link import Hello, Link, Note
from ..transports.protocol import Deadline, WeightUpdate
from .group_wire import WIDTH, Exchange, Meeting, PairGroup, finish, in_rounds, join
from .pair_receiver import Damaged, PlanReceiver
from .pair_sender import number_of

_SLICE_S = 0.05
_WORD_S = 0.5
"""Seconds between two messages to the senders that this receiver is waiting, so that they know who is silent."""


@dataclass(slots=True)
class _Sender:
    """The link to one sender."""

    name: str
    link: Link
    notes: deque[Note] = field(default_factory=deque[Note])
    """Messages that have come and were not used yet."""


class GroupReceiver(PlanReceiver):
    """Receiver of buckets in a process group, into the memory of any device."""

    def __init__(self, engine: str, worker: int, key: bytes, device: torch.device) -> None:
        """key: the run's key, which the senders must know. device: device of the engine's weights."""
        super().__init__(engine, worker, key)
        self.device = device
        self._group: PairGroup | None = None
        self._senders: list[_Sender] = []
        self._unpacker = Unpacker()
        self.staying: Collection[str] = ()
        """Names of the tensors whose memory is the same in each update, until `leave`: they are written faster."""
        self._told = 0.0
        self._last = -1
        """Number of the last bucket of this update that is at its places; -1 before the first."""

    def receive(
        self,
        update: WeightUpdate,
        plan: TransferPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        arrived: Callable[[Bucket], None] = lambda bucket: None,
        deadline: Deadline | None = None,
    ) -> None:
        """Receive a version into `tensors`, the local tensors by name, on the receiver's device.

        rank: number of this receiver in the plan. arrived: function that is called with each bucket whose parts are at
        their places. deadline: as for `PairReceiver.receive`. Raises WeightTransferError if a bucket is missing,
        damaged or late, or if any member of the group is lost; the tensors then hold a mix and must not be served.
        """
        deadline = self._deadline = deadline or Deadline(self._name, update.version, update.timeout_s)
        deadline.moved()
        self._senders, self._last = [], -1
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device:
                self._meet(update, rank, deadline)
                found = self._take(plan, rank, tensors, arrived, deadline)
                self._compare(found, deadline)
            self._tell(Note("done", data=self.needs), deadline)
        except BaseException as error:
            self.leave()
            note = Note("failed", str(error)) if isinstance(error, Damaged) else Note("gave up")
            for sender in self._senders:
                with contextlib.suppress(OSError):
                    sender.link.send(note)
            raise
        finally:
            for sender in self._senders:
                sender.link.close()

    def leave(self) -> None:
        """Leave the group. Idempotent."""
        self._unpacker.clear()
        if self._group is not None:
            self._group.leave()
        self._group = None

    # ---------------- These methods are private.

    def _meet(self, update: WeightUpdate, rank: int, deadline: Deadline) -> None:
        """Connect to all senders, and join their group, unless this process is in it already."""
        meeting = Meeting.of(update)
        assert meeting is not None
        if meeting.backend == "nccl" and self.device.type != "cuda":
            raise deadline.error(f"the senders' weights are on GPUs, this engine's on {self.device}")
        name = self._greet(update, Hello(number_of(update), rank + 1, self._name_of_group), deadline)[0].text
        if self._group is not None and self._group.name == name:
            return
        self.leave()
        num_senders = len(self._senders)
        world = num_senders + sum(group.num_workers for group in update.receivers)
        place = num_senders + rank, num_senders, world
        device = self.device if meeting.backend == "nccl" else torch.device("cpu")
        look = functools.partial(self._look, deadline, "making the group")
        local_host = self._senders[0].link.local_host
        self._group = join(meeting, self._key, name, place, local_host, device, deadline, look)

    @property
    def _name_of_group(self) -> str:
        return "" if self._group is None else self._group.name

    def _greet(self, update: WeightUpdate, hello: Hello, deadline: Deadline) -> list[Note]:
        """Connect to all senders. Returns their first messages, which name the same group."""
        for number in range(update.location.count(";")):
            with self._reaching(update, number, deadline) as (name, host, [port, *_]):
                link = Link.connect(host, int(port), self._key, max(deadline.left_s, 1e-3))
                self._senders.append(_Sender(name, link))
                link.send(hello)
        starts = [self._next(sender, "start", "waiting for the start", deadline) for sender in self._senders]
        if len({start.text for start in starts}) > 1:
            # One of them has left the last group; the next update makes a new one.
            raise deadline.error("the senders are not in the same process group")
        return starts

    def _take(
        self, plan: TransferPlan, rank: int, tensors: Mapping[str, torch.Tensor], arrived: Callable[[Bucket], None],
        deadline: Deadline,
    ) -> dict[int, list[tuple[Bucket, torch.Tensor]]]:  # fmt: skip
        """Take and unpack all rounds. Returns the buckets of each sender with their digests."""
        group, buckets = self._group, plan.taking(rank)
        assert group is not None
        rounds = in_rounds(plan, buckets)
        memory = group.buffers(max((bucket.nbytes for bucket in buckets), default=0))
        running: deque[tuple[list[torch.Tensor], Exchange]] = deque()

        def begin(number: int) -> None:
            part = rounds[number]
            payloads = [memory[number % 2 * WIDTH + slot][: bucket.nbytes] for slot, bucket in enumerate(part)]
            parts = [(one, bucket.sender, bucket.number) for one, bucket in zip(payloads, part, strict=True)]
            running.append((payloads, group.exchange((), parts)))

        for number in range(min(2, len(rounds))):
            begin(number)
        found: dict[int, list[tuple[Bucket, torch.Tensor]]] = defaultdict(list)
        for number, part in enumerate(rounds):
            payloads, exchange = running.popleft()
            what = f"bucket {part[0].number}"
            senders = " and ".join(sorted({self._senders[bucket.sender].name for bucket in part}))
            late = functools.partial(lambda told: (told, ()), f"{what} did not come from {senders}")
            finish(exchange, deadline, functools.partial(self._look, deadline, what), late)
            for bucket, payload in zip(part, payloads, strict=True):
                digest = self._unpacker.take(plan.key, bucket, payload, tensors, self.staying)
                found[bucket.sender].append((bucket, digest))
            if group.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            if number + 2 < len(rounds):
                begin(number + 2)
            self._last = part[-1].number
            for bucket in part:
                arrived(bucket)
        return found

    def _compare(self, found: Mapping[int, Sequence[tuple[Bucket, torch.Tensor]]], deadline: Deadline) -> None:
        """Compare the digests of all buckets with those that the senders tell at the end."""
        for number, sender in enumerate(self._senders):
            end = self._next(sender, "end", "waiting for the digests", deadline)
            told, got = np.frombuffer(end.data, np.int64).tolist(), found.get(number, ())
            digests = torch.stack([digest for _, digest in got]).tolist() if got else []
            if len(told) != len(digests):
                raise Damaged(str(deadline.error(f"{sender.name}: {len(told)} buckets were sent, not {len(digests)}")))
            for (bucket, _), sent, digest in zip(got, told, digests, strict=True):
                if sent != digest:
                    what = f"{sender.name}: bucket {bucket.number} is damaged: its digest differs from the one sent"
                    raise Damaged(str(deadline.error(what)))

    def _next(self, sender: _Sender, kind: str, when: str, deadline: Deadline) -> Note:
        """Return the sender's next message of a kind, looking after the other senders meanwhile."""
        while True:
            self._look(deadline, when)
            while sender.notes:
                if (note := sender.notes.popleft()).kind == kind:
                    return note
            if not deadline.left_s:
                raise deadline.error(f"{when}: nothing came from {sender.name}")
            note = next_note(sender.link, deadline, _SLICE_S, f"{sender.name}, {when}")
            if note is not None:
                sender.notes.append(note)

    def _look(self, deadline: Deadline, when: str) -> None:
        """Read the senders' messages, and tell them that this receiver waits. Raises WeightTransferError when a sender
        has ended the update or is lost, and when `stop` was called."""
        for sender in self._senders:
            # All messages are read: after an abort, the memory of a neighbour can hold other bytes.
            while (note := next_note(sender.link, deadline, 0.0, f"{sender.name}, {when}")) is not None:
                sender.notes.append(note)
        if time.monotonic() > self._told + _WORD_S:
            self._told = time.monotonic()
            self._tell(Note("through", number=self._last), deadline)

    def _tell(self, note: Note, deadline: Deadline) -> None:
        for sender in self._senders:
            self._tell_one(sender, note, deadline)

    def _tell_one(self, sender: _Sender, note: Note, deadline: Deadline) -> None:
        try:
            sender.link.send(note)
        except OSError as error:
            raise deadline.error(f"{sender.name} is lost: {error}") from error
