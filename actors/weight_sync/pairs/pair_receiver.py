"""`PairReceiver` takes an engine worker's part of a version from all senders at once, and verifies each bucket.

    lane           frame -> free buffer -> payload -> verify -> unpack -> ... -> end     one thread for each sender
    main thread    all lanes ended -> every bucket has come -> done

Buckets are unpacked into tensors that are not served yet. Only when every bucket of every sender is there and verified
does `receive` return, so that a version is complete or not there at all.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from ....codecs.weights.buckets import checksum
from ....dataplane.listen_address import join_host
from ..plan.packing import unpack
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.collective_receiver import next_note
from ..transports.control_link import Hello, Link, Note
from ..transports.protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate, worker_name
from .pair_sender import SLOTS, number_of
from .payload_wire import connect_payloads, receive_payload

_SLICE_S = 0.05


class Damaged(WeightTransferError):
    """What a receiver got is wrong, though the sender is there."""


@dataclass(slots=True)
class _Lane:
    """The connections to one sender."""

    name: str
    link: Link
    connection: socket.socket
    buckets: list[Bucket]
    """Buckets that the sender has to send, in order."""


class PairReceiver:
    """One of the receivers of a version, in an engine worker. Only one thread may call `receive`; any thread may call
    `stop`."""

    def __init__(self, engine: str, worker: int, key: bytes) -> None:
        """key: the run's key, which the senders must know."""
        self._name = worker_name(engine, worker)
        self._key = key
        self.needs = b""
        """Regions that this receiver needs of later versions, as `encode_regions` returns them; empty for all."""
        self._memory: list[torch.Tensor] = []
        self._deadline: Deadline | None = None
        self._over = False
        """True once the update has failed in this receiver, so that all lanes end."""

    def receive(
        self,
        update: WeightUpdate,
        plan: TransferPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        arrived: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        """Receive a version into `tensors`, the local tensors by name, on the CPU.

        rank: number of this receiver in the plan. arrived: function that is called, in several threads, with each
        bucket whose parts are at their places. Raises WeightTransferError if a bucket is missing, damaged or late,
        or if a sender is lost; the tensors then hold a mix and must not be served.
        """
        deadline = self._deadline = Deadline(self._name, update.version, update.timeout_s)
        self._over = False
        by_sender: dict[int, list[Bucket]] = defaultdict(list)
        for bucket in plan.taking(rank):
            by_sender[bucket.sender].append(bucket)
        most = max((bucket.nbytes for buckets in by_sender.values() for bucket in buckets), default=0)
        if not self._memory or len(self._memory[0]) < most:
            self._memory = [torch.empty(most, dtype=torch.uint8) for _ in range(SLOTS)]
        free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in self._memory:
            free.put(buffer)
        lanes: list[_Lane] = []
        try:
            for sender, buckets in sorted(by_sender.items()):
                lanes.append(self._connect(update, sender, rank, buckets, deadline))
            with ThreadPoolExecutor(max(1, len(lanes)), thread_name_prefix="headrace-lane") as pool:
                running = [pool.submit(self._run, lane, tensors, free, deadline, arrived) for lane in lanes]
                try:
                    for ended in as_completed(running):
                        ended.result()
                finally:
                    self._over = True
            for lane in lanes:
                self._tell(lane, Note("done", data=self.needs), deadline)
        except WeightTransferError as error:
            note = Note("failed", str(error)) if isinstance(error, Damaged) else Note("gave up")
            for lane in lanes:
                with contextlib.suppress(OSError):
                    lane.link.send(note)
            raise
        finally:
            for lane in lanes:
                lane.link.close()
                lane.connection.close()

    def stop(self) -> None:
        """Make a `receive` that runs in another thread fail at once."""
        if self._deadline is not None:
            self._deadline.stop()

    # ---------------- These methods are private.

    def _connect(
        self, update: WeightUpdate, sender: int, rank: int, buckets: list[Bucket], deadline: Deadline
    ) -> _Lane:
        host, port, payload_port = update.location.split(";")[1 + sender].split("|")
        name = f"sender {sender} at {join_host(host, int(port))}"
        number = number_of(update)
        try:
            link = Link.connect(host, int(port), self._key, max(deadline.left_s, 1e-3))
            try:
                link.send(Hello(number, rank + 1, ""))
                pair = number, rank + 1
                connection = connect_payloads(host, int(payload_port), self._key, pair, max(deadline.left_s, 1e-3))
            except OSError:
                link.close()
                raise
        except OSError as error:
            raise deadline.error(f"{name} cannot be reached: {error}") from error
        return _Lane(name, link, connection, buckets)

    def _run(
        self,
        lane: _Lane,
        tensors: Mapping[str, torch.Tensor],
        free: queue.SimpleQueue[torch.Tensor],
        deadline: Deadline,
        arrived: Callable[[Bucket], None],
    ) -> None:
        """Receive, verify and unpack the buckets of one sender."""
        for bucket in [*lane.buckets, None]:
            what = "the end" if bucket is None else f"bucket {bucket.number}"
            frame = self._next(lane, what, deadline)
            if frame is None and bucket is None:
                return
            if bucket is None or frame is None or (frame.bucket, frame.nbytes) != (bucket.number, bucket.nbytes):
                raise self._damaged(lane, f"{what} never came", deadline)
            buffer = self._buffer(free, what, lane, deadline)
            try:
                payload = buffer[: bucket.nbytes]
                self._receive(lane, payload, what, deadline)
                found = checksum(payload)
                if found != frame.checksum:
                    told = f"{what} is damaged: its checksum is {found:016x}, but {frame.checksum:016x} was sent"
                    raise self._damaged(lane, told, deadline)
                unpack(bucket, payload, tensors)
            finally:
                free.put(buffer)
            deadline.moved()
            arrived(bucket)
            self._tell(lane, Note("through", number=bucket.number), deadline)

    def _next(self, lane: _Lane, what: str, deadline: Deadline) -> BucketFrame | None:
        """Return the next frame; None when the sender has sent all."""
        when = f"{lane.name}, {what}"
        while True:
            self._look(lane, what, deadline)
            note = next_note(lane.link, deadline, _SLICE_S, when)
            if note is not None and note.kind in ("frame", "end"):
                return note.frame

    def _buffer(
        self, free: queue.SimpleQueue[torch.Tensor], what: str, lane: _Lane, deadline: Deadline
    ) -> torch.Tensor:
        while True:
            with contextlib.suppress(queue.Empty):
                return free.get(timeout=_SLICE_S)
            self._look(lane, what, deadline)

    def _receive(self, lane: _Lane, payload: torch.Tensor, what: str, deadline: Deadline) -> None:
        def look(moved: bool) -> None:
            if moved:
                deadline.moved()
            else:  # An `abort` of the sender raises an error here.
                next_note(lane.link, deadline, 0.0, f"{lane.name}, {what}")
            self._look(lane, what, deadline)

        try:
            receive_payload(lane.connection, payload.numpy().data, look)
        except OSError as error:
            next_note(lane.link, deadline, min(1.0, deadline.left_s), f"{lane.name}, {what}")
            raise deadline.error(f"{lane.name} is lost at {what}: {error}") from error

    def _look(self, lane: _Lane, what: str, deadline: Deadline) -> None:
        if self._over or not deadline.left_s:
            raise deadline.error(f"{what} did not come from {lane.name}")

    def _damaged(self, lane: _Lane, told: str, deadline: Deadline) -> WeightTransferError:
        return Damaged(str(deadline.error(f"{lane.name}: {told}")))

    def _tell(self, lane: _Lane, note: Note, deadline: Deadline) -> None:
        try:
            lane.link.send(note)
        except OSError as error:
            raise deadline.error(f"{lane.name} is lost: {error}") from error
