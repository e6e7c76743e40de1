"""Counts and frees the blocks that a store's own processes hold, for the hosts of such stores.

A freed block that a process still holds, because it did not answer, is remembered until it answers or is dead.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

_logger = logging.getLogger(__name__)

FREE_TIMEOUT_S = 5.0
"""Seconds that a process may take to answer a request to free blocks."""
RETRY_TIMEOUT_S = 0.5
"""Seconds that a process may take to answer once it has failed to answer before. The limit is short, so that a stopped
process hardly delays the requests to other processes."""


class Unfreed:
    """Holds the freed blocks that a store's processes have not deleted yet, by process number. Not thread-safe.

    A process that does not answer may be stopped, swapped out or busy, so its blocks stay here for the next request.
    Only the blocks of a process that is proven dead are dropped, because they are gone with it.
    """

    def __init__(self, peers: list[str], limit_bytes: int) -> None:
        """peers: names of the processes, as shown in the log. limit_bytes: bytes of freed but not yet deleted blocks
        above which nothing new should be written."""
        self._peers = peers
        self.limit_bytes = limit_bytes
        self._blocks: list[dict[int, int]] = [{} for _ in peers]
        """Blocks freed but not deleted yet, for each process: block id -> number of bytes."""
        self._silent: set[int] = set()
        self._dead: set[int] = set()

    def add_peer(self, name: str) -> None:
        """Record a process that has been started. Its number is the number of processes before it."""
        self._peers.append(name)
        self._blocks.append({})

    def add(self, peer: int, block_id: int, nbytes: int) -> None:
        """Record that a process has to free a block. Does nothing for a dead process, or a block that is recorded
        already."""
        if peer not in self._dead:
            self._blocks[peer].setdefault(block_id, nbytes)

    def waiting(self) -> list[tuple[int, list[int]]]:
        """Return (process, ids of its blocks to free) for every process that has such blocks."""
        return [(peer, list(blocks)) for peer, blocks in enumerate(self._blocks) if blocks]

    def timeout_s(self, peer: int) -> float:
        """Return how many seconds to wait for a process's answer."""
        return RETRY_TIMEOUT_S if peer in self._silent else FREE_TIMEOUT_S

    def delivered(self, peer: int, block_ids: list[int]) -> None:
        """Remove blocks that the process has freed, and log it when the process had failed to answer before."""
        for block_id in block_ids:
            self._blocks[peer].pop(block_id, None)
        if peer in self._silent:
            self._silent.discard(peer)
            _logger.warning("%s answers again: it has freed %d blocks", self._peers[peer], len(block_ids))

    def failed(self, peer: int, error: Exception) -> None:
        """Record that a process did not answer. Its blocks stay here for the next request; the first failure is
        logged."""
        if peer not in self._silent:
            self._silent.add(peer)
            blocks = self._blocks[peer]
            _logger.warning(
                "%s did not free %d blocks of %d bytes; it is asked again with the next free: %s",
                self._peers[peer],
                len(blocks),
                sum(blocks.values()),
                error,
            )

    def died(self, peer: int, error: Exception) -> None:
        """Record that a process is proven dead. Its blocks are dropped, and later ones are ignored."""
        if peer in self._dead:
            return
        self._dead.add(peer)
        self._silent.discard(peer)
        _logger.warning("%s has died, and its blocks with it: %s", self._peers[peer], error)
        self._blocks[peer].clear()

    def name(self, peer: int) -> str:
        """Return the name of a process, as shown in the log."""
        return self._peers[peer]

    @property
    def dead(self) -> dict[int, str]:
        """Names of the processes that are proven dead, by number."""
        return {peer: self._peers[peer] for peer in tuple(self._dead)}

    def answers(self, peer: int) -> bool:
        """Return whether a process is not known to be silent or dead."""
        return peer not in self._silent and peer not in self._dead

    @property
    def living(self) -> list[int]:
        """Numbers of the processes that are not proven dead."""
        return [peer for peer in range(len(self._peers)) if peer not in self._dead]

    @property
    def nbytes(self) -> int:
        """Number of bytes of the blocks that have been freed but not deleted yet."""
        return sum(sum(blocks.values()) for blocks in self._blocks)

    def nbytes_of(self, peer: int) -> int:
        """Return the number of bytes of the blocks that a process has not deleted yet."""
        return sum(self._blocks[peer].values())

    @property
    def over_limit(self) -> bool:
        """True if blocks that are still to be deleted take so many bytes that nothing new should be written."""
        return self.nbytes > self.limit_bytes

    def described(self) -> str:
        """Return a text for an error message on cleared blocks that processes still hold; "" if there are none. It
        names the processes and the number of bytes."""
        silent = [f"{self._peers[peer]} ({sum(self._blocks[peer].values())} bytes)" for peer, _ in self.waiting()]
        return f"cleared blocks are not freed yet by {', '.join(silent)}" if silent else ""


