"""Tells failures that are the loss of a process, after which a run may go on from its last checkpoint, from others."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.exceptions import RayError, RayTaskError

from ...dataplane.errors import DataPlaneError, PeerLost
from ..cluster.calls import ActorFailed, gather_each
from ..grpo.steps import Run
from ..grpo.weight_sync import HEALTH_S
from ..supervision.cleanup import is_running

DEATH_S = 1.0
"""Seconds that a dying process may take to be gone: its sockets close before, and others that use them fail first."""


def lost_process(error: Exception, processes: Mapping[str, int]) -> str | None:
    """Describe in a sentence what was lost; None when `error` is an actor's or the driver's own, which would come
    again.

    processes: name -> pid of the processes on this host that the run needs. When one of them is gone, its death is
    taken for the reason of `error`.
    """
    cause = error.cause if isinstance(error, ActorFailed) else error
    if cause is None:  # the actor died, or does not answer
        return str(error)
    if isinstance(cause, PeerLost) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        return str(error)
    gone = _gone(processes) if processes else []
    return f"{' and '.join(gone)} died: {error}" if gone else None


def lost_only_workers(run: Run, processes: Mapping[str, int]) -> bool:
    """Whether a train worker is gone or does not answer, while everything else of the run is there and answers.

    processes: name -> pid of the processes on this host that the run needs.
    """
    handles = run.actors.handles
    answers = gather_each([handle.ping() for handle in handles], "health", HEALTH_S)
    silent = [handle for handle, answer in zip(handles, answers, strict=True) if isinstance(answer, ActorFailed)]
    workers = {worker.info.name for worker in run.workers}
    if not silent or any(handle.info.name not in workers for handle in silent):
        return False
    try:
        run.client.status(timeout_s=HEALTH_S)
    except DataPlaneError:
        return False
    return all(is_running(pid) for name, pid in processes.items() if name not in workers)


def _gone(processes: Mapping[str, int]) -> list[str]:
    """Names and pids of the processes that are gone now, or soon enough to be dying."""
    deadline = time.monotonic() + DEATH_S
    while True:
        gone = [f"{name} (pid {pid})" for name, pid in processes.items() if not is_running(pid)]
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)
