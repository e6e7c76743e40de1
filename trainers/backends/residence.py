"""Moves a backend's tensors between its device and host memory, and refuses calls that need them while they are away.

A tensor keeps its identity: only the memory of its storage is freed and allocated again. Optimizers, FSDP2 and Megatron
hold many references to their parameters and buffers, and views into them, all of which stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...actors.process.memory import available_memory, pin, unpin
from ...actors.train_backend import OffloadReport, device_bytes_in_use, offloaded_error
from ...codecs.integers import ALIGN, round_up

_BLOCK_BYTES, _SMALL_BYTES = 512, 1 << 20
"""Block size in bytes of torch's CUDA allocator, and the largest size in bytes that it serves from its pool for small
tensors."""


def own_device() -> torch.device:
    """Return the device of this process: its current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Moved:
    storage: torch.UntypedStorage
    nbytes: int
    start: int | None
    """Offset in bytes of the storage's content in the host memory; None for a storage that holds only zeros."""


class Residence:
    """Where a backend's tensors are: on its device, or, between `offload` and `onload`, in host memory.

    The host memory is allocated at the first `offload` and used again at each later one. For a GPU it is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._moved: list[_Moved] = []
        self.offloaded = False
        """True between `offload` and `onload`."""

    def require_onloaded(self, call: str) -> None:
        """Raise RuntimeError, naming the method `call`, while the tensors are in host memory."""
        if self.offloaded:
            raise offloaded_error(call)

    @torch.no_grad()
    def offload(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor] = ()) -> OffloadReport:
        """Copy the content of all `tensors` on the device to host memory, and free the memory of their storages.
        Idempotent.

        zeros: tensors that contain zeros only, which are not copied. A storage that several tensors share moves once,
        as a whole. Until `onload` the tensors must not be used. Raises OSError when host memory is too small or cannot
        be pinned; the tensors then stay where they are.
        """
        before = device_bytes_in_use()
        if self.offloaded:
            return OffloadReport(0, 0.0, 0.0, 0.0, before, before)
        moved, total = self._plan(tensors, zeros)
        self._reserve(total)
        start = time.perf_counter()
        for one in moved:
            if one.start is not None:
                self._room(one).copy_(_content(one.storage), non_blocking=True)
        self._synchronize()
        copied = time.perf_counter()
        for one in moved:
            one.storage.resize_(0)
        self._moved, self.offloaded = moved, True
        if self._device.type == "cuda":
            # The workspaces would stay allocated; the next matrix product creates them again.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        freed = time.perf_counter()
        return OffloadReport(_copied(moved), copied - start, freed - copied, 0.0, before, device_bytes_in_use())

    @torch.no_grad()
    def onload(self) -> OffloadReport:
        """Allocate memory for all storages again and copy their content back. Idempotent.

        Raises torch.OutOfMemoryError when the device has too little memory; the content then stays in host memory, and
        the call can be repeated.
        """
        before = device_bytes_in_use()
        if not self.offloaded:
            return OffloadReport(0, 0.0, 0.0, 0.0, before, before)
        start = time.perf_counter()
        self._allocate()
        allocated = time.perf_counter()
        for one in self._moved:
            if one.start is None:
                _content(one.storage).zero_()
            else:
                _content(one.storage).copy_(self._room(one), non_blocking=True)
        self._synchronize()
        copied = time.perf_counter()
        nbytes = _copied(self._moved)
        self._moved, self.offloaded = [], False
        return OffloadReport(nbytes, copied - allocated, allocated - start, 0.0, before, device_bytes_in_use())

    def close(self) -> None:
        """Free the host memory. Tensors that are in it are lost. Idempotent."""
        self._free()
        self._moved = []

    def _plan(self, tensors: Iterable[torch.Tensor], zeros: Iterable[torch.Tensor]) -> tuple[list[_Moved], int]:
        """Return the storages to move, and the number of bytes of host memory that their content needs."""
        found: dict[int, _Moved] = {}
        total = 0
        for kept, members in ((True, tensors), (False, zeros)):
            for tensor in members:
                if tensor.device.type != self._device.type:
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in found:
                    found[storage.data_ptr()] = _Moved(storage, storage.nbytes(), total if kept else None)
                    total += round_up(storage.nbytes(), ALIGN) if kept else 0
        return list(found.values()), total

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= len(self._host):
            return
        self._free()
        available = available_memory()
        if nbytes > available:
            raise OSError(f"offload: the model needs {nbytes} bytes of host memory, only {available} are available")
        host = torch.empty(nbytes, dtype=torch.uint8)
        if self._device.type == "cuda":
            try:
                pin(host)
            except OSError as error:
                raise OSError(f"offload: {error}") from error
        self._host = host

    def _free(self) -> None:
        if len(self._host) and self._device.type == "cuda":
            unpin(self._host)
        self._host = torch.empty(0, dtype=torch.uint8)

    def _allocate(self) -> None:
        """Allocate memory of the device for all storages that have none. torch's allocator takes each from one large
        piece.

        With a separate piece for each of hundreds of storages, an H100's driver took 0.1 s to allocate 7 GB and as long
        to free them. The piece belongs to a separate pool, so that nothing else is allocated between the storages.
        Otherwise the piece could not be freed.
        """
        if self._device.type != "cuda":
            self._resize()
            return
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool, self._device):
            away = [one.nbytes for one in self._moved if not one.storage.nbytes()]
            room = sum(round_up(nbytes, _BLOCK_BYTES) for nbytes in away if nbytes > _SMALL_BYTES)
            torch.empty(room, dtype=torch.uint8, device=self._device)  # The piece returns to the pool at once.
            self._resize()

    def _resize(self) -> None:
        for one in self._moved:
            one.storage.resize_(one.nbytes)

    def _room(self, one: _Moved) -> torch.Tensor:
        assert one.start is not None
        return self._host[one.start : one.start + one.nbytes]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _content(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of a storage as a tensor, uint8 `[nbytes]`, which shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]


def _copied(moved: Iterable[_Moved]) -> int:
    return sum(one.nbytes for one in moved if one.start is not None)
