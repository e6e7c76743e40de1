"""Implements what stores with Ray actors have in common: how blocks are freed, and how the actors are ended."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, RayError

from .unfreed import Unfreed

_logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
DEATH_TIMEOUT_S = 0.5
"""Seconds to wait for an actor's answer, or for Ray's report that it has died. A live actor that is busy may not answer
in time."""


def node_address() -> str:
    """Return the IP address of this host in Ray, or the one that a Ray started here would choose."""
    return ray.util.get_node_ip_address().strip("[]")


class RayActorsHost(ABC):
    """Base class of hosts whose blocks are held by Ray actors. It records which blocks the actors hold, and which freed
    blocks they still have."""

    def __init__(self, peers: list[str], capacity_bytes: int) -> None:
        """peers: names of the actors, as shown in the log."""
        self._bytes: dict[int, int] = {}
        """Number of bytes of each block that is reserved or written, by block id."""
        self._unfreed = Unfreed(peers, capacity_bytes // 4)

    @abstractmethod
    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Record blocks, given by id and location, as freed, and ask the actors to drop them."""

    @abstractmethod
    def _deliver(self) -> None:
        """Ask every actor to drop the freed blocks that it still holds."""

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Count the bytes of a block. Returns b"" for the location, which is known only after the write. Returns None
        while the actors still hold more than a quarter of the capacity in freed blocks; otherwise only the directory's
        capacity limits the store."""
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
        """Return the number of bytes of the blocks that are reserved or written, and of the freed blocks that actors
        still hold."""
        return sum(self._bytes.values()) + self._unfreed.nbytes

    def unfreed_bytes(self) -> int:
        """Ask the actors again to drop freed blocks, and return the number of bytes of those that they still hold."""
        self._deliver()
        return self._unfreed.nbytes

    def shortage(self) -> str:
        """Return a text for an error message that says which actors still hold freed blocks; "" if none do."""
        return self._unfreed.described()

    def _undelivered(self, peer: int, actor: Any, error: Exception) -> None:
        """Record that an actor did not confirm that it has dropped freed blocks. They are kept for the next request,
        unless the actor is dead."""
        if _has_died(actor):
            self._unfreed.died(peer, error)
        else:
            self._unfreed.failed(peer, error)


def _has_died(actor: Any) -> bool:
    """Return whether Ray knows that the actor's process has ended. An actor that does not answer may still be alive."""
    try:
        actor.__ray_ready__.remote().future().result(DEATH_TIMEOUT_S)
    except ActorDiedError:
        return True
    except (RayError, FutureTimeout):
        return False
    return False


def end_actors(actors: Sequence[Any], local_pids: Sequence[int]) -> None:
    """Kill `actors`, and wait for at most 5 s until the processes of those on this node have ended. A warning names
    processes that have not ended by then.

    Ray's kill returns before the process has ended, and until then the actor would go on answering.
    """
    if ray.is_initialized():
        for actor in actors:
            ray.kill(actor)
    deadline = time.monotonic() + END_TIMEOUT_S
    alive = [pid for pid in local_pids if _alive(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.01)
        alive = [pid for pid in alive if _alive(pid)]
    if alive:
        _logger.warning("processes %s did not end within %.0f s", alive, END_TIMEOUT_S)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
