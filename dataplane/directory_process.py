"""Runs the directory (the metadata service) with its store and its sockets, in a separate process or as a Ray actor.

The process without Ray runs this module, started by `factory.py`; it must not import Ray, because the import would take
a second. Ray only starts and ends the actor; requests reach the actor through sockets, too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
import os
import platform
import resource
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .block_store import Recovers, Serving, StartsUnits, StoreHost, StoreSpec
from .config import DataPlaneConfig
from .directory.service import DirectoryService
from .errors import DataPlaneError, DirectoryLost
from .imports import ship_objects, shipped_objects
from .listen_address import Listening, PortRange
from .owned_folder import pid_space
from .recovery.effect_log import EffectLog, memory_files
from .recovery.keeper import Keeper, told_to_close
from .recovery.recorded_directory import RecordedDirectory
from .rpc.child_process import ChildProcess, end_with_parent, serve_parent
from .rpc.frames import DirectoryAddress
from .rpc.server import DirectoryServer, Listeners
from .security.run_key import packed, unpacked
from .store_choice import build_store_host, check_store, host_of_running, store_kind

_logger = logging.getLogger(__name__)

BuildHost = Callable[[str], StoreHost]
"""Function that starts the store's part in the directory's process. It takes the IP address of this host at which
clients of other hosts reach the data plane; "" when all clients are on this host."""


@dataclass(frozen=True, slots=True)
class Started:
    """Description of a directory that has started and answers requests."""

    pid: int
    node: str
    """Name of the directory's host."""
    space: str
    """Space of the process ids, as `pid_space` returns it."""
    store: StoreSpec
    store_processes: dict[str, int]
    """Pids of the store's processes on the directory's host, by name."""
    address: DirectoryAddress


@dataclass(frozen=True, slots=True)
class Kept:
    """What a directory's process has from the keeper that forked it, and leaves to the next one."""

    host: KeptHost
    log_files: tuple[int, int]
    listeners: Listeners


class KeptHost(StoreHost, Recovers, Protocol):
    """Host of a store whose bytes outlive the directory's process."""


def _recovered(kept: Kept, **settings: Any) -> RecordedDirectory:
    """Build a directory in the state that the log describes, and give the store's host the blocks."""
    started = time.monotonic()
    serve = kept.host.serve if isinstance(kept.host, Serving) else bytes
    directory = RecordedDirectory(EffectLog(kept.log_files), serve, **settings)
    is_back = directory.replay(started)
    blocks, next_block = directory.adopted()
    kept.host.adopt(blocks, next_block)
    if is_back:
        elapsed_s = time.monotonic() - started
        _logger.warning("the directory is back after %.2f s with %d blocks", elapsed_s, len(blocks))
    return directory


class HostedDirectory:
    """Hosts the directory (the metadata service) and the part of the store that allocates and frees blocks."""

    def __init__(self, config: DataPlaneConfig, build_host: BuildHost, kept: Kept | None = None) -> None:
        """kept: what outlives this process; None if the directory ends with it."""
        self._config = config
        self._kept = kept
        self._build_host = build_host
        self._service: DirectoryService | None = None
        self._server: DirectoryServer | None = None
        self._host: StoreHost | None = None

    async def start(self, name: str, host: str) -> Started:
        """Start the store, and start to answer requests. Returns a description of the directory with its address.

        name: name of the directory's Unix socket. host: IP address at which clients of other hosts reach the directory;
        "" when all clients are on this host, so that the directory listens only on a Unix socket. Raises the errors of
        the store.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Each thread of a client takes a file descriptor, so the soft limit is raised to the hard limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        # The store starts in a thread, because it may wait for other processes.
        self._host = await asyncio.to_thread(self._build_host, host)
        if self._kept is None:
            self._service = DirectoryService(self._config, self._host)
        else:
            self._service = DirectoryService(self._config, self._host, functools.partial(_recovered, self._kept))
        self._server = DirectoryServer(self._service, self._host.spec.key)
        address = await self._server.start(name, host, self._kept and self._kept.listeners)
        # The first call imports numpy.ma, which takes 20 ms and would otherwise delay a put.
        np.unique(np.empty(0))
        gc.freeze()  # Imported objects stay, so the garbage collector need not look at them.
        return Started(os.getpid(), platform.node(), pid_space(), self._host.spec, self._host.processes(), address)

    async def close(self) -> None:
        """Close the store, end the processes that it started, and stop answering requests. Idempotent."""
        if self._service is not None:
            await self._service.close()
        elif self._host is not None:
            self._host.close()
        if self._server is not None:
            await self._server.close()


def start_process(
    config: DataPlaneConfig,
    run_id: str,
    host: str,
    samplers: Mapping[str, bytes],
    timeout_s: float,
    *,
    store: StoreSpec | None = None,
    ports: PortRange | None = None,
) -> tuple[ChildProcess, Started]:
    """Start the directory in a separate process that ends with this one. host: IP address of this host at which clients
    of other hosts reach it; "" when all clients are on this host. samplers: as for `DirectoryActor`. store: a store
    whose units run already on nodes of a Ray cluster; None starts one. ports: see `Listening`. Raises the errors of
    `ChildProcess`."""
    setup = {
        "config": config.model_dump_json(),
        "run_id": run_id,
        "host": host,
        "samplers": {path: data.hex() for path, data in samplers.items()},
        "store": store and _plain(store),
        "ports": ports and str(ports),
    }
    child = ChildProcess(f"{__package__}.directory_process", setup, timeout_s)
    answer = child.answer
    address = DirectoryAddress(**answer["address"])
    return child, Started(**{**answer, "store": _spec(answer["store"]), "address": address})


def _plain(spec: StoreSpec) -> dict[str, Any]:
    """Return a store's spec as plain JSON."""
    return {name: getattr(spec, name) for name in ("kind", "run_id", "address", "plane_id")} | {
        "key": packed(spec.key).hex()
    }


