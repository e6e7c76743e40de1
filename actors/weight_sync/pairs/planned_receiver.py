"""`PlannedReceiver` lets an engine's inbox take an update that all train ranks send, as whole weights in its memory.

A thread runs a receiver, such as a `PairReceiver`, which verifies each bucket and copies its parts to their places. The
stream yields a piece of the memory as soon as all weights in it are complete. Without memory for all weights, it yields
each weight once it is complete, and frees it afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ....codecs.schema import DTYPES
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
from .pair_sender import SLOTS

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
        self._group.staying = self._neighbour.staying = ()
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
        self._by_weight: _WeightMemory | None = None
        self._arrived: queue.Queue[Bucket | Exception | None] = queue.Queue(SLOTS)
        """Buckets that are at their places; at the end an error, or None if all have come. If it is full, the receiver
        waits, so that memory is not taken for weights long before they are loaded."""
        self._thread: threading.Thread | None = None

    def receive_into(self, memory: torch.Tensor) -> None:
        if memory.device == self.device:
            self._memory = memory

    def __iter__(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        """Yield the pieces of the memory in order, each once it is complete. Every byte was verified in the bucket in
        which it came, and the last piece is yielded only when all buckets have come."""
        for frame, payload in self._arrivals():
            yield frame, payload
            self.deadline.moved()

    def weights(self, places: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield lists of (name, complete tensor), each until the next one is requested. No tensor can be relied on
        before the iterator has ended.

        places: as for `WeightInbox.arriving`. The other tensors are in memory that is taken when their first part
        comes.
        """
        memory = self._by_weight = _WeightMemory(self.plan, self.device, places)
        if isinstance(self._pairs, GroupReceiver):
            self._pairs.staying = memory.placed
        self._start(memory)
        left = _Left(self.plan, self._transfer.taking(self._rank))
        whole = [name for name in self.plan.names if left.is_whole(name)]  # Nothing of these is needed.
        under_way = True
        while under_way or whole:
            for name in whole:
                yield [(name, memory.unwritten(name))]
            arrived = self._next_ones() if under_way else []
            under_way = under_way and None not in arrived
            whole = []
            ready = [name for bucket in arrived if bucket is not None for name in left.take(bucket)]
            if ready:
                yield memory.ready(ready)
                memory.drop(ready)
                self.deadline.moved()
        if lacking := left.lacking:
            raise self.deadline.error(f"parts of {lacking[0]!r} never came")

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        offsets = bucket_offsets(self.plan)
        memory = self._room(offsets[-1]) if self._memory is None else self._memory
        self._start(BucketViews().all(self.plan, memory))
        left, under_way, ready = _Left(self.plan, self._transfer.taking(self._rank)), True, 0
        while under_way or ready < len(self.plan.sizes):
            arrived = self._next()
            under_way = arrived is not None
            if arrived is not None:
                left.take(arrived)
            while ready < len(self.plan.sizes) - under_way and left.has_piece(ready):
                size = self.plan.sizes[ready]
                yield BucketFrame(ready, "whole", size, 0), memory[offsets[ready] : offsets[ready] + size]
                ready += 1
            if not under_way and ready < len(self.plan.sizes):
                raise self.deadline.error(f"piece {ready} of {len(self.plan.sizes)} never came")

    def _start(self, tensors: Mapping[str, torch.Tensor]) -> None:
        thread = threading.Thread(target=self._receive, args=(tensors,), name="headrace-pairs", daemon=True)
        thread.start()
        self._thread = thread
        if self.closed:  # Another thread's `close` has perhaps not seen the thread.
            self._close()

    def _room(self, nbytes: int) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise self.deadline.error(
                f"sync.transport=pairs needs {nbytes} bytes of {self.device} beside the served weights: {error}"
            ) from error

    def _receive(self, tensors: Mapping[str, torch.Tensor]) -> None:
        try:
            while not self._turn.acquire(timeout=_SLICE_S):
                if not self.deadline.left_s:
                    raise self.deadline.error("the update before it is still being received")
            try:
                # `close` stops the deadline, which also ends a `receive` that has not begun.
                self._pairs.receive(self.update, self._transfer, self._rank, tensors, self._put, self.deadline)
            finally:
                self._turn.release()
            self._put(None)
        except Exception as error:  # The stream's own thread raises it.
            self._put(error)

    def _put(self, arrived: Bucket | Exception | None) -> None:
        while not self.closed:  # A closed stream takes no more.
            with contextlib.suppress(queue.Full):
                return self._arrived.put(arrived, timeout=_SLICE_S)

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

    def _next_ones(self) -> list[Bucket | None]:
        """Return all that has come, at least one."""
        found = [self._next()]
        with contextlib.suppress(queue.Empty):
            while found[-1] is not None:
                arrived = self._arrived.get_nowait()
                if isinstance(arrived, Exception):
                    raise arrived
                found.append(arrived)
        return found

    def _close(self) -> None:
        if self._thread is not None:
            self._pairs.stop()
            self._thread.join(_STOP_S)
        if self._by_weight is not None:
            self._by_weight.free()
            self._by_weight = None


