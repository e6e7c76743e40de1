"""Receives the weights of the transport `collective`: in the process group, or from the first receiver of the host.

`collective` describes the messages. `CollectiveReceiver` joins an update and learns its place; the streams follow the
sender's messages and yield the buckets, each from its own source.
"""

from __future__ import annotations

import contextlib
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ....codecs.weights.buckets import BucketPlan, read_plan
from ....dataplane.listen_address import join_host
from ...process.rendezvous_store import RendezvousStore
from .control_link import GroupPlace, Hello, Link, Note
from .ends import Receiver, Stream, bucket_offsets
from .host_ring import HostRing, Landing, OwnRing, host_name
from .protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate
from .rendezvous import Broadcast, Group, bounded

_RING = 2
_SLICE_S = 0.05
"""Longest time in seconds spent waiting for a payload before control messages are read again."""
_ROOM_TICK_S = 1e-3
"""Seconds between two checks that the other receivers of this host have read a bucket."""


class CollectiveReceiver(Receiver):
    """Receiver that joins the sender's process group, in which the sender is rank 0."""

    def __init__(self, engine: str, worker: int, key: bytes, device: torch.device) -> None:
        """key: the run's key, which the sender must know."""
        super().__init__(engine, worker)
        self._key = key
        self.device = device
        self.group: Group | None = None
        self._ring: list[torch.Tensor] = []
        self._host = host_name()
        """Space in which this receiver shares memory; "" once it was not able to read another's memory."""
        self._own_ring: OwnRing | None = None
        self._read_ring: HostRing | None = None

    def ring(self, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        """Return two buffers of at least `nbytes` bytes each, which are kept from update to update."""
        if not self._ring or len(self._ring[0]) < nbytes or self._ring[0].device != device:
            self._ring = []
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_RING)]
        return self._ring

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> CollectiveStream:
        host, port, number = update.location.split("|")
        sender = f"the sender at {join_host(host, int(port))}"
        rank += 1
        try:
            link = Link.connect(host, int(port), self._key, max(deadline.left_s, 1e-3))
        except OSError as error:
            raise deadline.error(f"{sender} cannot be reached: {error}") from error
        try:
            link.send(Hello(int(number), rank, "" if self.group is None else self.group.name, self._host))
            start = next_note(link, deadline, deadline.left_s, "waiting for the start")
            if start is None or start.kind != "start":
                raise deadline.error(f"{sender} did not start the update, because not all receivers have joined")
            notes: deque[Note] = deque()
            plan = read_plan(start.data)
            place = start.place or GroupPlace(rank, 1 + sum(group.num_workers for group in update.receivers))
            if not place.rank:
                read = self._open_ring(link, deadline)
                return RingStream(update, plan, deadline, link, notes, read, place.readers.index(rank))
            passing = self._offer_ring(link, max((1, *plan.sizes)), place.readers) if place.readers else None
            self._join(update, place, link, start, host, deadline, notes)
            return GroupStream(update, plan, deadline, link, notes, self, passing, place.readers)
        except OSError as error:
            link.close()
            raise deadline.error(f"{sender} is lost: {error}") from error
        except WeightTransferError:
            with contextlib.suppress(OSError):  # Otherwise the sender would count this receiver as lost.
                link.send(Note("gave up"))
            link.close()
            self.leave()
            raise

    def _offer_ring(self, link: Link, nbytes: int, readers: tuple[int, ...]) -> OwnRing:
        """Return the ring from which the other receivers of this host read payloads, and tell them where it is."""
        if self._own_ring is None or not self._own_ring.begin_again(nbytes, len(readers)):
            self._close_ring()
            self._own_ring = OwnRing(nbytes, len(readers))
        link.send(Note("ring", self._own_ring.location))
        return self._own_ring

    def _open_ring(self, link: Link, deadline: Deadline) -> HostRing:
        """Open the ring of the first receiver of this host, once it has told where it is."""
        self.leave()
        note = next_note(link, deadline, deadline.left_s, "waiting for the first receiver of this host")
        if note is None or note.kind != "ring":
            raise deadline.error("the first receiver of this host did not offer its memory")
        if self._read_ring is None or self._read_ring.location != note.text:
            self._read_ring = None
            try:
                self._read_ring = HostRing.open(note.text)
            except (OSError, ValueError) as error:
                self._host = ""  # From the next update on, this receiver gets its own copy.
                failure = deadline.error(f"the memory of the first receiver of this host cannot be read: {error}")
                link.send(Note("failed", str(failure)))
                raise failure from error
        return self._read_ring

    def _close_ring(self) -> None:
        if self._own_ring is not None:
            self._own_ring.close()
        self._own_ring = None

    def _join(
        self,
        update: WeightUpdate,
        place: GroupPlace,
        link: Link,
        start: Note,
        host: str,
        deadline: Deadline,
        notes: deque[Note],
    ) -> None:
        """Join the sender's process group, unless this process is in it already. notes: collects the sender's messages
        that arrive before the group is made."""
        name, _, backend = start.text.partition("|")
        if self.group is not None and self.group.name == name:
            return
        self.leave()
        if backend == "nccl" and self.device.type != "cuda":
            error = deadline.error(f"the sender's weights are on a GPU, this engine's on {self.device}")
            link.send(Note("failed", str(error)))
            raise error
        device = self.device if backend == "nccl" else torch.device("cpu")

        def join() -> Group:
            store = RendezvousStore(host, start.number, self._key, max(deadline.left_s, 1.0))
            at, timeout_s = link.local_host, update.timeout_s
            return Group(store, name, place.rank, place.world, host=at, device=device, timeout_s=timeout_s)

        def look() -> None:
            note = next_note(link, deadline, 0.0, "making the group")
            if note is not None:
                notes.append(note)

        self.group = bounded(join, deadline, "making the group", look, Group.leave)

    def leave(self) -> None:
        """Leave the process group. Idempotent."""
        if self.group is not None:
            self.group.leave()
        self.group = None

    def close(self) -> None:
        """Leave the process group and free the buffers. Idempotent."""
        self.leave()
        self._close_ring()
        self._ring, self._read_ring = [], None


