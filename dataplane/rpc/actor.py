"""Runs the directory (the metadata service) as a Ray actor, one for each run.

Ray starts and ends the actor; requests reach it through its sockets.
"""

from __future__ import annotations

import gc
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ..block_store import StoreHost, StoreSpec
from ..config import DataPlaneConfig
from ..directory.service import DirectoryService
from ..errors import DataPlaneError, DirectoryLost
from .frames import DirectoryAddress
from .server import DirectoryServer

NAMESPACE = "headrace"
"""Ray namespace of the data plane's actors. It is fixed, because the namespace of the driver itself may be
anonymous."""
END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Started:
    """Description of a directory that has started and answers requests."""

    pid: int
    node: str
    """Name of the directory's host."""
    store: StoreSpec
    store_processes: dict[str, int]
    """Pids of the store's processes on the directory's host, by name."""
    address: DirectoryAddress


class DirectoryActor:
    """Ray actor that runs the directory (the metadata service) and the part of the store that allocates and frees
    blocks. It is never restarted, because the run's state would be lost."""

    def __init__(self, config: DataPlaneConfig, build_host: Callable[[], StoreHost]) -> None:
        self._config = config
        self._service: DirectoryService | None = None
        self._server: DirectoryServer | None = None
        self._host: StoreHost | None = None
        self._failed: Exception | None = None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each thread of a client takes a descriptor
        try:
            self._host = build_host()
        except (DataPlaneError, ValueError) as error:  # `start` answers with it: an actor that fails here is just dead
            self._failed = error

    async def start(self, name: str, one_host: bool) -> Started | Exception:
        """Start to answer requests, and return a description of the directory with its address. If the store could not
        be started, return the error instead of raising it. one_host: if True, listen only on a Unix socket, not on the
        network."""
        if self._host is None:
            assert self._failed is not None
            return self._failed
        self._service = DirectoryService(self._config, self._host)
        self._server = DirectoryServer(self._service, self._host.spec.key)
        address = await self._server.start(name, "" if one_host else ray.util.get_node_ip_address())
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each thread of a client takes a descriptor
        np.unique(np.empty(0))  # it imports numpy.ma when it is first called: 20 ms that no put should wait for
        gc.freeze()  # what was imported stays: the collector need not look at it again and again
        return Started(os.getpid(), platform.node(), self._host.spec, self._host.processes(), address)

    async def close(self) -> None:
        """Close the store, end the processes that it started, and stop answering requests. Idempotent."""
        if self._service is not None:
            await self._service.close()
        elif self._host is not None:
            self._host.close()
        if self._server is not None:
            await self._server.close()


def actor_name(run_id: str) -> str:
    return f"headrace-{run_id}-directory"


def start_actor(
    run_id: str, config: DataPlaneConfig, build_host: Callable[[], StoreHost], *, one_host: bool, timeout_s: float
) -> tuple[Any, Started]:
    """Start the directory's actor. Returns the actor's handle and a description of the started directory.

    The actor ends when the last handle is deleted or when this process ends. `build_host` runs in the actor, and errors
    that it raises are raised here. Raises DirectoryLost when the actor dies or does not start within `timeout_s`.
    """
    name, began_s = actor_name(run_id), time.monotonic()
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
