"""Ends Ray actors, and waits for the processes of those on this node."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import psutil
import ray
from ray.exceptions import ActorDiedError, RayError

_logger = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
DEATH_TIMEOUT_S = 0.5
"""Seconds that Ray may take to say whether an actor lives; one that is alive and busy does not answer in time."""


def has_died(actor: Any) -> bool:
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
