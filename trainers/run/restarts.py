"""Decides whether a failure is the loss of a process, after which a run can go on from its last checkpoint."""

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
"""Seconds that a dying process may take to be gone. Its sockets close earlier, so other processes that use them fail
first."""
NEWS_S = 5.0
"""Seconds that the news of a death may take to arrive from another host after a connection has broken."""
LOOK_S = 0.5
"""Seconds for which actors are queried before the processes of this host are checked again."""
POLL_S = 0.05
"""Seconds between two checks of the processes of this host."""
_BROKEN = ("connection", "broken pipe", "reset by peer", "closed by peer", "socket", "nccl", "gloo", "end of file")
"""Lower-case words in the messages of errors that come from a broken connection to another process."""


def blamed(error: Exception, actors: RunActors, processes: Mapping[str, int]) -> Exception:
    """Return the death that caused `error`, as an ActorFailed that names who died and then `error`. Returns `error`
    itself when nobody has died or when it already reports a death.

    processes: name -> pid of the processes on this host that the run needs. Waits for proof of a death, from Ray or
    from this host: up to NEWS_S after an error about a connection, up to DEATH_S after any other error.
    """
    if isinstance(error, ActorFailed) and error.died:
        return error
    insist = is_about_another(error)
    dead = _proof(actors, processes, NEWS_S if insist else DEATH_S, insist)
    return ActorFailed(f"{' and '.join(dead)} died: {error}", died=True) if dead else error


def is_about_another(error: Exception) -> bool:
    """Return whether an error says that a connection to another process broke, as happens when that process dies."""
    cause = error.cause if isinstance(error, ActorFailed) and error.cause is not None else error
    return isinstance(cause, (PeerLost, ConnectionError, EOFError)) or any(
        words in str(cause).lower() for words in _BROKEN
    )


def lost_process(error: Exception) -> str | None:
    """Return a sentence about the process that was lost. Returns None when `error` comes from an actor's or the
    driver's own work, so that it would happen again.

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
    """Return whether a train worker died or does not answer while all other processes of the run are there and answer.

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
    """Return the names and pids of dead processes, among those of this host and all actors that Ray knows. Waits up to
    `wait_s` for the first.

    insist: whether actors that have answered are asked again.
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
