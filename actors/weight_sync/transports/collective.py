"""The `collective` transport broadcasts payloads in a process group of the sender and the first receiver of each host.

    sender    begin, listen ----> all here -> start, group | frame, broadcast, frame, broadcast ... end -> all done
    first     connect, hello ---> |     start, ring, group | frame, broadcast, through ...          end -> done
    others    connect, hello ---> |     start, ring        | frame, read the ring, through ...      end -> done
                                                             (on GPUs the digests are broadcast before the end)

Messages go over one TCP connection per receiver (`control_link`); only payloads are broadcast. Between CPUs, the other
receivers of a host read the payloads in the memory of the first (`host_ring`), so that each byte crosses a link once
per host. On GPUs all receivers are members of the group, as NCCL's rings pass each host once. A receiver verifies one
bucket while another arrives. If it finds a damaged bucket, it reports it and still takes part in the remaining
broadcasts, so that the other receivers get theirs. The next update reuses the group if its members are the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch

from ....codecs.weights.gpu_scatter import as_signed
from ...process.rendezvous_store import RendezvousServer, RendezvousStore
from .control_link import LinkListener, Note, ReceiverTracker
from .ends import Sender, SenderUpdate
from .protocol import BucketFrame, Deadline, WeightTransferError
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
            return tracker.over or tracker.stranded

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
        places = tracker.places(shared=self._device.type == "cpu")
        firsts = [rank for rank, place in places.items() if place.rank]
        members = update.receivers, firsts
        kept = self._group is not None and self._members == members
        kept = kept and all(tracker.groups[rank] == self._group.name for rank in firsts if self._group is not None)
        if not kept:
            self._leave_group()
            if self._rendezvous is None:
                self._rendezvous = RendezvousServer(self._host, self._key)
            self._rendezvous.clear()
            self._num_groups += 1
        assert self._rendezvous is not None
        name = f"group-{self._rendezvous.port}-{self._num_groups}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        for rank, place in places.items():
            start = Note("start", f"{name}|{backend}", self._rendezvous.port, update.plan.message, place=place)
            tracker.tell(start, rank)
        what = "making the group"
        rings = {rank for rank in firsts if places[rank].readers}

        def all_rings() -> bool:
            self._look(update, what)
            return rings <= tracker.rings

        deadline.wait(all_rings, lambda: tracker.blame("no memory for the others of its host"), _START_TICK_S)
        if not kept and firsts:
            join = functools.partial(self._join, self._rendezvous.port, name, len(firsts) + 1, deadline)
            self._group = bounded(join, deadline, what, lambda: self._look(update, what), Group.leave)
            self._members = members
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
