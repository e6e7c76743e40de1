"""The `ipc` transport's part for GPUs: a ring of the sender's buffers, opened by receivers on any GPU of the host.

Bytes go from GPU to GPU (or stay on the one); only frames and counts go through the control page. The same GPU may
serve both ends, which NCCL refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...codecs import messages
from ...dataplane.stores.shm_folder import ROOT
from .bounds import Bound, worker_name
from .control_page import ControlPage, Lease, lease_holders
from .paged import Contents, PagedSender, PagedStream
from .protocol import BucketFrame, WeightUpdate
from .sending import OpenUpdate

RING = 2
_JOINED = 1
"""Added to a receiver's count: 0 stands for one that has not joined."""


@dataclass(frozen=True, slots=True)
class _Handle:
    """A buffer for other processes: what torch wants to open it again."""

    handle: bytes
    nbytes: int
    offset: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class CudaIpcSender(PagedSender):
    """Publishes from a GPU. See WeightSender."""

    def __init__(self, run_id: str, timeout_s: float, device: torch.device, root: Path = ROOT) -> None:
        """Raises ValueError when a living sender of the same run has the folder, or the host has no shared memory."""
        super().__init__(run_id, timeout_s, root)
        self._device = device
        self._ring: list[torch.Tensor] = []
        self._handles: tuple[bytes, ...] = ()
        self._page: ControlPage | None = None
        self._last: list[int | None] = [None] * RING
        """The bucket that each buffer had last, of the open update."""
        self._num_payloads = 0

    def _begin(self, update: OpenUpdate) -> str:
        nbytes = max(1, *update.plan.sizes) if update.plan.sizes else 1
        if not self._ring or len(self._ring[0]) < nbytes:
            self._ring = []
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(RING)]
            self._handles = tuple(_export(buffer) for buffer in self._ring)
        self._last = [None for _ in range(RING)]
        self._num_payloads = 0
        if self._page is not None:
            self._page.remove("another update was begun")
        self._page = self._announce(update, Contents(update.plan, ring=self._handles))
        return str(self._page.path)

    def _buffer(self, update: OpenUpdate, bucket: int, nbytes: int) -> torch.Tensor:
        number = self._num_payloads % RING
        if nbytes > len(self._ring[number]):
            raise ValueError(f"bucket {bucket}: got a payload of {nbytes} bytes, the largest bucket is smaller")
        before = self._last[number]
        if before is not None:
            self._wait(update, before + 1)
        return self._ring[number][:nbytes]

    def _send(self, update: OpenUpdate, frame: BucketFrame) -> None:
        assert self._page is not None
        if frame.nbytes:
            torch.cuda.current_stream(self._device).synchronize()  # the checksum has waited for it already
            self._last[self._num_payloads % RING] = frame.bucket
            self._num_payloads += 1
        self._page.publish(frame)

    def _finish(self, update: OpenUpdate) -> None:
        assert self._page is not None
        self._wait(update, len(update.plan.sizes))
        self._page.mark_whole()

    def _abort(self, update: OpenUpdate, reason: str) -> None:
        if self._page is not None:
            self._page.withdraw(reason)

    def _close(self) -> None:
        if self._page is not None:
            self._page.remove("the sender has closed")
        self._ring = []
        super()._close()

    def _wait(self, update: OpenUpdate, num_buckets: int) -> None:
        """Until every receiver is through with that many buckets."""
        assert self._page is not None
        page, bound = self._page, self._bound(update)
        names = [worker_name(group.engine, worker) for group in update.receivers for worker in range(group.num_workers)]
        engines = [group.engine for group in update.receivers for _ in range(group.num_workers)]
        late: list[int] = []
        looks = 0

        def through() -> bool:
            nonlocal late, looks
            self._check_ended(update)
            late = [rank for rank, count in enumerate(page.counts.tolist()) if count < num_buckets + _JOINED]
            looks += 1
            if late and looks % 100 == 0:
                held = [holder.rpartition(" (pid")[0] for holder in lease_holders(page.path)]
                gone = [rank for rank in late if page.counts[rank] and names[rank] not in held]
                if gone:
                    raise bound.error(*told(gone, "has ended or given up"))
            return not late

        def told(ranks: list[int], what: str) -> tuple[str, list[str]]:
            at = [
                f"{names[rank]} {what} at bucket {int(count) - _JOINED}" if count else f"{names[rank]} did not join"
                for rank, count in ((rank, page.counts[rank]) for rank in ranks)
            ]
            return "; ".join(at), [engines[rank] for rank in ranks]

        bound.wait(through, lambda: told(late, "is late"))


class CudaIpcStream(PagedStream):
    """Payloads are views of the sender's ring."""

    def __init__(
        self,
        update: WeightUpdate,
        page: ControlPage,
        lease: Lease,
        contents: Contents,
        bound: Bound,
        ring: list[torch.Tensor],
        rank: int,
    ) -> None:
        super().__init__(update, page, lease, contents, bound)
        self._ring = ring
        self._rank = rank
        self._num_payloads = 0
        self.device = ring[0].device
        page.counts[rank] = _JOINED

    def _payload(self, frame: BucketFrame) -> torch.Tensor:
        buffer = self._ring[self._num_payloads % RING]
        self._num_payloads += bool(frame.nbytes)
        return buffer[: frame.nbytes]

    def _through(self, bucket: int) -> None:
        torch.cuda.current_stream(self.device).synchronize()  # what was read from the buffer has been read
        self._page.counts[self._rank] = bucket + 1 + _JOINED


class RingCache:
    """The sender's buffers as this process sees them, kept from update to update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles: tuple[bytes, ...] = ()
        self._ring: list[torch.Tensor] = []

    def open(self, handles: tuple[bytes, ...], bound: Bound) -> list[torch.Tensor]:
        """Raises WeightTransferError when they cannot be opened here."""
        if self._device.type != "cuda":
            raise bound.error(
                f"the sender's weights are on a GPU, this engine's on {self._device}: "
                "use sync.transport=collective, store or disk"
            )
        if handles != self._handles:
            self.close()
            try:
                self._ring = [_import(handle, self._device) for handle in handles]
            except RuntimeError as error:
                raise bound.error(f"the sender's GPU buffers cannot be opened on {self._device}: {error}") from error
            self._handles = handles
        return self._ring

    def close(self) -> None:
        self._ring, self._handles = [], ()


def _export(buffer: torch.Tensor) -> bytes:
    _, handle, nbytes, offset, counter, counter_offset, event, sync = buffer.untyped_storage()._share_cuda_()
    return messages.encode(_Handle(handle, nbytes, offset, counter, counter_offset, event, sync))


def _import(data: bytes, device: torch.device) -> torch.Tensor:
    """The exported buffer; opened under this process's own device, which reads its peer's memory where they differ."""
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