class _WeightMemory(Mapping[str, torch.Tensor]):
    """Tensors of the weights that are being received: their places, or memory that is taken when it is needed."""

    def __init__(self, layout: BucketPlan, device: torch.device, places: Mapping[str, torch.Tensor]) -> None:
        self._specs = {entry.name: (DTYPES[entry.dtype], entry.shape) for entry in layout.entries}
        self._device, self._lock = device, threading.Lock()
        self.placed = {name: one for name, one in places.items() if name in self._specs and self._fits(name, one)}
        """Weights that are written to their places."""
        self._taken: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def _fits(self, name: str, place: torch.Tensor) -> bool:
        spec = (place.dtype, tuple(place.shape))
        return place.is_contiguous() and place.device == self._device and spec == self._specs[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.placed:
            return self.placed[name]
        with self._lock:  # Several threads unpack buckets.
            if name not in self._taken:
                dtype, shape = self._specs[name]
                self._taken[name] = torch.empty(shape, dtype=dtype, device=self._device)
            return self._taken[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def unwritten(self, name: str) -> torch.Tensor:
        """Return memory in the shape of a weight of which nothing is needed. All such weights share it."""
        dtype, shape = self._specs[name]
        nbytes = dtype.itemsize * math.prod(shape)
        if len(self._scratch) < nbytes:
            self._scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._scratch[:nbytes].view(dtype).view(shape)

    def ready(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """Return weights for work that is queued on the current CUDA stream."""
        found = [(name, self[name]) for name in names]
        if self._device.type == "cuda":
            for name, tensor in found:
                if name not in self.placed:  # Otherwise, its memory could be taken again before that work is done.
                    tensor.record_stream(torch.cuda.current_stream(self._device))
        return found

    def drop(self, names: Sequence[str]) -> None:
        """Free the memory of weights that have been used."""
        with self._lock:
            for name in names:
                self._taken.pop(name, None)

    def free(self) -> None:
        """Free all memory, also for other processes on the GPU, which use it while the engine sleeps."""
        self._taken, self._scratch = {}, self._scratch[:0].clone()
        if self._device.type == "cuda" and len(self.placed) < len(self._specs):
            torch.cuda.empty_cache()


class _Left:
    """Counts the bytes of each weight that have not come yet."""

    def __init__(self, layout: BucketPlan, buckets: Sequence[Bucket]) -> None:
        self._bytes: dict[str, int] = defaultdict(int)
        self._names: dict[int, list[str]] = defaultdict(list)
        for move in itertools.chain.from_iterable(bucket.moves for bucket in buckets):
            self._bytes[move.tensor] += move.end - move.at
        for entry in layout.entries:
            self._names[entry.bucket].append(entry.name)

    def take(self, bucket: Bucket) -> list[str]:
        """Count the parts of a bucket that has come. Returns the weights that it completes."""
        for move in bucket.moves:
            self._bytes[move.tensor] -= move.end - move.at
        return [name for name in dict.fromkeys(move.tensor for move in bucket.moves) if self.is_whole(name)]

    def is_whole(self, name: str) -> bool:
        """Return whether all parts of a weight have come."""
        return not self._bytes.get(name)

    def has_piece(self, piece: int) -> bool:
        """Return whether all weights that a piece of the memory has a part of are complete."""
        return all(self.is_whole(name) for name in self._names[piece])

    @property
    def lacking(self) -> list[str]:
        """Names of the weights that are not complete."""
        return [name for name, nbytes in self._bytes.items() if nbytes]


def missing_part(update: WeightUpdate, engine: str, worker: int, needs: Sequence[Region]) -> str:
    """Return which of the regions `needs` of a worker an update leaves out, in words; "" if it has all of them."""
    arguments, _ = read_arguments(update.plan)
    sent: dict[str, list[Box]] = defaultdict(list)
    number = worker_names(update.receivers).index(worker_name(engine, worker))
    for region in arguments.receivers[number].regions:
        sent[region.weight].append(region.box)
    lacking = (one for one in needs if not any(within(one.box, box) for box in sent[one.weight]))
    return next((f"{one.weight}{[*map(list, one.box)]}" for one in lacking), "")
