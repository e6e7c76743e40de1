"""Decides whether a failure is the loss of a process, after which a run can continue from its last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from ...dataplane.client.client import DataPlaneClient
from ...dataplane.errors import DataPlaneError, DataPlaneTimeout, PeerLost, StoreLost
from ..cluster.calls import ActorFailed, gather, gather_each
from ..cluster.lost_hosts import NEWS_S as NEWS_OF_HOST_S
from ..cluster.lost_hosts import NoRoom, Patience, used_hosts
from ..cluster.run_actors import RunActors
from ..grpo.gpu_turns import BothResident
from ..grpo.run_parts import Run
from ..grpo.weight_sync import HEALTH_S
from ..supervision.cleanup import is_running
from ..supervision.stuck_report import read_actors

DEATH_S = 1.0
"""Largest number of seconds from the first sign of a process's death until its exit. The sockets of a dying process
close earlier, so connected processes fail first."""
NEWS_S = 5.0
"""Largest number of seconds until Ray reports a death on another host, counted from the break of a connection to the
dead process."""
LOOK_S = 0.5
"""Seconds spent on querying actors before the processes of this host are checked again."""
POLL_S = 0.05
"""Seconds between two checks of the processes of this host."""
_BROKEN = ("connection", "broken pipe", "reset by peer", "closed by peer", "socket", "nccl", "gloo", "end of file")
"""Words that occur in error messages about broken connections to other processes, in lower case."""


def root_cause(error: Exception, actors: RunActors, processes: Mapping[str, int]) -> Exception:
    """Find out whether the death of a process caused `error`. If so, returns an ActorFailed whose message names the
    dead processes and then `error`. Returns `error` itself if no process has died or if `error` already reports a
    death.

    processes: name -> pid of the processes on this host that the run needs. Waits for proof of a death, from Ray or
    from this host: up to NEWS_S after an error about a connection, up to DEATH_S after any other error. In a run over
    several hosts, an error about a connection waits up to NEWS_OF_HOST_S for an actor that does not answer.
    """
    if isinstance(error, ActorFailed) and error.died:
        return error
    insist = is_about_another(error)
    dead = _proof(actors, processes, NEWS_S if insist else DEATH_S, insist)
    if insist and not dead and len({handle.info.host for handle in actors.handles}) > 1:
        dead = [str(info) for info in actors.find_dead(NEWS_OF_HOST_S, insist=False)]
    return ActorFailed(f"{' and '.join(dead)} died: {error}", died=True) if dead else error


def is_about_another(error: Exception) -> bool:
    """Return whether an error is about a broken connection to another process, as after a death of that process."""
    cause = error.cause if isinstance(error, ActorFailed) and error.cause is not None else error
    return isinstance(cause, (PeerLost, ConnectionError, EOFError)) or any(
        words in str(cause).lower() for words in _BROKEN
    )


def lost_process(error: Exception) -> str | None:
    """Return a sentence about the lost process, or the slow transfer of rows, that caused `error`. Returns None if the
    cause is the code of an actor or of the driver, because the error would then recur after a restart. error: result of
    `root_cause` if the actors had been started.
    """
    cause = error.cause if isinstance(error, ActorFailed) and not error.died else None
    if isinstance(error, ActorFailed) and cause is None:  # The actor died, or does not answer.
        return str(error)
    cause = cause or error
    # Exactly this type means that a transfer was too slow. Its subclasses, such as ClaimTimeout, mean a wait in vain,
    # which would recur after a restart.
    is_of_plane = isinstance(cause, PeerLost) or type(cause) is DataPlaneTimeout
    if is_of_plane or (isinstance(cause, RayError) and not isinstance(cause, RayTaskError)):
        return str(error)
    return None


def lost_only_workers(actors: RunActors, client: DataPlaneClient, processes: Mapping[str, int]) -> bool:
    """Return whether the only failed processes are train workers, and actors with engines on a lost host.

    At least one worker has died or is unresponsive, and every other process of the run is alive and responding.

    processes: name -> pid of the processes on this host that the run needs.
    """
    handles = actors.handles
    answers = gather_each([handle.ping() for handle in handles], "health", HEALTH_S)
    silent = [handle for handle, answer in zip(handles, answers, strict=True) if isinstance(answer, ActorFailed)]
    workers = {worker.info.name for worker in actors.workers}
    others = [handle for handle in silent if handle.info.name not in workers]
    if len(others) == len(silent) or any(one in actors.teachers or not actors.on_lost_host(one) for one in others):
        return False
    try:
        client.status(timeout_s=HEALTH_S)
    except DataPlaneError:
        return False
    return all(is_running(pid) for name, pid in processes.items() if name not in workers)


def room_again(actors: RunActors, tell: Callable[[str], None]) -> Patience:
    """Return the wait for room in the Ray cluster when the run of `actors` starts again. tell: shows the user a
    sentence."""
    return Patience(used_hosts(actors.placement), actors.start_timeout_s, tell)


def no_start(error: Exception) -> NoRoom:
    """Return the error with which a run ends that cannot start again because of `error`."""
    return NoRoom(f"the run cannot start again on what is left: {error}")


def lost_only_rows(error: Exception, run: Run) -> bool:
    """Return whether `error` is the loss of rows with a process of the store, and nothing else.

    The directory and all train workers answer, and the workers drop the gradients of the open step. A worker that waits
    for another does not answer. False if engines and train workers take turns in memory, because no engine could make
    the rows again now, and on one host, where only a start of the whole run starts another storage unit.
    """
    cause = error.cause if isinstance(error, ActorFailed) else error
    if not isinstance(cause, StoreLost) or not isinstance(run.roles, BothResident):
        return False
    if len(run.actors.placement.hosts) == 1:
        return False
    try:
        run.client.status(timeout_s=HEALTH_S)
        gather([worker.abort() for worker in run.actors.workers], "health", HEALTH_S)
    except (DataPlaneError, ActorFailed):
        return False
    return True


def _proof(actors: RunActors, processes: Mapping[str, int], wait_s: float, insist: bool) -> list[str]:
    """Return the names and pids of dead processes, found among `processes` and among all actors. Waits up to `wait_s`
    for the first death.

    insist: whether to keep querying actors that have answered until that time is over.
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


def needed_processes(folder: Path) -> dict[str, int]:
    """Return the run's processes on this host, read from actors.json in the run folder: name -> process id."""
    return {actor.name: actor.pid for actor in read_actors(folder) if actor.here}
