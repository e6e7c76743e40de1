"""Opens a run's data plane, and connects clients to it.

Ray is imported only to start the directory (the metadata service) in a Ray actor. A process that joins a data plane, or
that runs the directory itself or in a separate process, does not need Ray.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType

from ..codecs import messages
from .block_store import BlockStore, StoreSpec
from .client.arguments import checked_call
from .client.async_client import AsyncDataPlaneClient
from .client.client import DataPlaneClient
from .config import DataPlaneConfig
from .directory import requests
from .directory.requests import body_of
from .directory_process import directory_name, start_actor, start_process, start_unit, stop_actor
from .errors import InvalidArgument
from .handle import DataPlaneHandle, PlaneText
from .imports import shipped_objects
from .listen_address import Listening
from .owned_folder import pid_space
from .recovery.keeper import kept_process
from .rpc.links import InProcessLink, Link, call_s, in_process_link
from .rpc.socket_link import SocketLink
from .store_choice import build_store_host, check_store
from .stores.registry import StorageUnitProcess, store_entry

CHILD_END_TIMEOUT_S = 20.0
"""Seconds that the process of the directory may take to end the store and itself."""
UNIT_TIMEOUT_S = 90.0
"""Seconds that a new storage unit may take to start."""
TEXT_TIMEOUT_S = 30.0
"""Seconds that the directory may take to answer a process that joins with the text of a handle."""


class DataPlane:
    """A run's data plane, owned by the process that opened it. Closing it frees the store and ends the directory (the
    metadata service)."""

    def __init__(
        self,
        handle: DataPlaneHandle,
        processes: dict[str, int],
        host: str,
        space: str,
        end: Callable[[], None],
        *,
        at_exit: Callable[[], None] | None,
        start_unit: Callable[[str, float], Sequence[bytes]] = lambda node, timeout_s: (),
        shards: Sequence[DataPlane] = (),
    ) -> None:
        """end: function that ends the store and the directory. at_exit: function to call when the program ends without
        having called `close`, so that its rows do not stay in memory; None when the rows vanish with the process.
        start_unit: function that starts a storage unit on a node, as `StartsUnits.start_units` does. shards: data
        planes of the single directories, which `end` ends, if there are several."""
        self.handle = handle
        """Handle with which other processes connect; `handle.to_text()` returns it as a short text."""
        self.host = host
        """Name of the host on which the directory and all of `processes` run."""
        self.space = space
        """Space of the process ids of `processes`, as `pid_space` returns it."""
        self._processes = processes
        self._end: Callable[[], None] | None = end
        self._start_unit = start_unit
        self._shards = shards
        self._ensuring = threading.Lock()
        self._at_exit = None if at_exit is None else functools.partial(_end_in, os.getpid(), at_exit)
        if self._at_exit is not None:
            atexit.register(self._at_exit)

    def processes(self) -> dict[str, int]:
        """Return the pids of the directory's process and of the store's processes on the directory's host, by name."""
        return dict(self._processes)

    def serving_pid(self) -> int:
        """Return the pid of the process that answers the directory's requests. It changes when that process dies and
        another one goes on, while the pid of `directory` in `processes` remains."""
        return kept_process(self._processes["directory"])

    def ensure_unit(self, node: str, *, timeout_s: float = UNIT_TIMEOUT_S) -> None:
        """Start a storage unit on a node of the Ray cluster, given by Ray's id, unless it has a living one.

        It is called before an actor that makes or reads rows starts on a new node. A no-op for other stores than `tcp`,
        and for a data plane on one host. Idempotent.

        Raises ValueError if the node has no room for the unit, StoreLost if the unit does not start, and DirectoryLost
        if the directory does not answer within `timeout_s`.
        """
        for shard in self._shards:
            shard.ensure_unit(node, timeout_s=timeout_s)
        if self._shards:
            return
        _, link = _joined(self.handle, connect_now=True)
        started = time.monotonic()

        def ask(op: str, payload: bytes) -> bytes:
            left_s = max(0.001, started + timeout_s - time.monotonic())
            return body_of(link.call(op, payload, left_s), "ensure_unit", time.monotonic() - started)

        try:
            with self._ensuring:
                if messages.decode(ask("lacks_unit", node.encode()), bool):
                    for request in self._start_unit(node, timeout_s):
                        ask("store", request)
        finally:
            link.detach()

    def close(self) -> None:
        """End the store and the directory within bounded time. Idempotent. Clients that call later get
        DirectoryLost."""
        end, self._end = self._end, None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        if end is not None:
            end()

    def __enter__(self) -> DataPlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _end_in(pid: int, end: Callable[[], None]) -> None:
    """Call `end` if this is the process `pid`. In processes that were forked from it this is a no-op."""
    if os.getpid() == pid:
        end()


