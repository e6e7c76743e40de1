"""The directory as the one named Ray actor of a run, and the link to it from any process of the cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from .block_store import StoreHost
from .config import DataPlaneConfig
from .directory_service import DirectoryService
from .errors import DataPlaneError, DirectoryLost
from .links import GRACE_S
from .requests import reply_error

NAMESPACE = "headrace"
"""Ray namespace of the data plane's actors: the driver's own may be anonymous."""
START_TIMEOUT_S = 90.0
"""A Ray worker that must import torch on a busy machine takes tens of seconds."""
MAX_CALLS = 4096
"""Requests in the directory at a time, waiting claims included."""


class DirectoryActor:
    """Hosts service and store. Not restarted: its state is the run's."""

    def __init__(self, config: DataPlaneConfig, build_host: Callable[[], StoreHost]) -> None:
        self._config = config
        self._service: DirectoryService | None = None
        self._host: StoreHost | None = None
        self._failed = b""
        try:
            self._host = build_host()
        except (DataPlaneError, ValueError) as error:  # answers the first call as what it is, not as a dead actor
            self._failed = reply_error(error)

    async def call(self, op: str, payload: bytes) -> bytes:
        """One request; see `DirectoryService.call`."""
        if self._host is None:
            return self._failed
        if self._service is None:
            self._service = DirectoryService(self._config, self._host)
        return await self._service.call(op, payload)

    async def close(self) -> None:
        """End the store and what it started. Idempotent."""
        if self._service is not None:
            await self._service.close()
        elif self._host is not None:
            self._host.close()


def actor_name(run_id: str) -> str:
    return f"headrace-{run_id}-directory"


def start_actor(run_id: str, config: DataPlaneConfig, build_host: Callable[[], StoreHost]) -> Any:
    """The actor's handle; it ends with the last handle or with this process. `build_host` runs in it."""
    remote = ray.remote(DirectoryActor)
    options = remote.options(
        name=actor_name(run_id), namespace=NAMESPACE, num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0
    )
    return options.remote(config, build_host)


def stop_actor(actor: Any) -> None:
    """Close the store within a bound, then end the actor."""
    try:
        ray.get(actor.close.remote(), timeout=GRACE_S * 4)
    except (RayActorError, GetTimeoutError):
        pass  # dead or stuck: the kill below is all that is left to do
    ray.kill(actor)


class RayLink:
    """Calls the directory's actor. An end of the actor ends every call at once."""

    def __init__(self, name: str, peer: str) -> None:
        """Raises DirectoryLost when the cluster has no such actor (any more)."""
        self.peer = peer
        try:
            self._actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise DirectoryLost("there is no such actor (any more)", op="connect", peer=peer) from None

    def call(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        try:
            return ray.get(self._call(op, payload), timeout=timeout_s + GRACE_S)
        except (RayActorError, GetTimeoutError) as error:
            raise self._lost(op, error, started) from None

    async def call_async(self, op: str, payload: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                return await self._call(op, payload)
        except (RayActorError, TimeoutError) as error:
            raise self._lost(op, error, started) from None

    def _call(self, op: str, payload: bytes) -> Any:
        return self._actor.call.remote(op, payload)

    def _lost(self, op: str, error: Exception, started: float) -> DirectoryLost:
        what = (
            "the directory's process has died" if isinstance(error, RayActorError) else "the directory did not answer"
        )
        return DirectoryLost(what, op=op, peer=self.peer, elapsed_s=time.monotonic() - started)
