"""Opens a run's data plane, and connects clients to it.

Ray is imported only to start the directory (the metadata service) in a process of its own. A process that joins a data
plane, or runs the directory itself, does not need Ray.
"""

from __future__ import annotations

import atexit
import functools
import os
import platform
import uuid
from types import TracebackType
from typing import Any

from .block_store import StoreHost
from .client.async_client import AsyncDataPlaneClient
from .client.client import DataPlaneClient
from .config import DataPlaneConfig
from .handle import DataPlaneHandle
from .rpc.links import InProcessLink, Link, call_s, in_process_link
from .rpc.socket_link import SocketLink
from .stores.registry import store_entry
from .stores.shm_folder import check_room
from .trust import check_trust


class DataPlane:
    """A run's data plane, owned by the process that opened it. Closing it frees the store and ends the directory (the
    metadata service)."""

    def __init__(
        self, handle: DataPlaneHandle, link: InProcessLink | None, actor: Any, processes: dict[str, int], host: str
    ) -> None:
        self.handle = handle
        self.host = host
        """Name of the host on which the directory and all of `processes` run."""
        self._link = link
        self._actor = actor
        self._processes = processes
        self._at_exit = None if link is None else functools.partial(_close_host, link.host, os.getpid())
        if self._at_exit is not None:
            atexit.register(self._at_exit)

    def processes(self) -> dict[str, int]:
        """Return the pids of the directory's process and of the store's processes on the directory's host, by name."""
        return dict(self._processes)

    def close(self) -> None:
        """End the store and the directory within bounded time. Idempotent. Clients that call later get
        DirectoryLost."""
        link, self._link = self._link, None
        actor, self._actor = self._actor, None
        if link is not None:
            link.close()
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if actor is not None:
            from .rpc.actor import stop_actor

            stop_actor(actor)
            store_entry(self.handle.store.kind).remove_leftovers()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _close_host(host: StoreHost, pid: int) -> None:
    """Close the store when a program ends without having called `close`, so that its rows do not stay in memory. pid:
    process that opened the store; in processes that were forked from it this is a no-op."""
    if os.getpid() == pid:
        host.close()


def open_data_plane(
    config: DataPlaneConfig,
    *,
    run_id: str | None = None,
    in_process: bool = False,
    one_host: bool = True,
    start_timeout_s: float = 300.0,
) -> DataPlane:
    """Start the directory (the metadata service) and the store of a run.

    run_id: letters, digits, `-`, `_` and `.`; None generates one. in_process: True runs the directory in a thread of
    this process, for clients of this process only; False runs it in one named Ray actor that reserves no CPU (Ray must
    be initialised). one_host: True says that all clients are on the directory's host, so the directory listens on no
    network and `store.kind=auto` means `shm`. start_timeout_s: seconds that the directory's process may take to start.

    Raises ValueError for a malformed run_id, when Ray is needed but not initialised, and when this machine cannot
    provide what the configuration asks for. Raises DirectoryLost or StoreLost when a process does not start in time.
    """
    run_id = run_id or f"run-{uuid.uuid4().hex[:10]}"
    if not run_id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"run_id: got {run_id!r}, expected letters, digits, '-', '_', '.'")
    build_host = functools.partial(build_store_host, config, run_id, one_host=one_host)
    if in_process:
        link = InProcessLink(run_id, config, build_host)
        handle = DataPlaneHandle(run_id, config, link.host.spec, "", None, link.peer)
        return DataPlane(handle, link, None, {"directory": os.getpid(), **link.host.processes()}, platform.node())
    import ray

    from .rpc.actor import actor_name, start_actor

    if not ray.is_initialized():
        raise ValueError("open_data_plane: Ray is not initialised; call ray.init() first, or pass in_process=True")
    actor, started = start_actor(run_id, config, build_host, one_host=one_host, timeout_s=start_timeout_s)
    name = actor_name(run_id)
    peer = f"{name} pid={started.pid} host={started.node}"
    handle = DataPlaneHandle(run_id, config, started.store, name, started.address, peer)
    return DataPlane(handle, None, actor, {"directory": started.pid, **started.store_processes}, started.node)


def connect(handle: DataPlaneHandle, *, name: str = "") -> DataPlaneClient:
    """Connect this process to a data plane. `name` identifies this client in the directory's log.

    Raises DirectoryLost or StoreLost when the directory or the store is not running.
    """
    link = _link(handle, connect_now=True)
    return DataPlaneClient(handle, link, store_entry(handle.store.kind).attach(handle.store, link), name)


def connect_async(handle: DataPlaneHandle, *, name: str = "") -> AsyncDataPlaneClient:
    """Return an asyncio client of a data plane. `name` identifies this client in the directory's log.

    Attaches to the store now, which may block for milliseconds and raises StoreLost when the store is not running. The
    connection to a directory in another process is opened by the first call, which raises DirectoryLost when the
    directory is not running.
    """
    link = _link(handle, connect_now=False)
    return AsyncDataPlaneClient(handle, link, store_entry(handle.store.kind).attach(handle.store, link), name)


def _link(handle: DataPlaneHandle, *, connect_now: bool) -> Link:
    if handle.address is None:
        return in_process_link(handle.run_id)
    connect_s = call_s(handle.config.timeout_s) if connect_now else None
    return SocketLink(handle.address, handle.store.key, handle.peer, connect_s=connect_s)


def build_store_host(config: DataPlaneConfig, run_id: str, *, one_host: bool = True) -> StoreHost:
    """Start the host part of the configured store, which allocates and frees blocks, in the calling process. Raises
    ValueError as `check_store` does."""
    check_store(config, one_host=one_host)
    return store_entry(store_kind(config, one_host=one_host)).open_host(config.store, run_id, one_host)


def store_kind(config: DataPlaneConfig, *, one_host: bool) -> str:
    """Return the kind of store that a data plane with this configuration uses. `auto` becomes `shm` on one host, else
    `simple`."""
    if config.store.kind != "auto":
        return config.store.kind
    return "shm" if one_host else "simple"


def check_store(config: DataPlaneConfig, *, one_host: bool = True) -> None:
    """Raise ValueError when this host, in its present state, cannot provide the configured store, or when the store
    would trust everybody on the network (see `check_trust`). Starts nothing.

    A dry run calls it on the host where the data plane would be opened.
    """
    kind = store_kind(config, one_host=one_host)
    check_trust(config, kind, one_host=one_host)
    if kind != "shm":
        return
    if not one_host:
        raise ValueError(
            "dataplane.store.kind: got 'shm' for a run on several hosts, whose processes share no memory; expected "
            "'simple', 'ray' or 'mooncake', or 'auto', which chooses"
        )
    check_room(config.store.capacity_mib << 20)