def _spec(plain: dict[str, Any]) -> StoreSpec:
    return StoreSpec(**{**plain, "key": unpacked(bytes.fromhex(plain["key"]))})


def directory_name(run_id: str) -> str:
    """Return the name of a run's directory, which its Unix socket and its Ray actor use."""
    return f"headrace-{run_id}-directory"


NAMESPACE = "headrace"
"""Ray namespace of the data plane's actors. It is fixed, because the namespace of the driver itself may be
anonymous."""
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 20.0
OUTLIVING = frozenset(("shm", "tcp"))
"""Kinds of store whose bytes outlive the directory's process."""


class DirectoryActor:
    """Ray actor that hosts the directory (the metadata service). Ray never restarts it, because Ray would end what the
    actor has opened. If the store outlives the directory's process, that process is another one, which is replaced when
    it dies, and the actor only owns the storage units on Ray's nodes."""

    def __init__(self, config: DataPlaneConfig, build_host: BuildHost, samplers: Mapping[str, bytes]) -> None:
        """samplers: pickles of those samplers of `config` that are shipped objects, by path."""
        end_with_parent()
        ship_objects(samplers)
        self._config, self._samplers, self._build_host = config, samplers, build_host
        self._directory = HostedDirectory(config, build_host)
        self._child: ChildProcess | None = None
        self._units: StoreHost | None = None
        """Host that owns the storage units on Ray's nodes; None if there are none."""

    async def start(self, run_id: str, listening: Listening) -> Started | Exception:
        """Start the directory; see `HostedDirectory.start`. An error of the store is returned instead of raised,
        because Ray would wrap a raised error. listening: address and ports at which directory and store listen."""
        listening.adopt()
        name = directory_name(run_id)
        try:
            host = "" if listening.one_host else listening.address()
            if store_kind(self._config, one_host=listening.one_host) in OUTLIVING:
                return await asyncio.to_thread(self._start_kept, run_id, host, listening.ports)
            return await self._directory.start(name, host)
        except (DataPlaneError, ValueError) as error:
            return error

    def _start_kept(self, run_id: str, host: str, ports: PortRange | None) -> Started:
        """Start the directory in a process without Ray, because one with Ray's threads must not fork."""
        if host:
            self._units = self._build_host(host)
        else:
            check_store(self._config, one_host=True)
        spec = None if self._units is None else self._units.spec
        self._child, started = start_process(
            self._config, run_id, host, self._samplers, START_TIMEOUT_S, store=spec, ports=ports
        )
        return started

    async def start_unit(self, node: str) -> list[bytes] | Exception:
        """Start a storage unit on a node; see `StartsUnits.start_units`. Its error is returned, as by `start`."""
        if not isinstance(self._units, StartsUnits):
            return []
        try:
            return await asyncio.to_thread(self._units.start_units, [node])
        except (DataPlaneError, ValueError) as error:
            return error

    async def close(self) -> None:
        """Close the store, end the processes that it started, and stop answering requests. Idempotent."""
        if self._child is not None:
            await asyncio.to_thread(self._child.close, END_TIMEOUT_S / 2)
        if self._units is not None:
            await asyncio.to_thread(self._units.close)
        await self._directory.close()


