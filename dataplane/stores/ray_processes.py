"""Implements what stores share whose blocks are with Ray actors: how blocks are freed, and how the actors end."""

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
"""Seconds that Ray may take to say whether an actor lives; one that is alive and busy does not answer in time."""


class RayActorsHost(ABC):
    """Knows which blocks a store's Ray actors hold, and which of them they have not freed yet."""

    def __init__(self, peers: list[str], capacity_bytes: int) -> None:
        """peers: names of the actors, as the log shows them."""
        self._bytes: dict[int, int] = {}
        """Number of bytes of each block that is reserved or written."""
        self._unfreed = Unfreed(peers, capacity_bytes // 4)

    @abstractmethod
    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Note blocks, by id and location, as to be freed, and deliver them."""

    @abstractmethod
    def _deliver(self) -> None:
        """Ask every actor to free its blocks that wait for it."""

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        """Return b"", as a block is located when it is written. None while actors have not freed a quarter of the
        capacity; else the directory's capacity is the only limit."""
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
        """Number of bytes of the blocks that are reserved, written, or noted as to be freed and still held."""
        return sum(self._bytes.values()) + self._unfreed.nbytes

    def unfreed_bytes(self) -> int:
        """Number of bytes of the noted blocks that an actor still holds. Asks the actors again."""
        self._deliver()
        return self._unfreed.nbytes

    def shortage(self) -> str:
        """Name the processes that have not freed cleared blocks."""
        return self._unfreed.described()

    def _undelivered(self, peer: int, actor: Any, error: Exception) -> None:
        """Note that an actor did not free its blocks: they are kept for the next request, unless it is dead."""
        if _has_died(actor):
            self._unfreed.died(peer, error)
        else:
            self._unfreed.failed(peer, error)


def _has_died(actor: Any) -> bool:
    """Return whether Ray knows that the actor's process has ended. One that does not answer may be alive."""
    try:
        actor.__ray_ready__.remote().future().result(DEATH_TIMEOUT_S)
    except ActorDiedError:
        return True
    except (RayError, FutureTimeout):
        return False
    return False


def end_actors(actors: Sequence[Any], local_pids: Sequence[int]) -> None:
    """Kill `actors`, then wait until the processes of those on this node have ended (5 s; then a warning names them).

    Ray's kill returns before the process has gone, and until then it would go on answering.
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
