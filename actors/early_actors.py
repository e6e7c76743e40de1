"""Ray actors that start before their settings are known, and import what they will need in the meantime.

A process and its imports take seconds. An actor's settings name the data plane and the model, and these take seconds to
start, too. So the driver starts the actors' processes first. `configure` then delivers the settings, from which the
actual actor is made, and all later calls go to that one.

This module itself imports nothing that takes time, so that vLLM's engine process can start before its actor has
imported torch.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..dataplane.imports import import_ahead, import_object, ship_objects
from ..dataplane.listen_address import Listening
from ..dataplane.rpc.child_process import end_with_parent
from .engines.vllm.start import start_ahead
from .process.own_process import ActorInfo, bind_process_groups, keep_freed_memory, leave_cores_free, settle, show_gpus

if TYPE_CHECKING:
    from .engine_actor import EngineHost
    from .train.actor import TrainActor

CONFIGURE = "configure"
"""Name of the call that delivers the settings."""
BUILD = "build"
"""Name of the call that builds what the actual actor hosts. All objects that exist after it live as long as the
actor."""


def enter(folder: str, listening: Listening | None) -> None:
    """Make `folder` the working folder of this process, if this host has that folder, and adopt `listening`.

    Relative paths of the configuration then mean the same files as in the driver. Ray starts the processes of a cluster
    that was running before in the folder of `ray start`."""
    if os.path.isdir(folder):
        os.chdir(folder)
    if listening is None:
        return
    listening.adopt()
    if listening.interface is not None and not listening.one_host:
        with suppress(ValueError):  # The host lacks the interface, as what listens there will say.
            bind_process_groups(listening.address())


class EarlyEngineActor:
    """Asynchronous Ray actor that becomes an EngineActor or a RolloutActor once it is configured."""

    def __init__(
        self,
        host: str,
        modules: Sequence[str],
        vllm_ahead: bool,
        gpus: Sequence[str] | None,
        folder: str,
        objects: Mapping[str, bytes] | None = None,
        listening: Listening | None = None,
    ) -> None:
        """Import the actual actor's class, and start to import `modules`. host: import path of that class, an
        EngineHost, as `package.module:Class`. vllm_ahead: whether to start vLLM's engine process before these imports.
        gpus: CUDA's names of the GPUs that the process may use; with None these are the GPUs that Ray assigned. folder:
        the driver's working folder. objects: pickles of shipped objects by path (see `ship_objects`). listening:
        addresses and ports at which the run's processes listen; None for the defaults."""
        end_with_parent()
        # The imports below may look for GPUs, so the limit comes first.
        show_gpus(gpus)
        enter(folder, listening)
        keep_freed_memory()
        leave_cores_free()
        if vllm_ahead:
            start_ahead()
        ship_objects(objects or {})
        self._make: Any = import_object(host, "actor")
        self._imports = import_ahead(modules)
        self._actor: EngineHost | None = None

    async def call(self, method: str, message: bytes, *arguments: Any) -> bytes:
        """Run a call once all modules are imported: `configure`, or a method of the actor (see `EngineHost.call`).
        Raises RuntimeError for a method that is called before `configure`."""
        if method == CONFIGURE:
            return _encoded(self.configure(*arguments))
        if self._actor is None:
            raise RuntimeError(f"{method}: the actor is not configured yet (configure comes first)")
        if self._imports.is_alive():
            await asyncio.to_thread(self._imports.join)
        reply = await self._actor.call(method, message, *arguments)
        if method == BUILD:
            settle()
        return reply

    def configure(self, setup: Any) -> ActorInfo:
        """Make the actual actor from its settings, and return its name and the process id and host of this process.
        setup: an EngineSetup or a RolloutSetup."""
        self._actor = self._make(setup)
        return ActorInfo.here(setup.name)


class EarlyTrainActor:
    """Ray actor that becomes a TrainActor once it is configured."""

    def __init__(
        self,
        modules: Sequence[str],
        gpus: Sequence[str] | None,
        folder: str,
        objects: Mapping[str, bytes] | None = None,
        listening: Listening | None = None,
    ) -> None:
        """Start to import `modules`. gpus: CUDA's names of the GPUs that the process may use; with None these are the
        GPUs that Ray assigned. folder: the driver's working folder. objects: pickles of shipped objects by path.
        listening: addresses and ports at which the run's processes listen; None for the defaults."""
        end_with_parent()
        # The imports below may look for GPUs, so the limit comes first.
        show_gpus(gpus)
        enter(folder, listening)
        keep_freed_memory()
        leave_cores_free()
        ship_objects(objects or {})
        from .train.actor import TrainActor  # This module must not import torch at its top.

        self._make: Any = TrainActor
        self._imports = import_ahead(modules)
        self._actor: TrainActor | None = None

    def call(self, method: str, message: bytes, *arguments: Any) -> bytes:
        """Run a call once all modules are imported: `configure`, or a method of the actor (see `TrainActor.call`).
        Raises RuntimeError for a method that is called before `configure`."""
        if method == CONFIGURE:
            return _encoded(self.configure(*arguments))
        if self._actor is None:
            raise RuntimeError(f"{method}: the actor is not configured yet (configure comes first)")
        self._imports.join()
        reply = self._actor.call(method, message, *arguments)
        if method == BUILD:
            settle()
        return reply

    def configure(self, setup: Any) -> ActorInfo:
        """Make the actual actor from its settings, and return its name and the process id and host of this process.
        setup: a WorkerSetup."""
        actor: TrainActor = self._make(setup)
        self._actor = actor
        return actor.info()


def _encoded(info: ActorInfo) -> bytes:
    from ..codecs import messages  # This module must not import slow modules at its top.

    return messages.encode(info)
