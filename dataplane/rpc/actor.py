"""Runs the directory (the metadata service) as a Ray actor, one for each run.

Ray starts and ends the actor; requests reach it through its sockets.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ..config import DataPlaneConfig
from ..errors import DataPlaneError, DirectoryLost
from .hosted_directory import BuildHost, HostedDirectory, Started, directory_name

NAMESPACE = "headrace"
"""Ray namespace of the data plane's actors. It is fixed, because the namespace of the driver itself may be
anonymous."""
END_TIMEOUT_S = 20.0


class DirectoryActor:
    """Ray actor that hosts the directory (the metadata service). It is never restarted, because the run's state would
    be lost."""

    def __init__(self, config: DataPlaneConfig, build_host: BuildHost) -> None:
        self._directory = HostedDirectory(config, build_host)

    async def start(self, name: str, one_host: bool) -> Started | Exception:
        """Start the directory; see `HostedDirectory.start`. If the store could not be started, return the error instead
        of raising it, because Ray would wrap it. one_host: whether all clients are on the actor's host."""
        try:
            return await self._directory.start(name, "" if one_host else ray.util.get_node_ip_address())
        except (DataPlaneError, ValueError) as error:
            return error

    async def close(self) -> None:
        """Close the store, end the processes that it started, and stop answering requests. Idempotent."""
        await self._directory.close()


def start_actor(
    run_id: str, config: DataPlaneConfig, build_host: BuildHost, *, one_host: bool, timeout_s: float
) -> tuple[Any, Started]:
    """Start the directory's actor. Returns the actor's handle and a description of the started directory.

    The actor ends when the last handle is deleted or when this process ends. `build_host` runs in the actor, and errors
    that it raises are raised here. Raises DirectoryLost when the actor dies or does not start within `timeout_s`.
    """
    name, began_s = directory_name(run_id), time.monotonic()
    options = ray.remote(DirectoryActor).options(name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=0)
    actor: Any = options.remote(config, build_host)
    try:
        started: Any = ray.get(actor.start.remote(name, one_host), timeout=timeout_s)
        if isinstance(started, Exception):
            raise started
    except (RayActorError, GetTimeoutError) as error:
        stop_actor(actor)
        if isinstance(error, GetTimeoutError):
            why = f" within {timeout_s:g} s (start_timeout_s), which a busy machine may need more of"
        else:
            why = f": {str(error).partition(chr(10))[0]}"
        elapsed_s = time.monotonic() - began_s
        raise DirectoryLost(f"the directory did not start{why}", op="open", peer=name, elapsed_s=elapsed_s) from None
    except BaseException:
        stop_actor(actor)
        raise
    return actor, started


def stop_actor(actor: Any) -> None:
    """Close the store within bounded time, then end the actor. No-op when Ray is no longer initialised, because the
    actor has then ended, too."""
    if not ray.is_initialized():
        return
    try:
        ray.get(actor.close.remote(), timeout=END_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        pass  # dead or stuck: the kill below is all that is left to do
    ray.kill(actor)