class _Arrival(NamedTuple):
    """A bucket that is being received, or has arrived."""

    frame: BucketFrame
    payload: torch.Tensor
    running: Broadcast | Landing | None
    number: int | None
    """Number of the payload in the update; None for a bucket without payload, as for `running`."""


class CollectiveStream(Stream):
    """Base class of the streams of `collective`, which follow the sender's messages. Subclasses get the payloads."""

    def __init__(
        self, update: WeightUpdate, plan: BucketPlan, deadline: Deadline, link: Link, notes: deque[Note]
    ) -> None:
        """Prepare to receive the update. notes: messages from the sender that have already arrived on `link`."""
        super().__init__(update, plan, deadline)
        self._link = link
        self._num_payloads = 0
        self._digests_due = False
        """True while the sender still has to broadcast its digests; every receiver must take part in that broadcast."""
        self._under_way: deque[_Arrival] = deque()
        self._notes = notes
        self._ended = False
        self._done = False
        self._failure: Exception | None = None
        """Error that `read_ahead` ran into and that the iteration raises; None when there was none."""

    def read_ahead(self) -> None:
        try:
            while not self._ended and len(self._under_way) < _RING:
                self._begin_next(_RING, wait=True)
        except Exception as error:  # The iteration raises this error.
            self._failure = error

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        if self._failure is not None:
            raise self._failure
        while True:
            self._begin_next(_RING, wait=not self._under_way)
            if not self._under_way:
                break
            arrived = self._take()
            self._begin_next(_RING - 1, wait=False)  # Meanwhile the next payload arrives in the other buffer.
            yield arrived.frame, arrived.payload
            self._used(arrived.number)
            self._tell(Note("through", number=arrived.frame.bucket))

    def _confirm(self) -> None:
        self._tell(Note("done"))
        self._done = True

    def _begin_next(self, num_places: int, *, wait: bool) -> None:
        """Start receiving announced buckets until `num_places` of them are in progress.

        wait: whether to wait until at least one more bucket, or the end, was announced and can be received.
        """
        while not self._ended and len(self._under_way) < num_places:
            self._hear(self.deadline.left_s if wait and not self._notes else 0.0, "waiting for the next bucket")
            if not self._notes:
                if wait:
                    raise self.deadline.error("the next bucket did not come from the sender")
                return
            frame = self._notes[0].frame
            if frame is not None and frame.nbytes and not self._has_room(wait):
                return
            self._ended = self._notes.popleft().kind == "end"
            if frame is not None:
                self._under_way.append(self._begin(frame))
            wait = False

    def _has_room(self, wait: bool) -> bool:
        while not self._is_free(self._num_payloads):
            if not wait:
                return False
            self._hear(_ROOM_TICK_S, "waiting for the other receivers of this host")
            if not self.deadline.left_s:
                raise self.deadline.error("the other receivers of this host have not read the last buckets")
        return True

    def _begin(self, frame: BucketFrame) -> _Arrival:
        number = self._num_payloads
        if not frame.nbytes:
            return _Arrival(frame, torch.empty(0, dtype=torch.uint8, device=self.device), None, None)
        self._num_payloads += 1
        payload = self._place(frame, number)
        try:
            return _Arrival(frame, payload, self._receive(payload, number), number)
        except RuntimeError as error:
            raise self._broken(f"bucket {frame.bucket} of {len(self.plan.sizes)}", error) from error

    def _take(self) -> _Arrival:
        """Wait for the oldest bucket in progress, and return it."""
        arrival = self._under_way.popleft()
        self._await(f"bucket {arrival.frame.bucket} of {len(self.plan.sizes)}", arrival.running)
        self._landed(arrival.number)
        return arrival

    def _hear(self, wait_s: float, when: str) -> None:
        """Read the sender's messages, waiting `wait_s` seconds for the first. Raises WeightTransferError when the
        sender has ended the update or is lost."""
        self.check_open()
        try:
            while (note := next_note(self._link, self.deadline, wait_s, when)) is not None:
                self._note(note)
                wait_s = 0.0 if self._notes else wait_s
        except WeightTransferError:
            self.check_open()  # Another thread of this process may have closed the link.
            raise

    def _note(self, note: Note) -> None:
        self._notes.append(note)

    def _await(self, of: str, running: Broadcast | Landing | None) -> None:
        try:
            while running is not None and not running.ended(_SLICE_S):
                self._hear(0.0, of)
                if not self.deadline.left_s:
                    raise self.deadline.error(f"{of} did not come from the sender")
        except RuntimeError as error:
            if isinstance(error, WeightTransferError):
                raise
            raise self._broken(of, error) from error

    def _broken(self, of: str, error: RuntimeError) -> WeightTransferError:
        reason = str(error).strip().splitlines()[0]
        try:  # A message from the sender may give the cause.
            self._hear(min(1.0, self.deadline.left_s), f"{of}: {reason}")
        except WeightTransferError as told:
            return told
        return self.deadline.error(f"{of} did not come from the sender: {reason}")

    def _tell(self, note: Note) -> None:
        self.check_open()
        try:
            self._link.send(note)
        except OSError as error:
            raise self.deadline.error(f"the sender is lost: {error}") from error

    def give_up(self, error: WeightTransferError) -> None:
        """Report `error` to the sender, and still receive the remaining buckets. Payloads for other receivers may pass
        through this process."""
        with contextlib.suppress(WeightTransferError):
            self._tell(Note("failed", str(error)))
            while True:
                self._begin_next(_RING - 1, wait=not self._under_way)
                if not self._under_way:
                    break
                self._used(self._take().number)
                self.deadline.moved()
            if self._digests_due:
                self._digests()
            self._tell(Note("passed"))
            self._done = True

    def _close(self) -> None:
        if not self._done:
            with contextlib.suppress(OSError):  # A lost connection also informs the sender.
                self._link.send(Note("gave up"))
        self._link.close()

    # ---------------- Subclasses implement these methods.

    @abstractmethod
    def _place(self, frame: BucketFrame, number: int) -> torch.Tensor:
        """Return the memory that payload `number` comes into, uint8 `[frame.nbytes]`."""

    @abstractmethod
    def _receive(self, payload: torch.Tensor, number: int) -> Broadcast | Landing:
        """Start receiving payload `number`. Raises RuntimeError when the process group is broken."""

    def _is_free(self, number: int) -> bool:
        """Return whether the memory for payload `number` may be written to."""
        return True

    def _landed(self, number: int | None) -> None:
        """Note that a payload has arrived, and is not used yet. number: None for a bucket without payload."""

    def _used(self, number: int | None) -> None:
        """Note that this receiver does not need a payload any more. number: None for a bucket without payload."""


