"""`PairGroup` is a process group of trainer ranks and engine workers, in which pairs exchange buckets in rounds.

    ranks     senders 0 .. S - 1, receivers S .. S + R - 1; only senders if engines are on the senders' GPUs
    rounds    a process sends at most WIDTH buckets in a round, and takes as many; two rounds are under way at a time

NCCL carries the buckets between GPUs, gloo between CPUs. All processes take the buckets in the plan's order, and NCCL
moves a round's buckets at the same time, so that no processes wait for each other in a circle.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import torch

from ...process.rendezvous_store import RendezvousStore
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.protocol import Deadline, WeightTransferError, WeightUpdate
from ..transports.rendezvous import Broadcast, Group, bounded
from .pair_sender import SLOTS

WIDTH = SLOTS // 2
_SLICE_S = 0.05
_WORD_S = 1.0
"""Seconds that a process whose exchange failed waits for a message that tells why."""

Part = tuple[torch.Tensor, int, int]
"""A bucket's bytes, the rank of the other process in the group, and the bucket's number."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place at which the members of a group find each other."""

    host: str
    port: int
    backend: str
    """`nccl` or `gloo`."""
    only_senders: bool
    """True if the group has no receivers: each sender hands buckets to the engine workers on its own GPU."""

    @staticmethod
    def of(update: WeightUpdate) -> Meeting | None:
        """Return the place that an update's announcement names; None if its payloads go over TCP."""
        host, _, *rest = update.location.split(";")[1].split("|")
        return Meeting(host, int(rest[0]), rest[1], bool(rest[2:])) if rest[1:] else None


def in_rounds(plan: TransferPlan, buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Return the buckets of one process in rounds. A round of the process has the same buckets in the others' plans."""
    ends = zip(plan.buckets.sender.tolist(), (-1 - plan.buckets.receiver).tolist(), strict=True)
    rounds = rounds_of(ends)
    return [list(part) for _, part in itertools.groupby(buckets, lambda bucket: rounds[bucket.number])]


def rounds_of(buckets: Iterable[Collection[Hashable]]) -> list[int]:
    """Return the round of each bucket. buckets: for each bucket, in the plan's order, the ends that are busy with it;
    an end has at most WIDTH buckets in a round."""
    rounds: list[int] = []
    # The last round of each end, and the number of its buckets in it.
    at: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0])
    for ends in buckets:
        busy = [at[end] for end in ends]
        number = max(last + (num == WIDTH) for last, num in busy)
        for one in busy:
            one[:] = number, one[1] + 1 if one[0] == number else 1
        rounds.append(number)
    return rounds


class PairGroup(Group):
    """This process's membership in the group, and its buffers."""

    num_senders = 0
    slots: Sequence[torch.Tensor] = ()
    """Memory of others into which this member takes buckets. It must outlive the exchanges, as the buffers must."""
    _kept: Sequence[torch.Tensor] = ()
    _words: Sequence[Part] = ()

    def __init__(
        self, store: RendezvousStore, name: str, rank: int, world: int, *, host: str, device: torch.device,
        timeout_s: float,
    ) -> None:  # fmt: skip
        if world > 1:
            super().__init__(store, name, rank, world, host=host, device=device, timeout_s=timeout_s)
        else:  # The only member exchanges nothing.
            self.name, self.device, self._backend, self._store = name, device, None, store
            store.close()

    def buffers(self, nbytes: int) -> Sequence[torch.Tensor]:
        """Return SLOTS buffers of at least `nbytes` bytes each. They are kept from update to update."""
        if not self._kept or len(self._kept[0]) < nbytes:
            self._kept = ()
            self._kept = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
        return self._kept

    def exchange(self, sends: Sequence[Part], takes: Sequence[Part]) -> Exchange:
        """Start to send and to receive all of these at the same time. On a GPU this runs after the work that is queued
        on the current CUDA stream."""
        parts = [*sends, *takes]
        try:
            if self.device.type != "cuda":
                return _Exchange(self._start(sends, takes), parts)
            event, current = torch.cuda.Event(), torch.cuda.current_stream(self.device)
            if not parts:
                event.record(current)
                return Broadcast(None, event, parts)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self._backend._start_coalescing()
                self._start(sends, takes)
                work = self._backend._end_coalescing()
                work.wait()  # This makes the current stream wait for NCCL's stream, and does not block the thread.
                event.record(self._stream)
            return Broadcast(work, event, parts)
        except RuntimeError as error:  # The exchange fails, as if the other member were lost a moment later.
            return _Exchange([], parts, error)

    def _start(self, sends: Sequence[Part], takes: Sequence[Part]) -> list[Any]:
        started = [self._backend.send([buffer], peer, number) for buffer, peer, number in sends]
        return [*started, *(self._backend.recv([buffer], peer, number) for buffer, peer, number in takes)]

    def connect(self, rank: int, num_senders: int, world: int, timeout_s: float) -> None:
        """Exchange a word between all pairs of members that can have buckets. NCCL makes a connection in the first
        exchange of a pair, for which it would block the thread that sends a version. The call is collective and
        blocks."""
        self.num_senders = num_senders
        if world == num_senders:
            to = by = [peer for peer in range(world) if peer != rank]
        else:
            sends = rank < num_senders
            to, by = (range(num_senders, world), ()) if sends else ((), range(num_senders))
        words = [
            [(torch.zeros(8, dtype=torch.uint8, device=self.device), peer, 0) for peer in some] for some in (to, by)
        ]
        self._words = [*words[0], *words[1]]  # They must outlive the exchange, also if this call fails.
        running, until = self.exchange(*words), time.monotonic() + timeout_s
        while not running.ended(_SLICE_S):
            if time.monotonic() > until:
                raise RuntimeError("not all pairs of members have connected")


