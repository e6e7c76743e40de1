"""The `ipc` transport for GPUs: receivers on any GPU of the host read a ring of two buffers on the sender's GPU.

Weights go from GPU to GPU, or stay on the same one. Only frames (bucket headers) and progress counts go through the
status file in host memory. Sender and receiver may use the same GPU, which NCCL refuses.

    sender     fill b, digest b (queued) ---- done on the GPU -> frame b in the status file
    receiver   frame b -> copy or read b (queued) ------------ done on the GPU -> count b in the status file

No CUDA stream ever waits for another process. Threads do, with a deadline, while the GPUs work on the next bucket.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ....codecs import messages
from ....codecs.weights.gpu_scatter import as_signed
from .ends import SenderUpdate, bucket_offsets
from .ipc_base import Contents, IpcSenderBase, IpcStreamBase, Lease, SharedStatus, lease_holders
from .protocol import BucketFrame, Deadline, WeightUpdate, worker_name


class EventCallbacks:
    """Runs callbacks in order in one background thread, each once the work of a CUDA stream has finished. That work is
    what was queued before the callback."""

    def __init__(self, device: torch.device, name: str) -> None:
        """Prepare callbacks for the CUDA streams of `device`. name: name of the background thread, which starts with
        the first `put`."""
        self._device = device
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], torch.cuda.Event] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None], stream: torch.cuda.Stream | None = None) -> None:
        """Run `call` in the background thread once `stream` has finished the work queued so far. None is the current
        CUDA stream. `call` must not block."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        self._calls.put((call, event))

    def check(self) -> None:
        """Raise the last error of the GPU or of a callback, if there was one."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait until all callbacks have run, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, event = item
            try:
                event.synchronize()
                call()
            except Exception as error:  # `check` raises this error.
                self._failure = error


RING = 2
_TICK_S = 2e-5
"""Seconds between two checks of the status file; a bucket takes a few hundred microseconds."""
_JOINED = 1
"""Number added to a receiver's count of finished buckets, so that 0 means that the receiver has not joined."""
_DIGESTS = 4096
"""Minimum number of buckets that the array of digests has room for."""


