"""Which failures are the loss of a process, so that going on from the last checkpoint may mend them; and whether it was
train workers only."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.exceptions import RayError, RayTaskError

from ...dataplane.errors import DataPlaneError, PeerLost
from ..cluster.handles import PeerFailed, gather_each
from ..grpo.steps import Run
from ..grpo.weight_sync import HEALTH_S
from ..supervision.cleanup import is_running

DEATH_S = 1.0
"""The sockets of a process that dies close a moment before it is gone: who talks to it may fail first."""


def lost_process(error: Exception, processes: Mapping[str, int]) -> str | None:
    """What was lost, in a sentence; None when `error` is anybody's own, which would come again.

    processes: name -> pid of those of this host that the run cannot do without. When one of them is gone, it is what
    the others' errors are of.
    """
    cause = error.cause if isinstance(error, PeerFailed) else error
    if cause is None:  # it died, or does not answer
        return str(error)
    if isinstance(cause, PeerLost) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        return str(error)
    gone = _gone(processes) if processes else []
    return f"{' and '.join(gone)} died: {error}" if gone else None


def lost_only_workers(run: Run, processes: Mapping[str, int]) -> bool:
    """Whether a train worker is gone or does not answer, while everything else of the run is there and answers.

    processes: name -> pid of those of this host.
    """
    peers = run.actors.peers
    answers = gather_each([peer.call("info") for peer in peers], "health", HEALTH_S)
    silent = [peer for peer, answer in zip(peers, answers, strict=True) if isinstance(answer, PeerFailed)]
    workers = {peer.info.name for peer in run.workers}
    if not silent or any(peer.info.name not in workers for peer in silent):
        return False
    try:
        run.client.status(timeout_s=HEALTH_S)
    except DataPlaneError:
        return False
    return all(is_running(pid) for name, pid in processes.items() if name not in workers)


def _gone(processes: Mapping[str, int]) -> list[str]:
    """Names and pids of those that are gone by now, or within the time that a death takes."""
    deadline = time.monotonic() + DEATH_S
    while True:
        gone = [f"{name} (pid {pid})" for name, pid in processes.items() if not is_running(pid)]
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)