@checked_call
def open_data_plane(
    config: DataPlaneConfig | None = None,
    *,
    run_id: str | None = None,
    in_process: bool = False,
    process: bool = False,
    one_host: bool = True,
    listen: str = "",
    nodes: Sequence[str] | None = None,
    directory_node: str = "",
    listening: Listening | None = None,
    start_timeout_s: float = 300.0,
) -> DataPlane:
    """Start the directory (the metadata service) and the store of a run.

    config: None uses the defaults. run_id: up to 64 letters, digits, `-`, `_` and `.`; None generates one. in_process:
    True runs the directory in a thread of this process, for clients of this process only. process: True runs it without
    Ray in a separate process that ends when this process ends. With neither, it runs in one named Ray actor that
    reserves no CPU (Ray must be initialised). one_host: whether all clients are on the Ray actor's host. listening:
    interface and ports of the data plane on each host of a Ray cluster, instead of one_host. listen: with
    process=True, IP address of this host at which clients of other hosts reach the data plane; "" when all clients are
    on this host. On one host, no port is open to other hosts and `store.kind=auto` means `shm`; otherwise it means
    `tcp`. nodes: Ray's ids of the nodes on which rows are made or read, each of which gets a storage unit of the store
    `tcp`; None takes all. directory_node: Ray's id of the node of the Ray actor; "" is this process's. start_timeout_s:
    seconds that the directory's process may take to start.

    Raises InvalidArgument, a ValueError, for wrong arguments, such as a `listen` that is not an address of this host,
    and for arguments that exclude each other. Raises ValueError when Ray is needed but not initialised, and when this
    machine cannot provide what the configuration asks for. Raises DirectoryLost or StoreLost when a process does not
    start in time.
    """
    config = config or DataPlaneConfig()
    run_id = run_id or f"run-{uuid.uuid4().hex[:10]}"
    if in_process and process:
        raise InvalidArgument("open_data_plane: got in_process=True and process=True, expected at most one of them")
    if listen and not process:
        raise InvalidArgument(f"open_data_plane: got listen={listen!r} without process=True, expected both or neither")

    def open_one(config: DataPlaneConfig, run_id: str) -> DataPlane:
        if in_process:
            return _open_in_process(config, run_id)
        if process:
            return _open_process(config, run_id, listen, start_timeout_s)
        return _open_actor(
            config, run_id, listening or Listening(one_host), tuple(nodes or ()), directory_node, start_timeout_s
        )

    return open_one(config, run_id) if config.directory_shards == 1 else _open_shards(config, run_id, open_one)


