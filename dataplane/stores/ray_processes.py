"""Tells whether a store's Ray actors have died, and ends them."""

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
"""Seconds to wait for an actor's answer, or for Ray's report that it has died. A live actor that is busy may not answer
in time."""


def has_died(actor: Any) -> bool:
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

    Ray's kill returns before the process has ended, and until then the actor would keep answering.
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
