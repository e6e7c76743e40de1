"""`PairReceiver` takes an engine worker's part of a version from all senders at once, and verifies each bucket.

    lane           frame -> free slot -> payload -> verify -> pass on -> unpack -> ... -> end    one for each sender
    sibling        passed on -> verify -> unpack -> ...             one for each receiver that takes for this one, too
    main thread    all of them ended -> every bucket has come -> done

Receivers of one host share the work: each takes a part of what several of them need, and passes it on to the others
(`shared_slots`). Buckets are unpacked into tensors that are not served yet. Only when every bucket of every sender is
there and verified does `receive` return, so that a version is complete or not there at all.
"""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from ....codecs.weights.buckets import apply_sparse, checksum
from ....dataplane.listen_address import join_host
from ..plan.packing import pack, unpack
from ..plan.transfer_plan import Bucket, TransferPlan
from ..transports.collective_receiver import next_note
from ..transports.control_link import Hello, Link, Note
from ..transports.protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate, worker_name, worker_names
from .pair_sender import number_of
from .payload_wire import connect_payloads, receive_payload
from .shared_slots import LostOwner, SharedSlots, SlotMemory, SlotReader, host_name, meeting_place

_SLICE_S = 0.05
_TELL_S = 1.0
"""Seconds after which all senders hear that this receiver moves, also those that have sent everything."""
_PATIENCE = 0.5
"""Part of the timeout for which receivers of one host wait for one of them that does nothing. The others then tell
their senders before the senders' time is over, so that only the one that does nothing is blamed."""


class Damaged(WeightTransferError):
    """What a receiver got is wrong, though the sender is there."""


@dataclass(slots=True)
class _Lane:
    """The connections to one sender."""

    sender: int
    name: str
    link: Link
    connection: socket.socket
    buckets: list[Bucket]
    """Buckets that the sender has to send, in order."""


@dataclass(slots=True)
class _Share:
    """Describes what one receiver has to do in an update."""

    update: WeightUpdate
    rank: int
    tensors: Mapping[str, torch.Tensor]
    arrived: Callable[[Bucket], None]
    deadline: Deadline
    readers: dict[int, tuple[int, ...]]
    """Receivers of this host that read each bucket which this one takes, by number of the bucket."""
    by_sender: dict[int, list[Bucket]] = field(default_factory=dict[int, list[Bucket]])
    """Buckets that this receiver takes itself. Rank 0 is always there, because it hears from all receivers."""
    by_sibling: dict[int, list[Bucket]] = field(default_factory=dict[int, list[Bucket]])
    """Buckets that another receiver of this host takes."""


class PlanReceiver:
    """Base class of the receivers of a version, one in each engine worker, which reaches the senders.

    Only one thread may call `receive`; any thread may call `stop`."""

    device = torch.device("cpu")
    """Device of the weights."""

    def __init__(self, engine: str, worker: int, key: bytes) -> None:
        """key: the run's key, which the senders must know."""
        self._name = worker_name(engine, worker)
        self._key = key
        self.needs = b""
        """Regions that this receiver needs of later versions, as `encode_regions` returns them; empty for all."""
        self.place = ""
        """Space in which this receiver reads memory of others: its host, or its GPU; "" if it reads none."""
        self._deadline: Deadline | None = None

    def stop(self) -> None:
        """Make a `receive` that runs in another thread fail at once."""
        if self._deadline is not None:
            self._deadline.stop()

    @contextlib.contextmanager
    def _reaching(self, update: WeightUpdate, sender: int, deadline: Deadline) -> Iterator[tuple[str, str, list[str]]]:
        """Context in which a sender is connected to. It yields the sender's name, its host, and what follows the host
        in its address. An OSError then names the sender."""
        host, *rest = update.location.split(";")[1 + sender].split("|")
        name = f"sender {sender} at {join_host(host, int(rest[0]))}"
        try:
            yield name, host, rest
        except OSError as error:
            raise deadline.error(f"{name} cannot be reached: {error}") from error


