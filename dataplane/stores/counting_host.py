"""Implements what hosts of stores with processes of their own have in common: they count and free blocks held there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .unfreed import Unfreed


class CountingHost(ABC):
    """Base class of hosts whose blocks are held by other processes. It records which blocks these hold, and which freed
    blocks they still have."""

    def __init__(self, peers: list[str], capacity_bytes: int) -> None:
        """peers: names of the processes, as shown in the log."""
        self._bytes: dict[int, int] = {}
        """Number of bytes of each block that is reserved or written, by block id."""
        self._unfreed = Unfreed(peers, capacity_bytes // 4)

    @abstractmethod
    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Record blocks, given by id and location, as freed, and ask the processes to drop them."""

    @abstractmethod
    def _deliver(self) -> None:
        """Ask every process to drop the freed blocks that it still holds."""

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Count the bytes of a block. Returns b"" for the location, which is known only after the write. Returns None
        while the processes still hold more than a quarter of the capacity in freed blocks; otherwise only the
        directory's capacity limits the store."""
        if nbytes and self._unfreed.over_limit:
            self._deliver()
            if self._unfreed.over_limit:
                return None
        self._bytes[block_id] = nbytes
        return b""

    def free(self, block_id: int, location: bytes) -> None:
        """Free one block; see `free_many`."""
        self.free_many([(block_id, location)])

    def usage_bytes(self) -> int:
        """Return the bytes of blocks that are reserved or written, and of freed blocks that processes still hold."""
        return sum(self._bytes.values()) + self._unfreed.nbytes

    def unfreed_bytes(self) -> int:
        """Ask the processes again to drop freed blocks, and return the bytes of the ones still held."""
        self._deliver()
        return self._unfreed.nbytes

    def shortage(self) -> str:
        """Return a text for an error message that says which processes still hold freed blocks; "" if none do."""
        return self._unfreed.described()

    def _undelivered(self, peer: int, error: Exception, *, dead: bool) -> None:
        """Record that a process did not confirm that it has dropped freed blocks. They are kept for the next request,
        unless the process is proven dead."""
        if dead:
            self._unfreed.died(peer, error)
        else:
            self._unfreed.failed(peer, error)
