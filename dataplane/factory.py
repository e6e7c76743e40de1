"""Where a data plane is opened and joined, and the one place that knows every kind of store.

Ray is imported where a directory in another process is opened: a process that only joins one, or has its own, goes
without.
"""

from __future__ import annotations

import functools
import os
import uuid
from types import TracebackType
from typing import Any, cast

from .async_client import AsyncDataPlaneClient
from .block_store import BlockStore, StoreHost, StoreSpec
from .client import DataPlaneClient
from .config import DataPlaneConfig
from .handle import DataPlaneHandle
from .rpc.links import InProcessLink, Link, in_process_link
from .rpc.socket_link import SocketLink


class DataPlane:
    """A run's data plane, owned by who opened it. Closing frees the store and ends the directory."""

    def __init__(self, handle: DataPlaneHandle, link: InProcessLink | None, actor: Any, directory_pid: int) -> None:
        self.handle = handle
        self._link = link
        self._actor = actor
        self._directory_pid = directory_pid

    def processes(self) -> dict[str, int]:
        """Name -> pid of the directory's process and of those that the store runs in."""
        address = self.handle.store.address
        units = cast(list[list[Any]], address.get("units", []))
        found = {"directory": self._directory_pid, **{unit[1]: unit[2] for unit in units}}
        return found | ({"mooncake master": cast(int, address["pid"])} if self.handle.store.kind == "mooncake" else {})

    def close(self) -> None:
        """End store and directory, within a bound. Idempotent. Clients then get DirectoryLost."""
        link, self._link = self._link, None
        actor, self._actor = self._actor, None
        if link is not None:
            link.close()
        if actor is not None:
            from .rpc.actor import stop_actor

            stop_actor(actor)
            remove_leftovers(self.handle.store)

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_data_plane(
    config: DataPlaneConfig, *, run_id: str | None = None, in_process: bool = False, one_host: bool = True
) -> DataPlane:
    """Start a directory and, beside it, the store.

    in_process: in a thread of this process, for clients of this process only; else in one named Ray actor that takes
    no CPU (Ray must be initialised). one_host: all clients are on the directory's host, which therefore listens on no
    network, and `store.kind=auto` means shm. run_id: letters, digits, `-`, `_`, `.`;
    None makes one up.
    Raises ValueError for what the configuration asks and this machine cannot give, DirectoryLost or StoreLost when a
    process does not start within its bound.
    """
    run_id = run_id or f"run-{uuid.uuid4().hex[:10]}"
    if not run_id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ValueError(f"run_id: got {run_id!r}, expected letters, digits, '-', '_', '.'")
    build_host = functools.partial(build_store_host, config, run_id, one_host=one_host)
    if in_process:
        link = InProcessLink(run_id, config, build_host)
        return DataPlane(DataPlaneHandle(run_id, config, link.host.spec, "", None, link.peer), link, None, os.getpid())
    import ray

    from .rpc.actor import actor_name, start_actor

    if not ray.is_initialized():
        raise ValueError("open_data_plane: Ray is not initialised; call ray.init() before, or pass in_process=True")
    actor, started = start_actor(run_id, config, build_host, one_host=one_host)
    name = actor_name(run_id)
    peer = f"{name} pid={started.pid} host={started.node}"
    return DataPlane(
        DataPlaneHandle(run_id, config, started.store, name, started.address, peer), None, actor, started.pid
    )


def connect(handle: DataPlaneHandle, *, name: str = "") -> DataPlaneClient:
    """Join a data plane from this process. `name` stands for this client in the directory's log.

    Raises DirectoryLost or StoreLost when it is not (or no longer) there.
    """
    link = _link(handle)
    return DataPlaneClient(handle, link, build_block_store(handle.store, link), name)


def connect_async(handle: DataPlaneHandle, *, name: str = "") -> AsyncDataPlaneClient:
    """`connect` for asyncio; attaching to the store may block for milliseconds."""
    link = _link(handle)
    return AsyncDataPlaneClient(handle, link, build_block_store(handle.store, link), name)


def _link(handle: DataPlaneHandle) -> Link:
    return in_process_link(handle.run_id) if handle.address is None else SocketLink(handle.address, handle.peer)


def build_store_host(config: DataPlaneConfig, run_id: str, *, one_host: bool = True) -> StoreHost:
    """The configured store's host, in the process that calls. A store is imported only when it is used."""
    kind = config.store.kind
    if kind == "auto":
        kind = "shm" if one_host else "simple"
    capacity_bytes = config.store.capacity_mib << 20
    if kind == "local":
        from .stores.local import LocalHost

        return LocalHost(run_id)
    if kind == "shm":
        from .stores.shared_memory import SharedMemoryHost

        return SharedMemoryHost(run_id, capacity_bytes)
    if kind == "ray":
        from .stores.ray_objects import RayObjectsHost

        return RayObjectsHost(run_id)
    if kind == "simple":
        from .stores.simple import SimpleHost

        return SimpleHost(run_id, config.store.num_units)
    if kind == "mooncake":
        import ray

        from .stores.mooncake_store import MooncakeHost

        host = "127.0.0.1" if one_host else ray.util.get_node_ip_address()
        return MooncakeHost(
            run_id, capacity_bytes, host=host, protocol=config.store.protocol, device=config.store.device
        )
    raise ValueError(f"dataplane.store.kind: got {kind!r}, expected auto, local, shm, ray, simple or mooncake")


def remove_leftovers(spec: StoreSpec) -> None:
    """Remove what a store's host that was killed has left on this machine; those of living runs stay."""
    if spec.kind == "shm":
        from .stores.shm_folder import remove_stale_folders

        remove_stale_folders()


def build_block_store(spec: StoreSpec, link: Link) -> BlockStore:
    """This process's half of the store that `spec` describes."""
    if spec.kind == "local":
        from .stores.local import LinkedLocalStore, LocalHost, LocalStore

        if isinstance(link, InProcessLink) and isinstance(link.host, LocalHost):
            return LocalStore(link.host)
        return LinkedLocalStore(link)
    if spec.kind == "shm":
        from .stores.shared_memory import SharedMemoryStore

        return SharedMemoryStore(spec)
    if spec.kind == "ray":
        from .stores.ray_objects import RayObjectsStore

        return RayObjectsStore(spec)
    if spec.kind == "simple":
        from .stores.simple import SimpleStore

        return SimpleStore(spec)
    if spec.kind == "mooncake":
        from .stores.mooncake_store import MooncakeStore

        return MooncakeStore(spec)
    raise ValueError(f"store kind {spec.kind!r}: expected local, shm, ray, simple or mooncake")
