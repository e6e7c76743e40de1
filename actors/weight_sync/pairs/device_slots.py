"""`DeviceSlots` is memory of a train rank from which the engine workers on its GPU, or its host, read buckets.

On a GPU the workers open it by CUDA IPC. On a CPU it is memory without a name (memfd), which they open through /proc.
So nothing of it is left when the processes have ended, however they end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import torch

from ....codecs import messages
from ..transports import host_ring
from ..transports.cuda_ipc import RingCache, export_buffer, gpu_uuid
from ..transports.protocol import Deadline
from .pair_sender import SLOTS
from .shared_slots import SlotMemory, map_slots

_SEPARATOR = " on "


def place_of(device: torch.device, gpu: str = "") -> str:
    """Return the place of a process: its GPU, and the space whose processes can open each other's memory. gpu: name of
    the GPU; "" for the one of `device`."""
    name = gpu or (gpu_uuid(device) if device.type == "cuda" else device.type)
    return f"{name}{_SEPARATOR}{host_ring.host_name()}"


def neighbours(ranks: Sequence[str], workers: Sequence[str]) -> list[int]:
    """Return for each worker the train rank that hands it its buckets.

    It is one on the worker's own GPU, else one on its host, in both cases the one with the fewest workers so far.
    ranks, workers: place of each, as `place_of` returns it. Raises ValueError for a worker on a host without a rank.
    """
    chosen: list[int] = []
    served: Counter[int] = Counter()
    for place in workers:
        host = place.partition(_SEPARATOR)[2]
        here = [rank for rank, one in enumerate(ranks) if one == place]
        here = here or [rank for rank, one in enumerate(ranks) if one.partition(_SEPARATOR)[2] == host]
        if not here:
            raise ValueError(f"no train rank is on the host of worker {len(chosen)}, or it has another user")
        chosen.append(min(here, key=lambda rank: served[rank]))
        served[chosen[-1]] += 1
    return chosen


class DeviceSlots:
    """The slots of a train rank."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate SLOTS slots of `nbytes` bytes each. Raises OSError, or torch's error, without memory for them."""
        self.nbytes = nbytes
        if device.type == "cuda":
            self.slots = [torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device) for _ in range(SLOTS)]
            told = tuple(export_buffer(one) for one in self.slots)
        else:
            self._memory = SlotMemory(nbytes)
            self.slots = self._memory.slots
            descriptor = self._memory.descriptor
            told = (f"{os.getpid()} {descriptor} {os.fstat(descriptor).st_ino}".encode(),)
        self.message = messages.encode(told)
        """Description of the slots, from which `OpenSlots.open` opens them in another process."""


class OpenSlots:
    """The slots of a train rank in a worker, which keeps them open from update to update."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = RingCache(device)
        self._open: tuple[bytes, list[torch.Tensor]] = b"", []

    def open(self, message: bytes, deadline: Deadline) -> list[torch.Tensor]:
        """Return the slots that `message` describes. Raises WeightTransferError if they cannot be opened here."""
        if message != self._open[0]:
            self._open = b"", []  # The old memory is freed before more is opened.
            told = messages.decode(message, list[bytes])
            try:
                found = self._ring.open(tuple(told), deadline) if len(told) > 1 else _mapped(told[0].decode())
            except OSError as error:
                raise deadline.error(f"the memory of the train rank on this host cannot be opened: {error}") from error
            self._open = message, found
        return self._open[1]

    def close(self) -> None:
        """Close the slots. Idempotent."""
        self._open = b"", []
        self._ring.close()


def _mapped(address: str) -> list[torch.Tensor]:
    pid, number, inode = address.split()
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        if os.fstat(descriptor).st_ino != int(inode):
            raise OSError(f"the memory at {address} belongs to another process")
        return map_slots(descriptor)
    finally:
        os.close(descriptor)
