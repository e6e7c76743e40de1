"""Tells failures that are the loss of a process, after which a run may go on from its last checkpoint, from others."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ray.exceptions import RayError, RayTaskError

from ...dataplane.errors import DataPlaneError, PeerLost
from ..cluster.calls import ActorFailed, gather_each
from ..cluster.run_actors import RunActors
from ..grpo.steps import Run
from ..grpo.weight_sync import HEALTH_S
from ..supervision.cleanup import is_running

DEATH_S = 1.0
"""Seconds that a dying process may take to be gone: its sockets close before, and others that use them fail first."""
NEWS_S = 5.0
"""Seconds that the news of a death may take to come from another host, when a connection to somebody has broken."""
LOOK_S = 0.5
"""Seconds for which actors are asked before the processes of this host are looked at again."""
POLL_S = 0.05
"""Seconds between two looks at the processes of this host."""
_BROKEN = ("connection", "broken pipe", "reset by peer", "closed by peer", "socket", "nccl", "gloo", "end of file")
"""Words of errors about another process, in lower case."""


def blamed(error: Exception, actors: RunActors, processes: Mapping[str, int]) -> Exception:
    """The death that `error` is a consequence of, as an ActorFailed that names who died and then who noticed; or
    `error` itself, when nobody has died or it is a death already.

    processes: name -> pid of the processes on this host that the run needs. Waits for proof of a death, from Ray or on
    this host: NEWS_S after an error about a connection, DEATH_S at most after any other.
    """
    if isinstance(error, ActorFailed) and error.died:
        return error
    insist = is_about_another(error)
    dead = _proof(actors, processes, NEWS_S if insist else DEATH_S, insist)
    return ActorFailed(f"{' and '.join(dead)} died: {error}", died=True) if dead else error


def is_about_another(error: Exception) -> bool:
    """Whether an error says that a connection to another process broke, as it does when that process died."""
    cause = error.cause if isinstance(error, ActorFailed) and error.cause is not None else error
    return isinstance(cause, (PeerLost, ConnectionError, EOFError)) or any(
        words in str(cause).lower() for words in _BROKEN
    )


def lost_process(error: Exception) -> str | None:
    """Describe in a sentence what was lost; None when `error` is an actor's or the driver's own, and would come again.

    error: what `blamed` returned, if there were actors to ask.
    """
    cause = error.cause if isinstance(error, ActorFailed) and not error.died else None
    if isinstance(error, ActorFailed) and cause is None:  # the actor died, or does not answer
        return str(error)
    cause = cause or error
    if isinstance(cause, PeerLost) or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        return str(error)
    return None


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


def _proof(actors: RunActors, processes: Mapping[str, int], wait_s: float, insist: bool) -> list[str]:
    """Names and pids of the dead, among the processes of this host and all actors that Ray knows; waits for the first.

    insist: whether an actor that answers is asked again.
    """
    deadline, ask = time.monotonic() + wait_s, True
    while True:
        gone = [f"{name} (pid {pid})" for name, pid in processes.items() if not is_running(pid)]
        left_s = deadline - time.monotonic()
        if gone or left_s <= 0:
            return gone
        dead = actors.find_dead(min(left_s, LOOK_S), insist=insist) if ask else []
        if dead:
            return [str(info) for info in dead]
        ask = insist
        if not ask and not processes:
            return []
        time.sleep(min(left_s, POLL_S))
