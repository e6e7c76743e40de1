"""Which of a run's failures is the loss of a process, so that going on from the last checkpoint may mend it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.exceptions import RayError, RayTaskError

from ..dataplane.errors import PeerLost
from .leftovers import is_running
from .peers import PeerFailed

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


def _gone(processes: Mapping[str, int]) -> list[str]:
    """Names and pids of those that are gone by now, or within the time that a death takes."""
    deadline = time.monotonic() + DEATH_S
    while True:
        gone = [f"{name} (pid {pid})" for name, pid in processes.items() if not is_running(pid)]
        if gone or time.monotonic() > deadline:
            return gone
        time.sleep(0.05)
