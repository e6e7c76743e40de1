"""Implements the part of the store `tcp` in the directory's process: it starts the units, and frees blocks in them."""

from __future__ import annotations

import dataclasses
import platform
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

from ...block_store import ANY_HOLDER, HOLDER_BYTES, SERVED_DEAD, StoreSpec, holder_of
from ...config import StoreConfig
from ...directory.requests import body_of
from ...errors import DataPlaneError, DataPlaneTimeout, StoreLost
from ...owned_folder import remove_stale_folders
from ...rpc.links import Link
from ...security.run_key import opened_key
from ..counting_host import CountingHost
from ..registry import StoreEntry
from .link import DYING_S, UnitDied, UnitLink
from .soon import SoonFreed
from .store import TcpStore
from .unit import UnitProcess
from .wire import Free, Keep, UnitAddress, column, decode, encode

KEEP_S = 2.0
"""Seconds that a unit may take to answer a directory whose predecessor has died."""
KEEP_THREADS = 32
"""Largest number of units that are asked at the same time then."""
_JOIN = b"join"
MAX_UNITS = 1 << (8 * HOLDER_BYTES)


class RunningUnit(Protocol):
    """A storage unit that the host has started in a separate process."""

    address: UnitAddress

    def has_died(self) -> bool:
        """Return whether the unit's process has certainly ended."""
        ...

    def close(self) -> None:
        """End the unit's process, in bounded time. Idempotent."""
        ...