class GroupStream(CollectiveStream):
    """Stream of a member of the process group. Payloads are received into two buffers in turn, or into memory offered
    to `receive_into`; if other receivers of the host read them, into the host's ring."""

    def __init__(
        self,
        update: WeightUpdate,
        plan: BucketPlan,
        deadline: Deadline,
        link: Link,
        notes: deque[Note],
        receiver: CollectiveReceiver,
        passing: OwnRing | None,
        readers: tuple[int, ...],
    ) -> None:
        """Prepare to receive over the receiver's process group. passing: ring that the receivers of ranks `readers`
        read; None without any."""
        assert receiver.group is not None
        super().__init__(update, plan, deadline, link, notes)
        self._receiver = receiver
        self._group = receiver.group
        self.device = self._group.device
        self._offsets = bucket_offsets(plan)
        self._destination: torch.Tensor | None = None
        self._ring: list[torch.Tensor] = []
        self._passing, self._readers = passing, readers
        for _ in range(len(notes)):  # A reader may have left while the group was made.
            self._note(notes.popleft())

    def receive_into(self, memory: torch.Tensor) -> None:
        if memory.device == self.device:
            self._destination = memory

    def _place(self, frame: BucketFrame, number: int) -> torch.Tensor:
        self._digests_due = self.device.type == "cuda"
        if self._passing is not None:
            return self._passing.slot(number, frame.nbytes)
        if self._destination is not None and frame.encoding == "whole":
            begin = self._offsets[frame.bucket]
            return self._destination[begin : begin + frame.nbytes]
        if not self._ring:
            self._ring = self._receiver.ring(max(self.plan.sizes), self.device)
        return self._ring[number % _RING][: frame.nbytes]

    def _receive(self, payload: torch.Tensor, number: int) -> Broadcast:
        return self._group.broadcast(payload)

    def _is_free(self, number: int) -> bool:
        return self._passing is None or self._passing.has_room(number)

    def _landed(self, number: int | None) -> None:
        if self._passing is not None and number is not None:
            self._passing.publish(number)

    def _note(self, note: Note) -> None:
        if note.kind != "without":
            super()._note(note)
        elif self._passing is not None:
            self._passing.gone.add(self._readers.index(note.number))

    def _digests(self) -> torch.Tensor:
        self._digests_due = False
        digests = torch.empty(len(self.plan.sizes), dtype=torch.int64, device=self.device)
        what = "the buckets' digests"
        try:
            self._await(what, self._group.broadcast(digests.view(torch.uint8)))
        except RuntimeError as error:
            if isinstance(error, WeightTransferError):
                raise
            raise self._broken(what, error) from error
        return digests

    def _confirm(self) -> None:
        super()._confirm()
        if self._passing is not None:
            self._passing.whole = True

    def _close(self) -> None:
        super()._close()
        if not self._done and self._receiver.group is self._group:
            self._receiver.leave()


