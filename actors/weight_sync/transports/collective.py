"""The `collective` transport broadcasts payloads in a process group of the sender and all receivers.

    sender    begin, listen ----> all here -> start, group | frame, broadcast, frame, broadcast ... end -> all done
    receiver  connect, hello ---> |           start, group | frame, broadcast, through ...          end -> done
                                                             (on GPUs the digests are broadcast before the end)

Messages go over one TCP connection per receiver (`control_link`); only payloads are broadcast. A receiver verifies one
bucket while another arrives. If it finds a damaged bucket, it reports it and still takes part in the remaining
broadcasts, so that the other receivers get theirs. The next update reuses the group if its members are the same.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from ....codecs.weights.buckets import BucketPlan, read_plan
from ....codecs.weights.gpu_scatter import as_signed
from ....dataplane.listen_address import join_host
from ...process.rendezvous_store import RendezvousServer, RendezvousStore
from .control_link import Hello, Link, LinkListener, Note, ReceiverTracker
from .ends import Receiver, Sender, SenderUpdate, Stream, bucket_offsets
from .protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate
from .rendezvous import Broadcast, Group, bounded

KIND = "collective"
_RING = 2
_START_TICK_S = 5e-5
"""Seconds between two checks that all receivers have joined."""
_SLICE_S = 0.05
"""Longest time in seconds spent waiting for a broadcast before control messages are read again."""


class CollectiveSender(Sender):
    """WeightSender that broadcasts weights as rank 0 of a process group."""

    kind = KIND

    def __init__(self, host: str, key: bytes, timeout_s: float, device: torch.device) -> None:
        """Listen on `host` for receivers. key: the run's key, which receivers must know. Raises OSError when listening
        fails."""
        super().__init__(timeout_s)
        self._host = host
        self._device = device
        self._key = key
        self._listener = LinkListener(host, key)
        self._rendezvous: RendezvousServer | None = None
        self._group: Group | None = None
        self._members: tuple = ()
        self._num_groups = 0
        self._tracker: ReceiverTracker | None = None
        self._started = False
        self._ring: list[torch.Tensor] = []
        self._running: list[Broadcast | None] = [None] * _RING
        self._num_payloads = 0
        self._digests = torch.empty(0, dtype=torch.int64, device=device)
        """Digest of each payload of the open update, int64 `[buckets]`; empty on the CPU."""

    def _begin(self, update: SenderUpdate) -> str:
        if self._tracker is not None:
            self._tracker.close()
        if any(self._running):  # The last update ended in the middle of a payload.
            self._leave_group()
        self._tracker = ReceiverTracker(update.number, update.receivers, self._listener, self.timeout_s)
        self._started = False
        self._num_payloads = 0
        nbytes = max((1, *update.plan.sizes))
        if not self._ring or len(self._ring[0]) < nbytes:
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(_RING)]
        if self._device.type == "cuda":
            self._digests = torch.zeros(len(update.plan.sizes), dtype=torch.int64, device=self._device)
        return f"{self._host}|{self._listener.port}|{update.number}"

    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        self._start(update)
        self._look(update, None)  # Unread messages would be lost with their connection.
        number = self._num_payloads % _RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, which is more than the largest bucket")
        self._await(update, number, f"no room for bucket {bucket}, not taken")
        return self._ring[number][:nbytes]

    def _send(self, update: SenderUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        self._start(update)
        tracker = self._expect_tracker()
        tracker.tell(Note("frame", frame=frame))
        if frame.nbytes and tracker.world > 1:
            assert self._group is not None
            number = self._num_payloads % _RING
            try:
                self._running[number] = self._group.broadcast(self._ring[number][: frame.nbytes])
            except RuntimeError as error:
                raise self._broken(update, f"bucket {frame.bucket} was not received", error) from error
            self._num_payloads += 1
        if frame.nbytes and self._device.type == "cuda":  # The digest is computed while the payload travels.
            self._digests[frame.bucket] = as_signed(frame.checksum) if digest is None else digest()

    def _finish(self, update: SenderUpdate) -> None:
        self._start(update)
        tracker, deadline = self._expect_tracker(), self._deadline(update)
        if self._num_payloads and self._group is not None and self._device.type == "cuda":
            last = self._num_payloads % _RING
            self._await(update, last, "the last buckets were not taken")
            self._running[last] = self._group.broadcast(self._digests.view(torch.uint8))
        tracker.tell(Note("end"))
        for number in range(_RING):
            self._await(update, number, "the last buckets were not taken")
            deadline.moved()

        def all_done() -> bool:
            heard = tracker.num_heard
            self._look(update, None)
            if tracker.num_heard > heard:
                deadline.moved()
            return tracker.over

        deadline.wait(all_done, lambda: tracker.blame("not confirmed"))
        if tracker.failed or tracker.gave_up:
            raise deadline.error(*tracker.blame("not received"))
        tracker.close()

    def _abort(self, update: SenderUpdate, reason: str) -> None:
        if self._tracker is not None:
            self._tracker.end(reason)

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
        self._leave_group()
        self._listener.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._ring = []

    def _deadline(self, update: SenderUpdate) -> Deadline:
        # This deadline is earlier than the receivers' deadlines, so that they learn the cause from the sender.
        if update.deadline is None:
            update.deadline = Deadline("sender", update.version, self.timeout_s - min(1.0, 0.1 * self.timeout_s))
        return update.deadline

    # ---------------- These private methods manage the members of the group.

    def _expect_tracker(self) -> ReceiverTracker:
        assert self._tracker is not None
        return self._tracker

    def _start(self, update: SenderUpdate) -> None:
        """Wait until all receivers have joined, and form a process group with them. The last group is kept if its
        members are the same. Does nothing after the first call in an update."""
        if self._started:
            return
        tracker, deadline = self._expect_tracker(), self._deadline(update)

        def all_here() -> bool:
            self._look(update, "at the start")
            return len(tracker.groups) == tracker.world - 1

        deadline.wait(all_here, lambda: tracker.blame("not here"), _START_TICK_S)
        kept = self._group is not None and self._members == update.receivers
        kept = kept and all(name == self._group.name for name in tracker.groups.values() if self._group is not None)
        if not kept:
            self._leave_group()
            if self._rendezvous is None:
                self._rendezvous = RendezvousServer(self._host, self._key)
            self._rendezvous.clear()
            self._num_groups += 1
        assert self._rendezvous is not None
        name = f"group-{self._rendezvous.port}-{self._num_groups}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        tracker.tell(Note("start", f"{name}|{backend}", self._rendezvous.port, update.plan.message))
        if not kept and tracker.world > 1:
            join = functools.partial(self._join, self._rendezvous.port, name, tracker.world, deadline)
            what = "making the group"
            self._group = bounded(join, deadline, what, lambda: self._look(update, what), Group.leave)
            self._members = update.receivers
        self._started = True

    def _join(self, port: int, name: str, world: int, deadline: Deadline) -> Group:
        # Each group has its own client: a client that hangs in an incomplete group would block this group, too.
        store = RendezvousStore(self._host, port, self._key, max(deadline.left_s, 1.0))
        return Group(store, name, 0, world, host=self._host, device=self._device, timeout_s=self.timeout_s)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None
        if any(self._running):
            self._ring = []  # A broadcast may still read the old buffers.
        self._running = [None] * _RING

    def _look(self, update: SenderUpdate, what: str | None) -> None:
        """Read the receivers' messages. Raises WeightTransferError if the update was aborted, or if a receiver is lost
        and `what` is not None. what: operation to name in that error."""
        self._check_ended(update)
        tracker = self._expect_tracker()
        tracker.poll()
        if what is not None and tracker.lost:
            raise self._deadline(update).error(*tracker.blame(what))

    def _await(self, update: SenderUpdate, number: int, what: str) -> None:
        running, deadline = self._running[number], self._deadline(update)
        if running is None:
            return
        try:
            while not running.ended(_SLICE_S):
                self._look(update, what)
                if not deadline.left_s:
                    raise deadline.error(*self._expect_tracker().blame(what))
        except RuntimeError as error:
            if isinstance(error, WeightTransferError):
                raise
            raise self._broken(update, what, error) from error
        self._running[number] = None

    def _broken(self, update: SenderUpdate, what: str, error: RuntimeError) -> WeightTransferError:
        """Return the error for a broadcast that failed because a receiver is lost. Waits up to 1 s for the connections
        to show which receiver it is."""
        tracker, deadline = self._expect_tracker(), self._deadline(update)
        moment = Deadline("sender", update.version, min(1.0, deadline.left_s))
        with contextlib.suppress(WeightTransferError):
            moment.wait(lambda: bool(tracker.poll() or tracker.failed), lambda: ("", ()))
        return deadline.error(*tracker.blame(f"{what} ({str(error).strip().splitlines()[0]})"))


class CollectiveReceiver(Receiver):
    """Receiver that joins the sender's process group, in which the sender is rank 0."""

    def __init__(self, engine: str, worker: int, key: bytes, device: torch.device) -> None:
        """key: the run's key, which the sender must know."""
        super().__init__(engine, worker)
        self._key = key
        self.device = device
        self.group: Group | None = None
        self._ring: list[torch.Tensor] = []

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
            link.send(Hello(int(number), rank, "" if self.group is None else self.group.name))
            start = next_note(link, deadline, deadline.left_s, "waiting for the start")
            if start is None or start.kind != "start":
                raise deadline.error(f"{sender} did not start the update, because not all receivers have joined")
            notes: deque[Note] = deque()
            self._join(update, rank, link, start, host, deadline, notes)
            return CollectiveStream(update, read_plan(start.data), deadline, link, notes, self)
        except OSError as error:
            link.close()
            raise deadline.error(f"{sender} is lost: {error}") from error
        except WeightTransferError:
            with contextlib.suppress(OSError):  # Otherwise the sender would count this receiver as lost.
                link.send(Note("gave up"))
            link.close()
            self.leave()
            raise

    def _join(
        self,
        update: WeightUpdate,
        rank: int,
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
        world = 1 + sum(group.num_workers for group in update.receivers)

        def join() -> Group:
            store = RendezvousStore(host, start.number, self._key, max(deadline.left_s, 1.0))
            return Group(store, name, rank, world, host=link.local_host, device=device, timeout_s=update.timeout_s)

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
        self._ring = []


class CollectiveStream(Stream):
    """Stream whose payloads are received into two buffers in turn, or into memory offered to `receive_into`."""

    def __init__(
        self,
        update: WeightUpdate,
        plan: BucketPlan,
        deadline: Deadline,
        link: Link,
        notes: deque[Note],
        receiver: CollectiveReceiver,
    ) -> None:
        """Prepare to receive the update over the receiver's process group. notes: messages from the sender that have
        already arrived on `link`."""
        assert receiver.group is not None
        super().__init__(update, plan, deadline)
        self._link = link
        self._receiver = receiver
        self._group = receiver.group
        self.device = self._group.device
        self._offsets = bucket_offsets(plan)
        self._destination: torch.Tensor | None = None
        self._ring: list[torch.Tensor] = []
        self._num_in_ring = 0
        self._digests_due = False
        """True while the sender still has to broadcast its digests; every receiver must take part in that broadcast."""
        self._under_way: deque[tuple[BucketFrame, torch.Tensor, Broadcast | None]] = deque()
        self._notes = notes
        self._ended = False
        self._done = False
        self._failure: Exception | None = None
        """Error that `read_ahead` ran into and that the iteration raises; None when there was none."""

    def receive_into(self, memory: torch.Tensor) -> None:
        if memory.device == self.device:
            self._destination = memory

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
            frame, payload, running = self._under_way.popleft()
            self._await(f"bucket {frame.bucket} of {len(self.plan.sizes)}", running)
            self._begin_next(_RING - 1, wait=False)  # Meanwhile the next payload arrives in the other buffer.
            yield frame, payload
            self._tell(Note("through", number=frame.bucket))

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
        self._tell(Note("done"))
        self._done = True

    def _begin_next(self, num_places: int, *, wait: bool) -> None:
        """Start receiving announced buckets until `num_places` of them are in progress.

        wait: whether to wait until the sender has announced at least one more bucket, or the end.
        """
        while not self._ended and len(self._under_way) < num_places:
            self._hear(self.deadline.left_s if wait and not self._notes else 0.0, "waiting for the next bucket")
            if not self._notes:
                if wait:
                    raise self.deadline.error("the next bucket did not come from the sender")
                return
            note = self._notes.popleft()
            self._ended = note.kind == "end"
            if note.frame is not None:
                self._under_way.append(self._receive(note.frame))
            wait = False

    def _hear(self, wait_s: float, when: str) -> None:
        """Read the sender's messages, waiting `wait_s` seconds for the first. Raises WeightTransferError when the
        sender has ended the update or is lost."""
        self.check_open()
        try:
            while (note := next_note(self._link, self.deadline, wait_s, when)) is not None:
                self._notes.append(note)
                wait_s = 0.0
        except WeightTransferError:
            self.check_open()  # Another thread of this process may have closed the link.
            raise

    def _receive(self, frame: BucketFrame) -> tuple[BucketFrame, torch.Tensor, Broadcast | None]:
        if not frame.nbytes:
            return frame, torch.empty(0, dtype=torch.uint8, device=self.device), None
        self._digests_due = self.device.type == "cuda"
        if self._destination is not None and frame.encoding == "whole":
            begin = self._offsets[frame.bucket]
            payload = self._destination[begin : begin + frame.nbytes]
        else:
            if not self._ring:
                self._ring = self._receiver.ring(max(self.plan.sizes), self.device)
            payload = self._ring[self._num_in_ring % _RING][: frame.nbytes]
            self._num_in_ring += 1
        try:
            return frame, payload, self._group.broadcast(payload)
        except RuntimeError as error:
            raise self._broken(f"bucket {frame.bucket} of {len(self.plan.sizes)}", error) from error

    def _await(self, of: str, running: Broadcast | None) -> None:
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
        """Report `error` to the sender, and still receive the remaining buckets. Broadcasts to other receivers may pass
        through this process."""
        with contextlib.suppress(WeightTransferError):
            self._tell(Note("failed", str(error)))
            while True:
                self._begin_next(_RING - 1, wait=not self._under_way)
                if not self._under_way:
                    break
                frame, _, running = self._under_way.popleft()
                self._await(f"bucket {frame.bucket} of {len(self.plan.sizes)}", running)
                self.deadline.moved()
            if self._digests_due:
                self._digests()
            self._done = True

    def _close(self) -> None:
        if not self._done:
            with contextlib.suppress(OSError):  # A lost connection also informs the sender.
                self._link.send(Note("gave up"))
        self._link.close()
        if not self._done and self._receiver.group is self._group:
            self._receiver.leave()


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
