"""Keeps the freed blocks that a store's process has not been told of, because it did not answer, until it answers or is
dead."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)

FREE_TIMEOUT_S = 5.0
"""Seconds that a process may take to answer a request to free blocks."""
RETRY_TIMEOUT_S = 0.5
"""The same once a request has failed, so that a process that is stopped holds up the others' requests little."""


class Unfreed:
    """Holds the blocks to free, by the number of the process that holds them. Not thread-safe.

    A process that does not answer may be stopped, swapped out or busy: its blocks stay here and are asked for again.
    Only the blocks of a process that is proven dead are dropped, as they went with it.
    """

    def __init__(self, peers: list[str], limit_bytes: int) -> None:
        """peers: names of the processes, as the log shows them. limit_bytes: bytes of unfreed blocks beyond which
        nothing new should be written."""
        self._peers = peers
        self._limit_bytes = limit_bytes
        self._blocks: list[dict[int, int]] = [{} for _ in peers]
        """Number of bytes of each block, for each process."""
        self._silent: set[int] = set()
        self._dead: set[int] = set()

    def add(self, peer: int, block_id: int, nbytes: int) -> None:
        """Note that a block is to be freed. Does nothing for a dead process, and for a block that is noted already."""
        if peer not in self._dead:
            self._blocks[peer].setdefault(block_id, nbytes)

    def waiting(self) -> list[tuple[int, list[int]]]:
        """Return (process, ids of its blocks) for every process that has to be asked."""
        return [(peer, list(blocks)) for peer, blocks in enumerate(self._blocks) if blocks]

    def timeout_s(self, peer: int) -> float:
        """Return the seconds for which the process's answer is waited for."""
        return RETRY_TIMEOUT_S if peer in self._silent else FREE_TIMEOUT_S

    def delivered(self, peer: int, block_ids: list[int]) -> None:
        """Forget blocks that the process has freed."""
        for block_id in block_ids:
            self._blocks[peer].pop(block_id, None)
        if peer in self._silent:
            self._silent.discard(peer)
            _logger.warning("%s answers again: it has freed %d blocks", self._peers[peer], len(block_ids))

    def failed(self, peer: int, error: Exception) -> None:
        """Keep the blocks of a process that did not answer."""
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
        """Drop the blocks of a process that is proven dead, now and from now on."""
        self._dead.add(peer)
        self._silent.discard(peer)
        _logger.warning("%s has died, and its blocks with it: %s", self._peers[peer], error)
        self._blocks[peer].clear()

    @property
    def nbytes(self) -> int:
        """Number of bytes of the blocks that wait to be freed."""
        return sum(sum(blocks.values()) for blocks in self._blocks)

    @property
    def over_limit(self) -> bool:
        """Whether so many bytes wait to be freed that nothing new should be written."""
        return self.nbytes > self._limit_bytes

    def described(self) -> str:
        """Return what the store lacks room for, as an error shows it; "" when nothing waits to be freed."""
        silent = [f"{self._peers[peer]} ({sum(self._blocks[peer].values())} bytes)" for peer, _ in self.waiting()]
        return f"cleared blocks are not freed yet by {', '.join(silent)}" if silent else ""