class CountingHost(ABC):
    """Base class of hosts whose blocks are held by other processes. It records the blocks of each process, and the
    freed blocks that the process has not dropped yet."""

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

    @abstractmethod
    def _death(self, peer: int) -> Exception | None:
        """Ask a process for a sign of life, in bounded time. Returns the proof of its death, or None."""

    @property
    def dead(self) -> Mapping[int, str]:
        """Names of the processes that are proven dead, by number; see `HasHolders`."""
        return self._unfreed.dead

    def declare_dead(self, named: str) -> None:
        """Take the processes with this name as dead; see `HasHolders`."""
        for peer in self._unfreed.living:
            if named and named in self._names(peer):
                self._unfreed.died(peer, RuntimeError("a client has said so"))

    def _names(self, peer: int) -> tuple[str, ...]:
        """Return the names by which a client can name a process."""
        return (self._unfreed.name(peer),)

    def look(self) -> None:
        """Ask every process for a sign of life; see `HasHolders`."""
        for peer in self._unfreed.living:
            proof = self._death(peer)
            if proof is not None:
                self._unfreed.died(peer, proof)

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Count the bytes of a block. Returns b"" for the location, which is known only after the write. Returns None
        while the processes still hold more than a quarter of the capacity in freed blocks; otherwise only the
        directory's capacity limits the store."""
        if not self.count(block_id, nbytes):
            self._deliver()
            if not self.count(block_id, nbytes):
                return None
        return b""

    def count(self, block_id: int, nbytes: int) -> bool:
        """Count the bytes of a block unless the processes hold too many freed ones; see `FreesMany`."""
        if nbytes and self._is_over_limit():
            return False
        self._bytes[block_id] = nbytes
        return True

    def _is_over_limit(self) -> bool:
        return self._unfreed.over_limit

    def free(self, block_id: int, location: bytes) -> None:
        """Free one block; see `free_many`."""
        self.free_many([(block_id, location)])

    def usage_bytes(self) -> int:
        """Return the bytes of blocks that are reserved or written, and of freed blocks that processes still hold."""
        return sum(list(self._bytes.values())) + self._unfreed.nbytes  # `count` may add a block meanwhile.

    def unfreed_bytes(self) -> int:
        """Ask the processes again to drop freed blocks, and return the bytes of the blocks that are still held."""
        self._deliver()
        return self._unfreed.nbytes

    def shortage(self) -> str:
        """Return a text for an error message that says which processes still hold freed blocks; "" if none do."""
        return self._unfreed.described()

    def _undelivered(self, peer: int, error: Exception, *, dead: bool) -> None:
        """Record that a process did not confirm that it has dropped freed blocks. The blocks are kept for the next
        request, unless the process is proven dead."""
        if dead:
            self._unfreed.died(peer, error)
        else:
            self._unfreed.failed(peer, error)