class _Exchange:
    """An exchange over gloo that may still be in progress. A thread waits for it, because gloo closes all connections
    of a group when a wait for a single message times out."""

    def __init__(self, works: Sequence[Any], parts: Sequence[Part], error: RuntimeError | None = None) -> None:
        self._parts = parts  # The buffers must outlive the operations.
        self._ended: Future[None] = Future()
        if error is not None:
            self._ended.set_exception(error)
            return
        if not works:
            self._ended.set_result(None)
            return
        threading.Thread(target=self._wait, args=(works,), daemon=True, name="headrace-exchange").start()

    def _wait(self, works: Sequence[Any]) -> None:
        try:
            for work in works:
                work.wait()
            self._ended.set_result(None)
        except RuntimeError as error:
            self._ended.set_exception(error)

    def ended(self, wait_s: float) -> bool:
        """As `Broadcast.ended`."""
        try:
            self._ended.result(wait_s)
        except FutureTimeout:
            return False
        return True


Exchange = Broadcast | _Exchange


def join(
    meeting: Meeting, key: bytes, name: str, place: tuple[int, int, int], host: str, device: torch.device,
    deadline: Deadline, look: Callable[[], None],
) -> PairGroup:  # fmt: skip
    """Join a new group, and return it once all pairs are connected.

    place: rank in the group, number of its senders, and number of its members. host: this process's own address. look:
    function that is called repeatedly, and may raise an error to end the wait. Raises WeightTransferError at the
    deadline, and if joining fails.
    """
    rank, num_senders, world = place
    made: list[PairGroup] = []

    def call() -> PairGroup:
        store = RendezvousStore(meeting.host, meeting.port, key, max(deadline.left_s, 1.0))
        group = PairGroup(store, name, rank, world, host=host, device=device, timeout_s=deadline.timeout_s)
        made.append(group)
        group.connect(rank, num_senders, world, deadline.timeout_s)
        return group

    try:
        return bounded(call, deadline, "making the group", look, Group.leave)
    except BaseException:
        for group in made:  # NCCL's call may hang in the abandoned thread.
            group.leave()
        raise


def finish(
    running: Exchange | None, deadline: Deadline, look: Callable[[], None],
    late: Callable[[], tuple[str, Sequence[str]]],
) -> None:  # fmt: skip
    """Wait until an exchange has ended; None is one that was never started.

    look: function that is called repeatedly, and may raise an error to end the wait. late: function that returns what
    is missing, and the names of the engines at fault. Raises WeightTransferError if the exchange fails, and at the
    deadline.
    """
    if running is None:
        return
    try:
        while not running.ended(_SLICE_S):
            look()
            if not deadline.left_s:
                raise deadline.error(*late())
    except RuntimeError as error:
        if isinstance(error, WeightTransferError):
            raise
        until = time.monotonic() + min(_WORD_S, deadline.left_s)
        while time.monotonic() < until:  # The links tell which member is lost.
            look()
            time.sleep(_SLICE_S / 10)
        what, engines = late()
        raise deadline.error(f"{what} ({str(error).strip().splitlines()[0]})", engines) from error
    deadline.moved()
