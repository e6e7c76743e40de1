"""The `ipc` transport carries weights through the memory of one host, for trainers and engines that share it.

This module handles weights on CPUs; `cuda_ipc` handles those on GPUs. The last two versions lie in two slots of shared
memory that are written in turn, each tensor in one piece. Receivers verify the bytes and use them where they are. A
version that a receiver still uses is never overwritten: the sender leaves that memory to the receiver and takes new
memory.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ....codecs.integers import ALIGN
from .cuda_ipc import CudaIpcStream, RingCache
from .ends import Receiver, SenderUpdate, Stream, bucket_offsets
from .ipc_base import WITHDRAWN, Contents, IpcSenderBase, IpcStreamBase, Lease, SharedStatus, join, lease_holders
from .protocol import BucketFrame, Deadline, WeightTransferError, WeightUpdate

_SLOTS = 2
_GRACE_S = 0.2
"""Seconds that the sender waits for receivers to release an old version, before it leaves the memory to them."""
_MADV_POPULATE_READ = 22

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    path: Path
    memory: torch.Tensor
    """Writable bytes of the slot, uint8; this tensor keeps the mapping alive."""
    status: SharedStatus | None = None
    """Status file of the update whose bytes are, or last were, in the slot; None before the first update."""

    @property
    def rank(self) -> int:
        """Sort key for reusing slots, lowest first: -1 when the slot holds no readable version, else the version."""
        return -1 if self.status is None or self.status.state == WITHDRAWN else self.status.version


class IpcSender(IpcSenderBase):
    """WeightSender that publishes CPU tensors to receivers on the same host."""

    lasting = True

    def __init__(self, run_id: str, timeout_s: float) -> None:
        """Create the sender's folder in shared memory. Raises ValueError if a running sender of the same run owns the
        folder, or if the host has no shared memory."""
        super().__init__(run_id, timeout_s)
        self._slots: list[_Slot] = []
        self._num_slots = 0
        self._token = uuid.uuid4().hex[:8]
        self._offsets: list[int] = []

    def _begin(self, update: SenderUpdate) -> str:
        self._offsets = bucket_offsets(update.plan)
        slot = self._free_slot(update, max(self._offsets[-1], ALIGN))
        slot.status = self._announce(update, Contents(update.plan.message, slot.path.name))
        self._slots.append(slot)
        return str(slot.status.path)

    def _buffer(self, update: SenderUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        room = self._offsets[bucket + 1] - self._offsets[bucket]
        if nbytes > room:
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, expected at most {room}")
        return self._slots[-1].memory[self._offsets[bucket] : self._offsets[bucket] + nbytes]

    def _send(self, update: SenderUpdate, frame: BucketFrame, digest: Callable[[], torch.Tensor] | None) -> None:
        self._status.publish(frame)

    def _finish(self, update: SenderUpdate) -> None:
        self._status.mark_whole()

    def _abort(self, update: SenderUpdate, reason: str) -> None:
        self._status.withdraw(reason)

    def _close(self) -> None:
        for slot in self._slots:
            if slot.status is not None:
                slot.status.remove("the sender has closed")
        self._slots = []
        super()._close()

    @property
    def _status(self) -> SharedStatus:
        status = self._slots[-1].status
        assert status is not None
        return status

    # ---------------- These private methods manage the shared memory.

    def _free_slot(self, update: SenderUpdate, nbytes: int) -> _Slot:
        """Return a slot of at least `nbytes` bytes that no receiver reads. The caller adds it to `_slots` once its
        update is announced."""
        if len(self._slots) < _SLOTS:
            return self._new_slot(nbytes)
        again = [slot for slot in self._slots if slot.rank == update.version]
        slot = again[0] if again else min(self._slots, key=lambda slot: slot.rank)
        self._slots.remove(slot)
        if slot.status is not None:
            slot.status.remove(f"version {update.version} takes its place")
            deadline = Deadline("sender", update.version, self.timeout_s)
            if not self._let_go(slot.status, Deadline("sender", update.version, min(_GRACE_S, self.timeout_s))):
                return self._replaced(slot, slot.status, nbytes, deadline)
        if len(slot.memory) >= nbytes:
            return _Slot(slot.path, slot.memory)
        slot.path.unlink()
        return self._new_slot(nbytes)

    def _let_go(self, status: SharedStatus, deadline: Deadline) -> bool:
        """Wait until no receiver holds a lease on the version of `status`. Returns False when one still does at the
        deadline."""
        try:
            deadline.wait(lambda: not lease_holders(status.path), lambda: ("held", ()), 1e-3)
        except WeightTransferError:
            return False
        return True

    def _replaced(self, slot: _Slot, status: SharedStatus, nbytes: int, deadline: Deadline) -> _Slot:
        """Return a new slot that replaces `slot`, which receivers still read. The old memory is freed when the last of
        them releases it or dies. Raises WeightTransferError when there is no room for both."""
        holders = ", ".join(lease_holders(status.path))
        try:
            fresh = self._new_slot(nbytes)
        except OSError as error:
            if self._let_go(status, deadline):
                return _Slot(slot.path, slot.memory) if len(slot.memory) >= nbytes else self._new_slot(nbytes)
            slot.path.unlink()
            raise deadline.error(
                f"no room: version {status.version} is still held by {holders}, and another does not fit ({error})",
                [holder.rpartition(" worker ")[0] for holder in lease_holders(status.path)],
            ) from error
        slot.path.unlink()
        _log.warning("weights: version %d is left in memory, it is held by %s", status.version, holders)
        return fresh

    def _new_slot(self, nbytes: int) -> _Slot:
        path = self.folder / f"slot-{self._token}-{self._num_slots}"
        self._num_slots += 1  # A name is never reused in any process, because receivers keep mappings by name.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            # This turns a lack of room into an error here, instead of a SIGBUS at a later write.
            os.posix_fallocate(descriptor, 0, nbytes)
            mapping = mmap.mmap(descriptor, nbytes)
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, f"weights: no room for {nbytes} bytes at {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return _Slot(path, torch.frombuffer(mapping, dtype=torch.uint8))


class IpcReceiver(Receiver):
    """Receiver of weights that a sender on the same host publishes, from CPU or GPU."""

    def __init__(self, engine: str, worker: int, device: torch.device) -> None:
        super().__init__(engine, worker)
        self._mappings: OrderedDict[Path, torch.Tensor] = OrderedDict()
        self._rings = RingCache(device)

    def _open(self, update: WeightUpdate, rank: int, deadline: Deadline) -> Stream:
        status, lease, contents = join(update, deadline)
        try:
            if contents.ring:
                return CudaIpcStream(update, status, lease, contents, deadline, self._rings, rank)
            memory = self._map(status.path.parent / contents.slot, bucket_offsets(contents.plan)[-1], deadline)
            return HostStream(update, status, lease, contents, deadline, memory, self._mappings.clear)
        except WeightTransferError:
            lease.release()
            raise

    def close(self) -> None:
        """Release all mappings of the sender's memory, on host and GPU. Idempotent."""
        self._mappings.clear()
        self._rings.close()

    def _map(self, path: Path, nbytes: int, deadline: Deadline) -> torch.Tensor:
        """Map the file of a slot and return its bytes. The mapping is private: writing to it copies the page and leaves
        the sender's bytes as they are."""
        if path in self._mappings:
            self._mappings.move_to_end(path)
            return self._mappings[path]
        try:
            descriptor = os.open(path, os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                if size < nbytes or not size:
                    raise deadline.error(f"{path} has {size} bytes, expected {nbytes} for the update")
                mapping = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise deadline.error(f"{path} cannot be mapped: {error}") from error
        with contextlib.suppress(OSError):  # On an older kernel, every 64 KiB costs one page fault instead.
            mapping.madvise(_MADV_POPULATE_READ)
        self._mappings[path] = torch.frombuffer(mapping, dtype=torch.uint8)
        while len(self._mappings) > _SLOTS:
            self._mappings.popitem(last=False)
        return self._mappings[path]


class HostStream(IpcStreamBase):
    """Stream of a version in shared memory. Its payloads are the sender's own bytes, without a copy."""

    lasting = True

    def __init__(
        self,
        update: WeightUpdate,
        status: SharedStatus,
        lease: Lease,
        contents: Contents,
        deadline: Deadline,
        memory: torch.Tensor,
        forget: Callable[[], None],
    ) -> None:
        """Prepare to read the update from `memory`, the mapped slot. forget: function that drops this process's
        mapping; called when a bucket is damaged, in case the damage is in the mapping."""
        super().__init__(update, status, lease, contents, deadline)
        self._offsets = bucket_offsets(contents.plan)
        self._forget = forget
        self.memory = memory

    def _arrivals(self) -> Iterator[tuple[BucketFrame, torch.Tensor]]:
        for bucket in range(len(self.plan.sizes)):
            self._wait(bucket)
            frame, memory = self._status.frame(bucket), self.memory
            assert frame is not None and memory is not None
            begin = self._offsets[bucket]
            yield frame, memory[begin : min(begin + frame.nbytes, self._offsets[bucket + 1])]

    def give_up(self, error: WeightTransferError) -> None:
        self._forget()