@dataclass(frozen=True, slots=True)
class _Handle:
    """IPC handle of a GPU buffer: the values that torch needs to open the buffer in another process."""

    handle: bytes
    nbytes: int
    offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class CudaIpcSender(IpcSenderBase):
    """WeightSender that publishes weights from a GPU to receivers on the same host."""

    def __init__(self, run_id: str, timeout_s: float, device: torch.device) -> None:
        """Create the sender's folder in shared memory. Raises ValueError if a running sender of the same run owns the
        folder, or if the host has no shared memory."""
        super().__init__(run_id, timeout_s)
        self._device = device
        self._ring: list[torch.Tensor] = []
        self._digests = torch.empty(0, dtype=torch.int64, device=device)
        self._handles: tuple[bytes, ...] = ()
        self._gpu_uuid = ""
        self._status: SharedStatus | None = None
        self._last: list[int | None] = [None] * RING
        """Last bucket of the open update that was put into each of the two buffers; None for a buffer that is still
        unused."""
        self._num_payloads = 0
        self._outbox = EventCallbacks(device, "headrace-ipc-frames")

    def _begin(self, update: SenderUpdate) -> str:
        nbytes = max((1, *update.plan.sizes))
        if not self._ring or len(self._ring[0]) < nbytes or len(self._digests) < len(update.plan.sizes):
            self._ring = []
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(RING)]
            room = max(_DIGESTS, len(update.plan.sizes))
            self._digests = torch.zeros(room, dtype=torch.int64, device=self._device)
            self._handles = tuple(export_buffer(one) for one in (*self._ring, self._digests.view(torch.uint8)))
            self._gpu_uuid = gpu_uuid(self._device)
        self._last = [None for _ in range(RING)]
        self._num_payloads = 0
        if self._status is not None:
            self._status.remove("another update was begun")
        self._status = self._announce(
            update, Contents(update.plan.message, ring=self._handles, gpu_uuid=self._gpu_uuid)
        )
        return str(self._status.path)

    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        number = self._num_payloads % RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, which is more than the largest bucket")
        before = self._last[number]
        if before is not None:
            self._wait(update, before + 1)
        return self._ring[number][:nbytes]

    def _send(self, update: SenderUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        assert self._status is not None
        if frame.nbytes:
            self._digests[frame.bucket] = as_signed(frame.checksum) if digest is None else digest()
            self._last[self._num_payloads % RING] = frame.bucket
            self._num_payloads += 1
        self._outbox.put(partial(self._status.publish, frame))

    def _finish(self, update: SenderUpdate) -> None:
        assert self._status is not None
        self._outbox.put(self._status.mark_whole)
        self._wait(update, len(update.plan.sizes))

    def _abort(self, update: SenderUpdate, reason: str) -> None:
        if self._status is not None:
            self._status.withdraw(reason)

    def _close(self) -> None:
        if self._status is not None:
            self._status.remove("the sender has closed")
        self._outbox.close()
        self._ring = []
        super()._close()

    def _wait(self, update: SenderUpdate, num_buckets: int) -> None:
        """Wait until every receiver has finished the first `num_buckets` buckets."""
        assert self._status is not None
        status, deadline = self._status, self._deadline(update)
        names = [worker_name(group.engine, worker) for group in update.receivers for worker in range(group.num_workers)]
        engines = [group.engine for group in update.receivers for _ in range(group.num_workers)]
        late: list[int] = []
        looks, counted = 0, -1

        def through() -> bool:
            nonlocal late, looks, counted
            self._check_ended(update)
            self._outbox.check()
            total = int(status.counts.sum())
            if total != counted:
                counted = total
                deadline.moved()
            late = [rank for rank, count in enumerate(status.counts.tolist()) if count < num_buckets + _JOINED]
            looks += 1
            if late and looks % 500 == 0:
                held = [holder.rpartition(" (pid")[0] for holder in lease_holders(status.path)]
                gone = [rank for rank in late if status.counts[rank] and names[rank] not in held]
                if gone:
                    raise deadline.error(*told(gone, "has ended or given up"))
            return not late

        def told(ranks: list[int], what: str) -> tuple[str, list[str]]:
            at = [
                f"{names[rank]} {what} at bucket {int(count) - _JOINED}" if count else f"{names[rank]} did not join"
                for rank, count in ((rank, status.counts[rank]) for rank in ranks)
            ]
            return "; ".join(at), [engines[rank] for rank in ranks]

        deadline.wait(through, lambda: told(late, "is late"), _TICK_S)


class CudaIpcStream(IpcStreamBase):
    """Stream whose payloads are views of the sender's GPU buffers, or copies in memory offered to `receive_into`.

    When the sender's buffers are on another GPU, payloads are always copied to this one.
    """

    tick_s = _TICK_S

    def __init__(
        self,
        update: WeightUpdate,
        status: SharedStatus,
        lease: Lease,
        contents: Contents,
        deadline: Deadline,
        cache: RingCache,
        rank: int,
    ) -> None:
        super().__init__(update, status, lease, contents, deadline)
        ring = cache.open(contents.ring, deadline)
        self._cache = cache
        self._ring, self._sent_digests = ring[:RING], ring[RING].view(torch.int64)
        self._rank = rank
        self.device = ring[0].device
        self._offsets = bucket_offsets(contents.plan)
        self._on_other_gpu = contents.gpu_uuid != cache.gpu_uuid
        self._destination: torch.Tensor | None = None
        self._used: list[torch.cuda.Event | None] = [None] * RING
        """For each buffer of local copies, the CUDA event after which its last payload is no longer used; None before
        the first use."""
        self._num_payloads = 0
        self._copies = torch.cuda.Stream(self.device)
        self._counting = threading.Lock()
        status.counts[rank] = _JOINED

    def receive_into(self, memory: torch.Tensor) -> None:
        if memory.device == self.device:
            self._destination = memory

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        current = torch.cuda.current_stream(self.device)
        for bucket in range(len(self.plan.sizes)):
            self._wait(bucket)
            frame = self._status.frame(bucket)
            assert frame is not None
            number = self._num_payloads % RING
            self._num_payloads += bool(frame.nbytes)
            payload = self._ring[number][: frame.nbytes]
            target = self._target(frame, number)
            if target is None:
                yield frame, payload
                self._through(bucket, current)
                continue
            with torch.cuda.stream(self._copies):
                if (used := self._used[number]) is not None:
                    self._copies.wait_event(used)
                target.copy_(payload)
                copied = _mark(self._copies)
            self._through(bucket, self._copies)
            current.wait_event(copied)
            yield frame, target
            self._used[number] = _mark(current)

    def _target(self, frame: BucketFrame, number: int) -> torch.Tensor | None:
        """Return the memory to copy the payload to; None when it is read from the sender's buffer."""
        if not frame.nbytes:
            return None
        if self._destination is not None and frame.encoding == "whole":
            begin = self._offsets[frame.bucket]
            return self._destination[begin : begin + frame.nbytes]
        if not self._on_other_gpu:
            return None
        return self._cache.local_copy(number)[: frame.nbytes]

    def _through(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """Count the bucket as finished once `stream` has completed the queued work that reads the sender's buffer. The
        last bucket is left to `_confirm`."""
        if bucket < len(self.plan.sizes) - 1:  # `_confirm` counts the last bucket once the digests match.
            self._cache.callbacks.put(partial(self._count, bucket + 1), stream)

    def _count(self, num_buckets: int) -> None:
        with self._counting:
            if self._status.counts[self._rank] < num_buckets + _JOINED:
                self._status.counts[self._rank] = num_buckets + _JOINED

    def _check_status(self, when: str) -> None:
        super()._check_status(when)
        self._cache.callbacks.check()

    def _digests(self) -> torch.Tensor:
        # All digests are there, because the sender publishes a frame after its digest.
        return self._sent_digests[: len(self.plan.sizes)]

    def _confirm(self) -> None:
        self._count(len(self.plan.sizes))
        super()._confirm()

    def _close(self) -> None:
        # Without this wait, the memory could be reused too early.
        torch.cuda.current_stream(self.device).wait_stream(self._copies)
        super()._close()


class RingCache:
    """Keeps the sender's GPU buffers open in this process from one update to the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles: tuple[bytes, ...] = ()
        self._ring: list[torch.Tensor] = []
        self._local_copies: list[torch.Tensor] = []
        self.callbacks = EventCallbacks(device, "headrace-ipc-counts")
        """Callbacks that count buckets as finished once the GPU has read them."""
        self.gpu_uuid = ""
        """UUID of the GPU that this process uses; "" before the first `open`."""

    def open(self, handles: tuple[bytes, ...], deadline: Deadline) -> list[torch.Tensor]:
        """Return the sender's buffers, opening them unless they are open already. handles: IPC handles of the buffers.
        Raises WeightTransferError if the buffers cannot be opened here."""
        if self._device.type != "cuda":
            raise deadline.error(
                f"the sender's weights are on a GPU, this engine's on {self._device}: "
                "use sync.transport=collective, store or disk"
            )
        if handles != self._handles:
            self._forget()
            self.gpu_uuid = gpu_uuid(self._device)
            try:
                self._ring = [_import(handle, self._device) for handle in handles]
            except RuntimeError as error:
                raise deadline.error(f"the sender's GPU buffers cannot be opened on {self._device}: {error}") from error
            self._handles = handles
        return self._ring

    def local_copy(self, number: int) -> torch.Tensor:
        """Return a buffer on this process's GPU that is as large as the sender's buffer `number`."""
        if not self._local_copies:
            self._local_copies = [torch.empty_like(buffer) for buffer in self._ring[:RING]]
        return self._local_copies[number]

    def close(self) -> None:
        self.callbacks.close()
        self._forget()

    def _forget(self) -> None:
        self._ring, self._local_copies, self._handles = [], [], ()


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_buffer(buffer: torch.Tensor) -> bytes:
    """Return what another process of the host needs to open a GPU buffer."""
    _, handle, nbytes, offset, counter, counter_offset, event, sync = buffer.untyped_storage()._share_cuda_()
    return messages.encode(_Handle(handle, nbytes, offset, counter, counter_offset, event, sync))


def _import(data: bytes, device: torch.device) -> torch.Tensor:
    """Open another process's GPU buffer as a tensor on this process's own GPU. If the buffer is on a different GPU, the
    tensor accesses that GPU's memory."""
    found = messages.decode(data, _Handle)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        storage = torch.UntypedStorage._new_shared_cuda(
            index,
            found.handle,
            found.nbytes,
            found.offset,
            found.ref_counter_handle,
            found.ref_counter_offset,
            found.event_handle,
            found.event_sync_required,
        )
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index)).set_(storage)
