"""`PairSender` sends one trainer rank's part of a version to the engine workers, as the transfer plan says.

    main thread    plan's next bucket -> free buffer -> pack, checksum -> lane of its receiver -> ... -> all done
    lane           frame, payload -> buffer free again -> ... -> end           one thread for each receiver

At most SLOTS buckets are in memory, and each lane waits for its own receiver only. A receiver that is lost harms no
other.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ....codecs.weights.buckets import checksum
from ..plan.packing import pack
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.control_link import Link, LinkListener, Note, ReceiverTracker
from ..transports.protocol import BucketFrame, Deadline, WeightUpdate
from .payload_wire import PayloadListener, send_payload

KIND = "pairs"
SLOTS = 4
"""Number of buckets that a sender, or a receiver, holds in memory."""
_TICK_S = 1e-3
_SLICE_S = 0.05
_WORD_S = 1.0
"""Seconds that a sender whose payload connection broke waits for the receiver to tell why."""


Fill = Callable[[Bucket, Mapping[str, torch.Tensor], torch.Tensor, bool], BucketFrame]
"""Function that writes a bucket's payload into memory and returns its header, given the bucket, the sender's tensors,
the memory, and whether the receiver has the base of the update."""


def fill_whole(bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: torch.Tensor, has_base: bool) -> BucketFrame:
    """Write all bytes of a bucket, a `Fill`."""
    payload = out[: bucket.nbytes]
    pack(bucket, tensors, payload)
    return BucketFrame(bucket.number, "whole", bucket.nbytes, checksum(payload))


def location_of(number: int, addresses: list[str]) -> str:
    """Return the location of an update, for its announcement. number: number of the update, larger than those of all
    earlier updates. addresses: `PairSender.address` of each sender, in the order of the plan."""
    return ";".join([str(number), *addresses])


def number_of(update: WeightUpdate) -> int:
    """Return the number of an update, which `location_of` has put into its location."""
    return int(update.location.partition(";")[0])


@dataclass(slots=True)
class _Lane:
    """Buckets on the way to one receiver."""

    link: Link
    connection: socket.socket
    buckets: queue.SimpleQueue[tuple[BucketFrame, torch.Tensor] | None] = field(default_factory=queue.SimpleQueue)
    num_moves: int = 0
    """Number of times that bytes were sent: progress that the main thread looks at."""


class RankSender:
    """Base class of the senders of a version, one in each trainer rank: listens for receivers, and ends updates. Only
    one thread may call `send`; any thread may call `abort`."""

    address = ""
    """Address of the sender, as `location_of` takes it."""

    def __init__(self, host: str, key: bytes, timeout_s: float) -> None:
        """Listen on `host` for receivers. key: the run's key, which receivers must know. Raises OSError when listening
        fails."""
        self._timeout_s = timeout_s
        self._links = LinkListener(host, key, turns_away=True)
        self._tracker: ReceiverTracker | None = None
        self._number = 0
        """Number of the last update that has begun."""
        self._memory: list[torch.Tensor] = []
        self.needs: dict[int, bytes] = {}
        """Data of the `done` messages of the last update that was sent, by number of the receiver in the plan."""
        self.hosts: dict[int, str] = {}
        """Space in which each receiver of that update shares memory, likewise; "" for those that share none."""
        self.encodings: Counter[str] = Counter()
        """Number of buckets of the last update by their encoding."""
        self.num_moves = 0
        """Number of times that progress was seen since the start. Any thread may read it."""

    def abort(self, reason: str, number: int | None = None) -> None:
        """End an update; its receivers learn the reason, also those that connect later. Idempotent.

        number: number of the update, which may not have begun yet; None for the one that is open, if there is one.
        """
        tracker, begun = self._tracker, self._number
        if number is None and tracker is not None:
            number = begun
        if number is not None and not self._links.ended(number):
            self._links.end(number, reason or "aborted")
            if tracker is not None and number == begun:
                tracker.end(reason or "aborted")

    def close(self) -> None:
        """End the open update and stop listening. Idempotent."""
        self.abort("the sender closes")
        self._links.close()
        self._memory = []

    def _check(self, deadline: Deadline) -> None:
        if reason := self._links.ended(self._number):
            raise deadline.error(f"aborted: {reason}")


class PairSender(RankSender):
    """Sends over a TCP connection to each receiver, between CPUs."""

    def __init__(self, host: str, key: bytes, timeout_s: float) -> None:
        """Listen on `host` for receivers, as `RankSender` does."""
        super().__init__(host, key, timeout_s)
        self._payloads = PayloadListener(host, key)
        self.address = f"{host}|{self._links.port}|{self._payloads.port}"

    def send(
        self,
        update: WeightUpdate,
        plan: TransferPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        fill: Fill = fill_whole,
    ) -> int:
        """Send this rank's buckets of `plan`, and wait until its receivers have the whole version from all senders.

        rank: number of this sender in the plan. tensors: its local tensors by name, on the CPU, which must not change
        meanwhile. fill: function that writes the payloads. Returns the number of bytes sent. Raises WeightTransferError
        naming the receivers that did not get the version; those that did can serve it.
        """
        deadline = Deadline(f"sender {rank}", update.version, self._timeout_s - min(1.0, 0.1 * self._timeout_s))
        buckets = plan.sending(rank)
        # Rank 0 hears from all receivers, also from those that it has nothing for.
        ranks = {bucket.receiver + 1 for bucket in buckets} if rank else None
        self._number = number_of(update)
        self._tracker = tracker = ReceiverTracker(self._number, update.receivers, self._links, self._timeout_s, ranks)
        lanes: dict[int, _Lane] = {}
        try:
            self._meet(update, tracker, deadline, lanes)
            with ThreadPoolExecutor(max(1, len(lanes)), thread_name_prefix="headrace-lane") as pool:
                running = {rank: pool.submit(self._run, lane) for rank, lane in lanes.items()}
                try:
                    nbytes = self._fill(update, plan, rank, tensors, fill, lanes, tracker, deadline)
                    self._drain(lanes, running, tracker, deadline)
                except BaseException as error:
                    self.abort(f"{type(error).__name__}: {error}")  # The lanes then end.
                    raise
                finally:
                    for lane in lanes.values():
                        lane.buckets.put(None)
            if tracker.failed or tracker.gave_up:
                raise deadline.error(*tracker.blame("not received"))
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            tracker.end(self._links.ended(self._number))  # An abort just before the start did not know the tracker.
            raise
        finally:
            self._tracker = None
            tracker.close()
            for lane in lanes.values():
                lane.connection.close()
        self.needs = {rank - 1: data for rank, data in tracker.needs.items()}
        self.hosts = {rank - 1: host for rank, host in tracker.hosts.items()}
        return nbytes

    def close(self) -> None:
        super().close()
        self._payloads.close()

    # ---------------- These methods are private.

    def _meet(
        self, update: WeightUpdate, tracker: ReceiverTracker, deadline: Deadline, lanes: dict[int, _Lane]
    ) -> None:
        """Wait until all receivers have connected, or have failed at another sender, and make their lanes."""

        def all_here() -> bool:
            tracker.poll()
            self._check(deadline)
            gone = tracker.gave_up | tracker.failed.keys()
            for rank in tracker.groups.keys() - gone:
                connection = None if rank in lanes else self._payloads.take(number_of(update), rank)
                if connection is not None:
                    lanes[rank] = _Lane(tracker.link(rank), connection)
            return len(lanes.keys() | gone) == tracker.world - 1

        deadline.wait(all_here, lambda: tracker.blame("not here"), _TICK_S)

    def _fill(
        self,
        update: WeightUpdate,
        plan: TransferPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        fill: Fill,
        lanes: Mapping[int, _Lane],
        tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> int:
        """Fill the buckets in the plan's order, and hand each to the lane of its receiver. Returns the bytes sent."""
        buckets = plan.sending(rank)
        most = max((bucket.nbytes for bucket in buckets), default=0)
        if not self._memory or len(self._memory[0]) < most:
            self._memory = [torch.empty(most, dtype=torch.uint8) for _ in range(SLOTS)]
        free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._free = free
        for buffer in self._memory:
            free.put(buffer)
        look = self._look(lanes, tracker, deadline)
        self.encodings, nbytes = Counter(), 0
        for bucket in buckets:
            if bucket.receiver + 1 not in lanes:
                continue
            while True:
                with contextlib.suppress(queue.Empty):
                    buffer = free.get(timeout=_SLICE_S)
                    break
                look()
            look()
            has_base = tracker.groups[bucket.receiver + 1] == str(update.base)
            frame = fill(bucket, tensors, buffer, has_base)
            self.encodings[frame.encoding] += 1
            nbytes += frame.nbytes
            lanes[bucket.receiver + 1].buckets.put((frame, buffer))
        return nbytes

    def _drain(
        self,
        lanes: Mapping[int, _Lane],
        running: Mapping[int, Future[None]],
        tracker: ReceiverTracker,
        deadline: Deadline,
    ) -> None:
        """Wait until every receiver has the whole version, has failed or is lost."""
        for lane in lanes.values():
            lane.buckets.put(None)
        look = self._look(lanes, tracker, deadline)
        broken: dict[int, float] = {}

        def over() -> bool:
            look()
            for rank, sent in running.items():
                if sent.done() and (error := sent.exception()) is not None:
                    # The receiver's own word, which is on its way, says more.
                    if time.monotonic() > broken.setdefault(rank, time.monotonic()) + _WORD_S:
                        if rank not in tracker.gave_up:
                            tracker.failed.setdefault(rank, f"is lost: {error}")
            return tracker.over

        deadline.wait(over, lambda: tracker.blame("not confirmed"), _TICK_S)

    def _look(self, lanes: Mapping[int, _Lane], tracker: ReceiverTracker, deadline: Deadline) -> Callable[[], None]:
        """Return a function that reads the receivers' messages and notes progress. It raises WeightTransferError when
        the update was aborted, or when nothing has moved until the deadline."""
        seen = -1

        def look() -> None:
            nonlocal seen
            self._check(deadline)
            tracker.poll()
            moves = tracker.num_heard + sum(lane.num_moves for lane in lanes.values())
            if moves != seen:
                seen = moves
                self.num_moves += 1
                deadline.moved()
            elif not deadline.left_s:
                raise deadline.error(*tracker.blame("not taken"))

        return look

    def _run(self, lane: _Lane) -> None:
        """Send the buckets of a lane. After an error, the rest is discarded, so that their buffers are free for the
        other lanes."""
        error: Exception | None = None

        def look(moved: bool) -> None:
            lane.num_moves += moved
            if reason := self._links.ended(self._number):
                raise ConnectionError(reason)

        while (item := lane.buckets.get()) is not None:
            frame, buffer = item
            try:
                if error is None:
                    lane.link.send(Note("frame", frame=frame))
                    send_payload(lane.connection, buffer[: frame.nbytes].numpy().data, look)
            except OSError as raised:
                error = raised
            finally:
                self._free.put(buffer)
        if error is not None:
            raise error
        lane.link.send(Note("end"))