class PairReceiver(PlanReceiver):
    """Receiver of buckets over TCP, into the memory of CPUs."""

    def __init__(self, engine: str, worker: int, key: bytes) -> None:
        """key: the run's key, which the senders must know."""
        super().__init__(engine, worker, key)
        self.place = host_name()  # It becomes "" once this receiver was not able to read another's memory.
        self._memory: SlotMemory | None = None
        self.base: Mapping[str, torch.Tensor] | None = None
        """Tensors of the base of the next update, like those that are received; None to be sent everything."""
        self._over = False
        """True once the update has failed in this receiver, so that all its threads end."""

    def receive(
        self,
        update: WeightUpdate,
        plan: TransferPlan,
        rank: int,
        tensors: Mapping[str, torch.Tensor],
        arrived: Callable[[Bucket], None] = lambda bucket: None,
        deadline: Deadline | None = None,
    ) -> None:
        """Receive a version into `tensors`, the local tensors by name, on the CPU.

        rank: number of this receiver in the plan. arrived: function that is called, in several threads, with each
        bucket whose parts are at their places. deadline: limit of the waits, which ends the call when it is stopped,
        even before the call; None for a new one. Raises WeightTransferError if a bucket is missing, damaged or late,
        or if a sender, or a receiver that takes buckets for this one, is lost; the tensors then hold a mix and must
        not be served.
        """
        deadline = self._deadline = deadline or Deadline(self._name, update.version, update.timeout_s)
        deadline.moved()
        self._over = False
        share = _Share(update, rank, tensors, arrived, deadline, plan.passing(rank), {0: []})
        for bucket in plan.taking(rank):
            own = bucket.receiver == rank
            of, number = (share.by_sender, bucket.sender) if own else (share.by_sibling, bucket.receiver)
            of.setdefault(number, []).append(bucket)
        lanes: list[_Lane] = []
        slots = self._open_slots(share)
        try:
            for sender, buckets in sorted(share.by_sender.items()):
                lanes.append(self._connect(update, sender, rank, buckets, deadline))
            self._run_all(share, lanes, slots)
            for lane in lanes:
                self._tell(lane, Note("done", data=self.needs), deadline)
        except WeightTransferError as error:
            note = Note("failed", str(error)) if isinstance(error, Damaged) else Note("gave up")
            for lane in lanes:
                with contextlib.suppress(OSError):
                    lane.link.send(note)
            slots.close(str(error))
            raise
        finally:
            self.base = None
            slots.close()
            for lane in lanes:
                lane.link.close()
                lane.connection.close()

    def close(self) -> None:
        """Free the memory that is kept between updates. Idempotent."""
        self._memory = None

    # ---------------- These methods are private.

    def _open_slots(self, share: _Share) -> SharedSlots:
        """Return this receiver's slots, which its readers can open from now on."""
        most = max((bucket.nbytes for buckets in share.by_sender.values() for bucket in buckets), default=0)
        readers = sorted({reader for some in share.readers.values() for reader in some})
        places = {one: meeting_place(self._key, share.update.location, share.rank, one) for one in readers}
        try:
            if self._memory is None or self._memory.nbytes < most:
                self._memory = None  # The old memory is freed before more is allocated.
                self._memory = SlotMemory(most)
            return SharedSlots(self._memory, places, share.deadline)
        except OSError as error:
            raise share.deadline.error(f"no memory for the buckets of this host: {error}") from error

    def _connect(
        self, update: WeightUpdate, sender: int, rank: int, buckets: list[Bucket], deadline: Deadline
    ) -> _Lane:
        number = number_of(update)
        with self._reaching(update, sender, deadline) as (name, host, [port, payload_port]):
            link = Link.connect(host, int(port), self._key, max(deadline.left_s, 1e-3))
            try:
                base = "" if self.base is None else str(update.base)
                link.send(Hello(number, rank + 1, base, self.place))
                pair = number, rank + 1
                connection = connect_payloads(host, int(payload_port), self._key, pair, max(deadline.left_s, 1e-3))
            except OSError:
                link.close()
                raise
        return _Lane(sender, name, link, connection, buckets)

    def _run_all(self, share: _Share, lanes: list[_Lane], slots: SharedSlots) -> None:
        """Run all threads to their ends. Raises the first error of any of them."""
        deadline, patience_s = share.deadline, _PATIENCE * share.update.timeout_s
        running: list[Future[None]] = []

        def look() -> None:
            self._look("the last bucket", "its host", deadline)

        def over() -> bool:
            return all(one.done() for one in running[: len(lanes)])

        with ThreadPoolExecutor(len(lanes) + len(share.by_sibling) + 1, thread_name_prefix="headrace-lane") as pool:
            try:
                running += [pool.submit(self._run, lane, share, slots) for lane in lanes]
                running += [pool.submit(self._read, share, one, patience_s, slots) for one in share.by_sibling]
                if share.readers:
                    running.append(pool.submit(slots.serve, over, patience_s, look))
                self._await(running, lanes, deadline)
            finally:
                self._over = True

    def _await(self, running: list[Future[None]], lanes: list[_Lane], deadline: Deadline) -> None:
        pending, told = set(running), 0
        while pending:
            ended, pending = wait(pending, _TELL_S, FIRST_COMPLETED)
            for one in ended:
                one.result()
            if not ended and deadline.num_moves > told:
                told = deadline.num_moves
                for lane in lanes:
                    with contextlib.suppress(OSError):  # Its own thread tells what happened.
                        lane.link.send(Note("moves"))

    def _run(self, lane: _Lane, share: _Share, slots: SharedSlots) -> None:
        """Receive, verify, pass on and unpack the buckets of one sender."""
        deadline = share.deadline
        for bucket in [*lane.buckets, None]:
            what = "the end" if bucket is None else f"bucket {bucket.number}"
            frame = self._next(lane, what, deadline)
            slots.all_here = slots.all_here or lane.sender == 0  # Rank 0 waits for all receivers.
            if frame is None and bucket is None:
                return
            if bucket is None or frame is None or not self._fits(frame, bucket):
                raise self._damaged(lane.name, f"{what} never came", deadline)
            slot = self._slot(slots, what, lane, deadline)
            try:
                payload = slots.payload(slot, bucket.nbytes)
                if frame.encoding == "whole":
                    self._receive(lane, payload, what, deadline)
                    self._verify(frame, payload, lane.name, deadline)
                else:
                    frame = self._receive_changes(lane, bucket, frame, payload, deadline)
                if readers := share.readers.get(bucket.number):
                    slots.pass_on(slot, frame, readers)
                unpack(bucket, payload, share.tensors)
            finally:
                slots.through(slot)
            deadline.moved()
            share.arrived(bucket)
            self._tell(lane, Note("through", number=bucket.number), deadline)

    def _read(self, share: _Share, sibling: int, patience_s: float, slots: SharedSlots) -> None:
        """Read, verify and unpack the buckets that another receiver of this host takes."""
        update, deadline = share.update, share.deadline
        name = f"{worker_names(update.receivers)[sibling]}, which takes buckets for this host"
        due = {bucket.number: bucket for bucket in share.by_sibling[sibling]}

        def look() -> None:
            self._look(f"bucket {next(iter(due))}", name, deadline)

        place = meeting_place(self._key, update.location, sibling, share.rank)
        try:
            with contextlib.closing(SlotReader(place, patience_s, lambda: slots.all_here, look)) as reader:
                while due:
                    slot, frame, payload = reader.passed(deadline.moved)
                    bucket = due.get(frame.bucket)
                    if bucket is None or frame.nbytes != bucket.nbytes:
                        raise self._damaged(name, f"bucket {frame.bucket} came, which was not due", deadline)
                    self._verify(frame, payload, name, deadline)
                    unpack(bucket, payload, share.tensors)
                    reader.through(slot)
                    del due[frame.bucket]
                    deadline.moved()
                    share.arrived(bucket)
        except LostOwner as error:
            raise deadline.error(f"{name}: {error}") from error
        except OSError as error:
            self.place = ""  # From the next update on, this receiver gets its own copy.
            raise self._damaged(name, f"its memory cannot be read: {error}", deadline) from error

    def _verify(self, frame: BucketFrame, payload: torch.Tensor, of: str, deadline: Deadline) -> None:
        found = checksum(payload)
        if found != frame.checksum:
            told = f"bucket {frame.bucket} is damaged: its checksum is {found:016x}, but {frame.checksum:016x} was sent"
            raise self._damaged(of, told, deadline)

    def _fits(self, frame: BucketFrame, bucket: Bucket) -> bool:
        whole = frame.encoding == "whole"
        right = frame.nbytes == bucket.nbytes if whole else frame.nbytes <= bucket.nbytes and self.base is not None
        return frame.bucket == bucket.number and right

    def _receive_changes(
        self, lane: _Lane, bucket: Bucket, frame: BucketFrame, result: torch.Tensor, deadline: Deadline
    ) -> BucketFrame:
        """Receive a bucket's changes, and write the whole bucket that they make of the base into `result`. Returns its
        header."""
        assert self.base is not None
        changes = torch.empty(frame.nbytes, dtype=torch.uint8)
        self._receive(lane, changes, f"bucket {bucket.number}", deadline)
        self._verify(frame, changes, lane.name, deadline)
        pack(bucket, self.base, result)
        try:
            if frame.encoding == "sparse":
                apply_sparse(changes.numpy(), result.numpy())
        except ValueError as error:
            raise self._damaged(lane.name, f"bucket {bucket.number}: {error}", deadline) from error
        found = checksum(result)
        if found != frame.result:
            told = (
                f"bucket {bucket.number} is damaged in the version that was kept here: with its changes, its checksum "
                f"is {found:016x}, the trainer's is {frame.result:016x}: send it whole"
            )
            raise self._damaged(lane.name, told, deadline)
        return BucketFrame(bucket.number, "whole", bucket.nbytes, found)

    def _next(self, lane: _Lane, what: str, deadline: Deadline) -> BucketFrame | None:
        """Return the next frame; None when the sender has sent all."""
        when = f"{lane.name}, {what}"
        while True:
            self._look(what, lane.name, deadline)
            note = next_note(lane.link, deadline, _SLICE_S, when)
            if note is not None and note.kind in ("frame", "end"):
                return note.frame

    def _slot(self, slots: SharedSlots, what: str, lane: _Lane, deadline: Deadline) -> int:
        while True:
            with contextlib.suppress(queue.Empty):
                return slots.take()
            self._look(what, lane.name, deadline)
            note = next_note(lane.link, deadline, 0.0, f"{lane.name}, {what}")
            if note is not None:  # It is a frame, not an `abort`, which raises an error.
                lane.link.put_back(note)

    def _receive(self, lane: _Lane, payload: torch.Tensor, what: str, deadline: Deadline) -> None:
        def look(moved: bool) -> None:
            if moved:
                deadline.moved()
            else:  # An `abort` of the sender raises an error here.
                next_note(lane.link, deadline, 0.0, f"{lane.name}, {what}")
            self._look(what, lane.name, deadline)

        try:
            receive_payload(lane.connection, payload.numpy().data, look)
        except OSError as error:
            next_note(lane.link, deadline, min(1.0, deadline.left_s), f"{lane.name}, {what}")
            raise deadline.error(f"{lane.name} is lost at {what}: {error}") from error

    def _look(self, what: str, of: str, deadline: Deadline) -> None:
        if self._over or not deadline.left_s:
            raise deadline.error(f"{what} did not come from {of}")

    def _damaged(self, of: str, told: str, deadline: Deadline) -> WeightTransferError:
        return Damaged(str(deadline.error(f"{of}: {told}")))

    def _tell(self, lane: _Lane, note: Note, deadline: Deadline) -> None:
        try:
            lane.link.send(note)
        except OSError as error:
            raise deadline.error(f"{lane.name} is lost: {error}") from error