class RingStream(CollectiveStream):
    """Stream of a receiver that reads the payloads in the ring of the first receiver of its host."""

    def __init__(
        self,
        update: WeightUpdate,
        plan: BucketPlan,
        deadline: Deadline,
        link: Link,
        notes: deque[Note],
        ring: HostRing,
        reader: int,
    ) -> None:
        """Prepare to read from `ring`. reader: number of this receiver among the ring's readers."""
        super().__init__(update, plan, deadline, link, notes)
        self._ring = ring
        self._reader = reader

    def _place(self, frame: BucketFrame, number: int) -> torch.Tensor:
        return self._ring.slot(number, frame.nbytes)

    def _receive(self, payload: torch.Tensor, number: int) -> Landing:
        return Landing(self._ring, number)

    def _used(self, number: int | None) -> None:
        if number is not None:
            self._ring.through(self._reader, number)


def next_note(link: Link, deadline: Deadline, wait_s: float, when: str) -> Note | None:
    """Return the sender's next message, or None when none comes within `wait_s` seconds.

    Raises WeightTransferError when the sender has ended the update or is lost.
    """
    until = time.monotonic() + wait_s
    while True:
        left_s = min(until - time.monotonic(), deadline.left_s)
        try:
            note = link.receive(Note, min(max(left_s, 0.0), _SLICE_S))
        except OSError as error:
            raise deadline.error(f"{when}: the sender is lost: {error}") from error
        assert note is None or isinstance(note, Note)
        if note is not None and note.kind == "abort":
            raise deadline.error(f"{when}: the sender has ended the update: {note.text}")
        if note is not None or left_s <= 0:
            return note
