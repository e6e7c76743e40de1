"""`PlannedReceiver` lets an engine's inbox take an update that all train ranks send, as whole weights in its memory.

A thread runs a `PairReceiver`, which verifies each bucket and copies its parts to their places. The stream yields a
piece of the memory as soon as all weights in it are complete.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from ....codecs.weights.buckets import BucketPlan, plan_buckets
from ..plan.arguments import read_arguments
from ..plan.regions import Box, Region, within
from ..plan.transfer_plan import Bucket, TransferPlan
from ..plan.weight_reads import encode_regions
from ..transports.ends import Receiver, Stream, bucket_offsets
from ..transports.protocol import BucketFrame, Deadline, WeightUpdate, worker_name, worker_names
from ..views import BucketViews
from .group_receiver import GroupReceiver
from .group_wire import Meeting
from .neighbour_receiver import NeighbourReceiver
from .pair_receiver import PairReceiver

_SLICE_S = 0.05
_STOP_S = 5.0


class PlannedReceiver(Receiver):
    """Receiver of updates of the kind `pairs`."""

    def __init__(
        self,
        engine: str,
        worker: int,
        key: bytes,
        device: torch.device,
        needs: Callable[[], Sequence[Region]],
        kept: Callable[[int, BucketPlan], torch.Tensor | None],
    ) -> None:
        """key: the run's key, which the senders must know. device: device of the engine's weights. needs: function that
        returns the regions that are needed of later versions; none for all. kept: function that returns the memory of
        a version with a layout, the base of changes; None if it is not here."""
        super().__init__(engine, worker)
        self._pairs = PairReceiver(engine, worker, key)
        self._group = GroupReceiver(engine, worker, key, device)
        self._neighbour = NeighbourReceiver(engine, worker, key, device)
        self._needs, self._kept = needs, kept
        self._turn = threading.Lock()
        """Held while an update is received, because one that was dropped can take a while to end."""

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> PlannedStream:
        try:
            arguments, plan = read_arguments(update.plan)
        except ValueError as error:
            raise deadline.error(str(error)) from error
        host, meeting = arguments.receivers[rank].host, Meeting.of(update)
        source = self._pairs if meeting is None else self._neighbour if meeting.only_senders else self._group
        if host not in (source.place, worker_name(self.engine, self.worker)):
            raise deadline.error("this worker is on another host than in the version before, which the plan is for")
        source.needs = encode_regions(self._needs())
        layout = plan_buckets(arguments.specs, arguments.bucket_bytes)
        kept = None if update.base is None else self._kept(update.base, layout)
        self._pairs.base = None if kept is None else BucketViews().all(layout, kept)
        return PlannedStream(update, layout, deadline, source, plan, rank, self._turn)

    def close(self) -> None:
        """Free what is kept between updates. Idempotent."""
        self._pairs.close()
        self._group.leave()
        self._neighbour.close()


class PlannedStream(Stream):
    """Stream of the weights of one update, in memory for whole ones. Parts that this receiver does not need are not
    written."""

    def __init__(
        self,
        update: WeightUpdate,
        layout: BucketPlan,
        deadline: Deadline,
        source: PairReceiver | GroupReceiver,
        plan: TransferPlan,
        rank: int,
        turn: threading.Lock,
    ) -> None:
        """layout: places of the whole weights in memory, in pieces that are yielded. source: receives the buckets.
        plan: the plan of the update. rank: number of the receiver in it. turn: held while `source` receives."""
        super().__init__(update, layout, deadline)
        self._pairs, self._transfer, self._rank, self._turn = source, plan, rank, turn
        self.device = source.device
        self._memory: torch.Tensor | None = None
        self._arrived: queue.SimpleQueue[Bucket | Exception | None] = queue.SimpleQueue()
        """Buckets that are at their places; at the end an error, or None if all have come."""
        self._thread: threading.Thread | None = None

    def receive_into(self, memory: torch.Tensor) -> None:
        if memory.device == self.device:
            self._memory = memory

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Yield the pieces of the memory in order, each once it is complete. Every byte was verified in the bucket in
        which it came, and the last piece is yielded only when all buckets have come."""
        for frame, payload in self._arrivals():
            if payload.is_cuda and self.take is not None:
                self.take(frame, payload)  # It copies the weights to their destinations.
            yield frame, payload
            self.deadline.moved()

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        offsets = bucket_offsets(self.plan)
        memory = self._room(offsets[-1]) if self._memory is None else self._memory
        tensors = BucketViews().all(self.plan, memory)
        thread = threading.Thread(target=self._receive, args=(tensors,), name="headrace-pairs", daemon=True)
        thread.start()
        self._thread = thread
        if self.closed:  # Another thread's `close` has perhaps not seen the thread.
            self._close()
        left, under_way, ready = _Left(self.plan, self._transfer.taking(self._rank)), True, 0
        while under_way or ready < len(self.plan.sizes):
            arrived = self._next()
            under_way = arrived is not None
            if arrived is not None:
                left.take(arrived)
            while ready < len(self.plan.sizes) - under_way and left.is_whole(ready):
                size = self.plan.sizes[ready]
                yield BucketFrame(ready, "whole", size, 0), memory[offsets[ready] : offsets[ready] + size]
                ready += 1
            if not under_way and ready < len(self.plan.sizes):
                raise self.deadline.error(f"piece {ready} of {len(self.plan.sizes)} never came")

    def _room(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise self.deadline.error(
                f"sync.transport=pairs needs {nbytes} bytes of {self.device} beside the served weights: {error}"
            ) from error

    def _receive(self, tensors: dict[str, torch.Tensor]) -> None:
        try:
            while not self._turn.acquire(timeout=_SLICE_S):
                if not self.deadline.left_s:
                    raise self.deadline.error("the update before it is still being received")
            try:
                # `close` stops the deadline, which also ends a `receive` that has not begun.
                self._pairs.receive(self.update, self._transfer, self._rank, tensors, self._arrived.put, self.deadline)
            finally:
                self._turn.release()
            self._arrived.put(None)
        except Exception as error:  # The stream's own thread raises it.
            self._arrived.put(error)

    def _next(self) -> Bucket | None:
        while True:
            self.check_open()
            try:
                arrived = self._arrived.get(timeout=_SLICE_S)
            except queue.Empty:  # The receiver itself notices when nothing comes in time.
                continue
            self.deadline.moved()
            if isinstance(arrived, Exception):
                raise arrived
            return arrived

    def _close(self) -> None:
        if self._thread is not None:
            self._pairs.stop()
            self._thread.join(_STOP_S)


class _Left:
    """Counts the bytes of each weight that have not come yet."""

    def __init__(self, layout: BucketPlan, buckets: Sequence[Bucket]) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._names: dict[int, list[str]] = defaultdict(list)
        for move in itertools.chain.from_iterable(bucket.moves for bucket in buckets):
            self._bytes[move.tensor] += move.end - move.at
        for entry in layout.entries:
            self._names[entry.bucket].append(entry.name)

    def take(self, bucket: Bucket) -> None:
        """Count the parts of a bucket that has come."""
        for move in bucket.moves:
            self._bytes[move.tensor] -= move.end - move.at

    def is_whole(self, piece: int) -> bool:
        """Return whether all weights that a piece of the memory has a part of are complete."""
        return not any(self._bytes[name] for name in self._names[piece])


def missing_part(update: WeightUpdate, engine: str, worker: int, needs: Sequence[Region]) -> str:
    """Return which of the regions `needs` of a worker an update leaves out, in words; "" if it has all of them."""
    arguments, _ = read_arguments(update.plan)
    sent: dict[str, list[Box]] = defaultdict(list)
    number = worker_names(update.receivers).index(worker_name(engine, worker))
    for region in arguments.receivers[number].regions:
        sent[region.weight].append(region.box)
    lacking = (one for one in needs if not any(within(one.box, box) for box in sent[one.weight]))
    return next((f"{one.weight}{[*map(list, one.box)]}" for one in lacking), "")