def start_actor(
    run_id: str, config: DataPlaneConfig, build_host: BuildHost, *, node: str, listening: Listening, timeout_s: float
) -> tuple[Any, Started]:
    """Start the directory's actor on a node, given by Ray's id, of this process if it is "". Returns the actor's handle
    and a description of the started directory.

    The actor ends when the last handle is deleted or when this process ends. `build_host` runs in the actor, and errors
    that it raises are raised here. Raises DirectoryLost when the actor dies or does not start within `timeout_s`.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    name, began_s = directory_name(run_id), time.monotonic()
    # Ray 2.60 puts an actor without CPUs on any node if its affinity is soft.
    place = NodeAffinitySchedulingStrategy(node or ray.get_runtime_context().get_node_id(), soft=False)
    options = ray.remote(DirectoryActor).options(
        name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=0, scheduling_strategy=place
    )
    actor: Any = options.remote(config, build_host, shipped_objects(config.samplers))
    try:
        started: Any = ray.get(actor.start.remote(run_id, listening), timeout=timeout_s)
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


def start_unit(actor: Any, node: str, timeout_s: float) -> list[bytes]:
    """Start a storage unit on a node; see `StartsUnits.start_units`. Raises DirectoryLost when the directory's actor is
    dead or does not answer within `timeout_s`."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        found: Any = ray.get(actor.start_unit.remote(node), timeout=timeout_s)
    except (RayActorError, GetTimeoutError) as error:
        reason = str(error).partition("\n")[0]
        raise DirectoryLost(f"no storage unit was started on node {node}: {reason}", op="ensure_unit") from None
    if isinstance(found, Exception):
        raise found
    return found


def stop_actor(actor: Any) -> None:
    """Close the store within bounded time, then end the actor. No-op when Ray is no longer initialised, because the
    actor ended with Ray."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    if not ray.is_initialized():
        return
    try:
        ray.get(actor.close.remote(), timeout=END_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        pass  # The actor is dead or stuck, and the kill below ends it.
    ray.kill(actor)


def _start(setup: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """Start the directory, in a process that is replaced when it dies if the store outlives it.

    Otherwise, it runs on an event loop in a thread. setup: what `start_process` sends.
    """
    config, run_id = DataPlaneConfig.model_validate_json(setup["config"]), setup["run_id"]
    ship_objects({path: bytes.fromhex(data) for path, data in setup["samplers"].items()})
    if setup["ports"]:
        Listening(one_host=False, ports=PortRange.parse(setup["ports"])).adopt()
    if setup["store"]:
        host = host_of_running(config, _spec(setup["store"]))
    else:
        host = build_store_host(config, run_id, setup["host"])
    started, close = (_start_kept if isinstance(host, Recovers) else _start_here)(config, run_id, setup["host"], host)
    return dataclasses.asdict(started) | {"store": _plain(started.store)}, close


def _start_kept(config: DataPlaneConfig, run_id: str, at: str, host: Any) -> tuple[Started, Callable[[], None]]:
    """Start the directory in a forked process. at: IP address at which clients of other hosts reach it, or ""."""
    try:
        kept = Kept(host, memory_files(), Listeners(directory_name(run_id), at))
        keeper = Keeper(
            lambda ready, control: asyncio.run(_serve_kept(config, run_id, at, kept, ready, control)),
            lambda: any(os.fstat(file).st_size for file in kept.log_files),
        )

        def gone() -> None:
            kept.listeners.close()
            host.close()
            os._exit(1)

        keeper.start(START_TIMEOUT_S, gone)
    except BaseException:
        host.close()
        raise

    def close() -> None:
        keeper.close(END_TIMEOUT_S / 4)  # The parent kills this process after twice the time.
        kept.listeners.close()
        host.close()

    return Started(
        os.getpid(), platform.node(), pid_space(), host.spec, host.processes(), kept.listeners.address
    ), close


async def _serve_kept(
    config: DataPlaneConfig, run_id: str, at: str, kept: Kept, ready: Callable[[], object], control: int
) -> None:
    """Serve the directory in a forked process until its keeper says that the data plane closes."""
    hosted = HostedDirectory(config, lambda _: kept.host, kept)
    await hosted.start(directory_name(run_id), at)
    ready()
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(control, told.set)
    await told.wait()
    if not told_to_close(control):  # The keeper has died, and with it the store's processes.
        os._exit(1)
    await hosted.close()


def _start_here(config: DataPlaneConfig, run_id: str, at: str, host: StoreHost) -> tuple[Started, Callable[[], None]]:
    """Start the directory on an event loop in a thread. The arguments are those of `_start_kept`."""
    hosted = HostedDirectory(config, lambda _: host)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="directory", daemon=True)
    thread.start()

    def close() -> None:
        asyncio.run_coroutine_threadsafe(hosted.close(), loop).result(END_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_TIMEOUT_S)

    start = hosted.start(directory_name(run_id), at)
    try:
        return asyncio.run_coroutine_threadsafe(start, loop).result(), close
    except BaseException:
        close()
        raise


if __name__ == "__main__":
    serve_parent(_start)