def _open_shards(
    config: DataPlaneConfig, run_id: str, open_one: Callable[[DataPlaneConfig, str], DataPlane]
) -> DataPlane:
    """Open a data plane of several directories, each with its own part of the store."""
    count = config.directory_shards
    part = config.store.model_copy(update={"capacity_mib": max(1, config.store.capacity_mib // count)})
    config = config.model_copy(update={"store": part})
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(open_one(config, run_id))
        others = [opened.enter_context(open_one(config, f"{run_id[:60]}-{number}")) for number in range(1, count)]
        processes = first.processes()
        for number, other in enumerate(others, 1):
            processes |= {f"{name}-shard-{number}": pid for name, pid in other.processes().items()}
        handle = dataclasses.replace(first.handle, shards=tuple(other.handle for other in others))
        end = opened.pop_all().close
    return DataPlane(handle, processes, first.host, first.space, end, at_exit=None, shards=(first, *others))


def _open_in_process(config: DataPlaneConfig, run_id: str) -> DataPlane:
    link = InProcessLink(run_id, config, functools.partial(build_store_host, config, run_id))
    handle = DataPlaneHandle(run_id, config, link.host.spec, "", None, link.peer)

    def end() -> None:
        link.close()
        store_entry(handle.store.kind).remove_leftovers()

    processes = {"directory": os.getpid(), **link.host.processes()}
    # At the end of the program, the directory's event loop may have ended already, so only the store's host is closed.
    return DataPlane(handle, processes, platform.node(), pid_space(), end, at_exit=link.host.close)


def _open_process(config: DataPlaneConfig, run_id: str, listen: str, timeout_s: float) -> DataPlane:
    check_store(config, one_host=not listen)
    child, started = start_process(config, run_id, listen, shipped_objects(config.samplers), timeout_s)
    peer = f"{directory_name(run_id)} pid={started.pid} host={started.node}"
    handle = DataPlaneHandle(run_id, config, started.store, "", started.address, peer)

    def end() -> None:
        child.close(CHILD_END_TIMEOUT_S)
        store_entry(started.store.kind).remove_leftovers()

    processes = {"directory": started.pid, **started.store_processes}
    return DataPlane(handle, processes, started.node, started.space, end, at_exit=end)


def _open_actor(
    config: DataPlaneConfig, run_id: str, listening: Listening, nodes: tuple[str, ...], node: str, timeout_s: float
) -> DataPlane:
    import ray

    if not ray.is_initialized():
        raise ValueError(
            "open_data_plane: Ray is not initialised; call ray.init() first, or pass process=True or in_process=True, "
            "which need no Ray"
        )
    build_host = functools.partial(build_store_host, config, run_id, nodes=nodes)
    actor, started = start_actor(run_id, config, build_host, node=node, listening=listening, timeout_s=timeout_s)
    name = directory_name(run_id)
    peer = f"{name} pid={started.pid} host={started.node}"
    handle = DataPlaneHandle(run_id, config, started.store, name, started.address, peer)
    held = [actor]  # The actor ends when its last handle is deleted.

    def end() -> None:
        stop_actor(held.pop())
        store_entry(started.store.kind).remove_leftovers()

    processes = {"directory": started.pid, **started.store_processes}
    return DataPlane(
        handle,
        processes,
        started.node,
        started.space,
        end,
        at_exit=None,
        start_unit=lambda node, timeout_s: start_unit(held[0], node, timeout_s),
    )


@checked_call
def connect(handle: DataPlaneHandle | str, *, name: str = "") -> DataPlaneClient:
    """Connect this process to a data plane. handle: a handle, or its text (`DataPlaneHandle.to_text`). `name`
    identifies this client in the directory's log.

    Raises DirectoryLost or StoreLost when the directory or the store is not running, and InvalidArgument, a ValueError,
    for anything else than a handle or its exact text.
    """
    handle, link = _joined(handle, connect_now=True)
    return DataPlaneClient(handle, link, _attach(handle, link), name, _others(handle, connect_now=True))


@checked_call
def connect_async(handle: DataPlaneHandle | str, *, name: str = "") -> AsyncDataPlaneClient:
    """Return an asyncio client of a data plane. The arguments are those of `connect`.

    Attaches to the store now, which may block for milliseconds and raises StoreLost when the store is not running. The
    connection to a directory in another process is opened by the first call, which raises DirectoryLost when the
    directory is not running. For a handle's text, this function asks the directory now.
    """
    handle, link = _joined(handle, connect_now=False)
    return AsyncDataPlaneClient(handle, link, _attach(handle, link), name, _others(handle, connect_now=False))


def _others(handle: DataPlaneHandle, *, connect_now: bool) -> list[tuple[DataPlaneHandle, Link, BlockStore]]:
    """Return handle, link and store of each further directory of a data plane."""
    joined = [_joined(shard, connect_now=connect_now) for shard in handle.shards]
    return [(shard, link, _attach(shard, link)) for shard, link in joined]


def _attach(handle: DataPlaneHandle, link: Link) -> BlockStore:
    store = handle.store
    if handle.config.integrity == "auto" and not handle.config.tls:  # Only `tcp` reads this. TLS checks more.
        store = dataclasses.replace(store, address={**store.address, "checksums": True})
    return store_entry(store.kind).attach(store, link)


@checked_call
def open_storage_unit(handle: DataPlaneHandle | str, *, listen: str) -> StorageUnitProcess:
    """Start a storage unit on this host for a data plane with the store `tcp` that was opened on another host.

    Clients of this host then write to it, through shared memory. listen: IP address of this host at which other hosts
    reach the unit. The unit runs until `close`, or until this process ends; its rows are lost then. Raises ValueError
    for other kinds of store and when /dev/shm has too little room, and DirectoryLost or StoreLost when the directory or
    the new unit does not answer.
    """
    handle, link = _joined(handle, connect_now=True)
    try:
        open_unit = store_entry(handle.store.kind).open_unit
        if open_unit is None:
            raise ValueError(f"open_storage_unit: the store is {handle.store.kind!r}, expected 'tcp'")
        return open_unit(handle.store, handle.config.store, link, listen, handle.config.timeout_s)
    finally:
        link.detach()


def _joined(handle: DataPlaneHandle | str, *, connect_now: bool) -> tuple[DataPlaneHandle, Link]:
    """Return the handle and a link to the directory. For a handle's text, the directory is asked for the missing
    parts."""
    if isinstance(handle, str):
        return _joined_by_text(PlaneText.parse(handle))
    if handle.address is None:
        return handle, in_process_link(handle.run_id)
    connect_s = call_s(handle.config.timeout_s) if connect_now else None
    return handle, SocketLink(handle.address, handle.store.key, handle.peer, connect_s=connect_s)


def _joined_by_text(text: PlaneText) -> tuple[DataPlaneHandle, Link]:
    peer = directory_name(text.run_id)
    link = SocketLink(text.address, text.key, peer, connect_s=TEXT_TIMEOUT_S)
    started = time.monotonic()
    reply = link.call("plane", b"", TEXT_TIMEOUT_S)
    plane = messages.decode(body_of(reply, "connect", time.monotonic() - started), requests.Plane)
    store = StoreSpec(plane.store_kind, plane.store_run_id, plane.store_address, plane.plane_id, text.key)
    config = DataPlaneConfig.model_validate_json(plane.config)
    shards = []
    for other in text.shards:
        shard, other_link = _joined_by_text(other)
        other_link.detach()
        shards.append(shard)
    return DataPlaneHandle(text.run_id, config, store, "", text.address, peer, tuple(shards)), link