class TcpHost(CountingHost):
    """Starts the storage units, counts their bytes, and makes them free blocks. Called from one thread, except for
    `serve`, which the directory's event loop calls."""

    def __init__(
        self, run_id: str, units: Sequence[RunningUnit], key: bytes, capacity_bytes: int, num_units: int | None = None
    ) -> None:
        """units: units that run already; () for a store whose units are started on nodes of a Ray cluster. num_units:
        number of units to start there at first; None for one on each node."""
        super().__init__([], capacity_bytes)
        self._started: dict[int, RunningUnit] = {}
        """Units that this host has started, by number."""
        self._units: list[UnitLink] = []
        self._memories: list[str] = []
        """Identity of the shared memory of each host, in the order of `_host_names`."""
        self._host_names: list[str] = []
        self._room_of: list[int] = []
        """Number of the host of each unit."""
        self._rooms: dict[int, str] = {}
        self._rooms_of = (-1, 0)
        """Numbers of units and of dead ones for which `_rooms` was computed."""
        self._key = key
        self._capacity_bytes = capacity_bytes
        self._num_units = num_units
        self._on_nodes = not units
        self._starting = threading.Lock()
        self._owns = True
        """Whether `close` ends the units."""
        self.spec = StoreSpec("tcp", run_id, {}, key=key)
        for unit in units:
            self._add(unit.address, unit)

    def lacks_unit(self, node: str) -> bool:
        """Return whether a node has no living unit; see `StartsUnits`."""
        return self._on_nodes and all(self._units[number].address.node != node for number in self._unfreed.living)

    def start_units(self, nodes: Sequence[str]) -> list[bytes]:
        """Start a unit on each node; see `StartsUnits`."""
        if not self._on_nodes:
            return []
        from .ray_units import living_nodes, start_units

        with self._starting:
            first = len(self._units)
            wanted = list(dict.fromkeys(nodes or living_nodes()))
            if not first and self._num_units is not None:
                wanted = [wanted[number % len(wanted)] for number in range(self._num_units)]
            places = [(f"unit-{first + number}", node) for number, node in enumerate(wanted)]
            units = start_units(self.spec.run_id, places, self._key, self._capacity_bytes)
            for unit in units:
                self._add(unit.address, unit)
            return [_JOIN + encode(unit.address) for unit in units]

    def adopt(self, blocks: Sequence[tuple[int, bytes, int]], next_block: int) -> None:
        """Go on with the units in another process; see `Recovers`. A unit that does not answer counts as silent, and
        keeps all of its blocks."""
        self._owns = False
        self._bytes = {block_id: nbytes for block_id, _, nbytes in blocks}
        held: list[list[int]] = [[] for _ in self._units]
        for block_id, location, _ in blocks:
            held[holder_of(location)].append(block_id)

        def keep(number: int) -> Exception | None:
            request = encode(Keep(column(held[number]), next_block))
            try:
                self._units[number].ask("keep", "keep", request, (), time.monotonic() + KEEP_S)
            except (StoreLost, DataPlaneTimeout) as error:
                return error
            return None

        living = self._unfreed.living
        with ThreadPoolExecutor(min(max(1, len(living)), KEEP_THREADS)) as threads:
            for number, error in zip(living, threads.map(keep, living), strict=True):
                if error is not None:
                    self._undelivered(number, error, dead=isinstance(error, UnitDied) or self._has_died(number))

    def _names(self, peer: int) -> tuple[str, ...]:
        address = self._units[peer].address
        return address.name, address.peer, address.node

    @property
    def rooms(self) -> Mapping[int, str]:
        """Names of the hosts with a living unit, by number, or of all hosts if no unit lives; see `HasRooms`."""
        state = len(self._units), len(self._unfreed.dead)
        if self._rooms_of != state:  # Each request of a put asks for the rooms.
            living = {self._room_of[unit] for unit in self._unfreed.living}
            names = enumerate(self._host_names)
            self._rooms = {room: name for room, name in names if not living or room in living}
            self._rooms_of = state
        return self._rooms

    def room_of(self, holder: int) -> int:
        """Return the number of a unit's host; see `HasRooms`."""
        return self._room_of[holder] if holder < len(self._room_of) else 0

    def holder_in(self, room: int) -> int:
        """Return the number of a living unit on a host, or ANY_HOLDER if the store has only one host."""
        if len(self._host_names) == 1:
            return ANY_HOLDER
        return next((unit for unit in self._unfreed.living if self._room_of[unit] == room), ANY_HOLDER)

    def _is_over_limit(self) -> bool:
        """Return whether on every host too many bytes are still to be deleted. A host that is cut off thus does not
        make the writers of others wait."""
        on_host = [0] * len(self._host_names)
        for unit in self._unfreed.living:
            on_host[self._room_of[unit]] += self._unfreed.nbytes_of(unit)
        return all(on_host[room] > self._unfreed.limit_bytes for room in self.rooms)

    def serve(self, request: bytes) -> bytes:
        """Answer a client's request. `units` lists the units, `join` with an address adds a unit that was started
        elsewhere, and `dead` with a name does what `declare_dead` does. Raises ValueError for anything else, and when
        there are too many units."""
        if request == b"units":
            return encode([unit.address for unit in self._units])
        kind, rest = request[:4], request[4:]
        if kind == _JOIN:
            self._add(decode(rest, UnitAddress))
            return b""
        if kind == SERVED_DEAD:
            self.declare_dead(rest.decode())
            return b""
        raise ValueError(f"store request: got {request[:16]!r}, expected 'units', 'join' or 'dead'")

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Make the units delete these blocks, so that they can no longer be read. It takes one round trip to each unit
        that holds one. Idempotent.

        If a unit does not answer, its blocks are remembered and sent to it again with the next call, unless it is dead.
        """
        for block_id, location in blocks:
            nbytes = self._bytes.pop(block_id, None)
            if nbytes is None:
                continue
            # A reserved block that was not committed may be in any unit, or still on its way to one.
            for unit in [holder_of(location)] if location else range(len(self._units)):
                self._unfreed.add(unit, block_id, nbytes)
        self._deliver()

    def free_soon(self, blocks: Sequence[tuple[int, bytes]], done: Callable[[bool], None]) -> bool:
        """Make the units delete blocks without a thread; see `FreesSoon`."""
        wanted: dict[UnitLink, list[int]] = {}
        for block_id, location in blocks:
            if not location or not self._unfreed.answers(holder_of(location)):
                return False
            wanted.setdefault(self._units[holder_of(location)], []).append(block_id)

        def ended(gone: bool) -> None:
            for block_id, _ in blocks if gone else ():
                self._bytes.pop(block_id, None)
            done(gone)

        return SoonFreed(ended).send(wanted)

    def _deliver(self) -> None:
        for number, block_ids in self._unfreed.waiting():
            deadline = time.monotonic() + self._unfreed.timeout_s(number)
            try:
                self._units[number].ask("clear", "free", encode(Free(column(block_ids))), (), deadline)
            except (StoreLost, DataPlaneTimeout) as error:
                dead = isinstance(error, UnitDied) or self._has_died(number)
                self._undelivered(number, error, dead=dead)
            else:
                self._unfreed.delivered(number, block_ids)

    def _has_died(self, peer: int) -> bool:
        return peer in self._started and self._started[peer].has_died()

    def _death(self, peer: int) -> Exception | None:
        try:
            self._units[peer].check_alive("look", time.monotonic() + DYING_S)
        except DataPlaneError as error:
            return error if isinstance(error, UnitDied) or self._has_died(peer) else None
        return None

    def processes(self) -> dict[str, int]:
        """Return the pids of the units that were started on this host, by name."""
        started = self._started.values()
        return {unit.address.name: unit.address.pid for unit in started if isinstance(unit, UnitProcess)}

    def close(self) -> None:
        """End the units that this host started, and remove their pools. Idempotent."""
        for link in self._units:
            link.close()
        if not self._owns:
            return
        started, self._started = self._started, {}
        for unit in started.values():
            unit.close()

    def _add(self, address: UnitAddress, started: RunningUnit | None = None) -> None:
        if len(self._units) == MAX_UNITS:
            raise ValueError(f"storage unit {address.name}: the store has {MAX_UNITS} units already, expected fewer")
        if started is not None:
            self._started[len(self._units)] = started
        if address.memory not in self._memories:
            self._memories.append(address.memory)
            name = address.host_name or address.host
            self._host_names.append(f"{name} ({address.host})" if name in self._host_names else name)
        self._room_of.append(self._memories.index(address.memory))
        self._units.append(UnitLink(address, self._key))
        self._unfreed.add_peer(address.peer)
        self.spec.address["units"] = [dataclasses.astuple(unit.address) for unit in self._units]


def _open_host(config: StoreConfig, run_id: str, host: str) -> TcpHost:
    """Start the storage units on this host, or leave it to `start_units`. If `host` is "", the units are on this host
    and listen on loopback. Otherwise, units are on nodes of the Ray cluster of this process. Without Ray, the units are
    on this host and listen at `host`; `open_unit` adds units of other hosts."""
    remove_stale_folders()
    key, capacity_bytes = opened_key(), config.capacity_mib << 20
    if host and _in_ray_cluster():
        return TcpHost(run_id, (), key, capacity_bytes, config.num_units)
    units: list[RunningUnit] = []
    try:
        for number in range(config.num_units or 1):
            units.append(UnitProcess(run_id, f"unit-{number}", key, host or "127.0.0.1", capacity_bytes))
        return TcpHost(run_id, units, key, capacity_bytes)
    except BaseException:
        for unit in units:
            unit.close()
        raise


def _in_ray_cluster() -> bool:
    ray = sys.modules.get("ray")  # A process that has not imported Ray is not in a cluster.
    return ray is not None and ray.is_initialized()


def _open_unit(spec: StoreSpec, config: StoreConfig, link: Link, host: str, timeout_s: float) -> UnitProcess:
    """Start a storage unit on this host for a store that runs elsewhere, and add it to the store's units. Raises the
    errors of `UnitProcess`, and DirectoryLost when the directory does not answer."""
    remove_stale_folders()
    name = f"unit-{platform.node()}-{secrets.token_hex(4)}"
    unit = UnitProcess(spec.run_id, name, spec.key, host, config.capacity_mib << 20)
    try:
        request = _JOIN + encode(unit.address)
        started = time.monotonic()
        body_of(link.call("store", request, timeout_s), "join", time.monotonic() - started)
    except BaseException:
        unit.close()
        raise
    return unit


def _attach(spec: StoreSpec, link: Link) -> TcpStore:
    return TcpStore(spec, link)


def _go_on(spec: StoreSpec, config: StoreConfig) -> TcpHost:
    """Make another host of a store whose units are on nodes of a Ray cluster; see `StoreEntry.go_on`."""
    host = TcpHost(spec.run_id, (), spec.key, config.capacity_mib << 20)
    units = cast(Sequence[Sequence[Any]], spec.address["units"])
    host.spec = dataclasses.replace(spec, address={"units": []})
    for fields in units:
        host.serve(_JOIN + encode(UnitAddress(*fields)))
    return host


STORE = StoreEntry(_open_host, _attach, remove_stale_folders, _open_unit, _go_on)
