"""Implements the store `simple`: blocks are in TransferQueue's SimpleStorage units, one process each.

The units are TransferQueue's own Ray actors. This store talks to them directly, with TransferQueue's messages over
ZeroMQ: the global index is the block id, the field name is the part number, and each part is one uint8 array.
TransferQueue's controller and client are not used, because the directory already keeps the rows, and a unit works
without both.

A unit listens on its node's address in Ray, or on that of the run's interface (see `Listening`). It trusts anyone who
can reach it (its wire format holds pickles), so this store needs `dataplane.trusted_network`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from ...codecs.blocks import BlockPieces, joined
from ..imports import MissingExtra

try:
    import transfer_queue.storage.simple_storage as tq_storage
    import zmq
    from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, create_zmq_socket, format_zmq_address
except ModuleNotFoundError:
    raise MissingExtra("TransferQueue", "dataplane.store.kind='simple'", "transferqueue") from None

from ..block_store import HOLDER_BYTES, PutsAll, StoreSpec, Want
from ..config import StoreConfig
from ..errors import DataPlaneTimeout, RowsCleared, StoreLost
from ..listen_address import Listening, join_host, listening, ray_address
from ..rpc.child_process import end_with_parent
from ..rpc.forks import renew_in_forks
from ..security.authenticated_listener import listen
from .counting_host import CountingHost
from .deadline import keep_freed_memory, received_part, unanswered
from .ray_processes import end_actors, has_died
from .registry import StoreEntry

NAMESPACE = "headrace"
START_TIMEOUT_S = 60.0
# A unit drops the requests of a peer if its identity does not begin with TQ_STORAGE_.
_IDENTITY = "TQ_STORAGE_headrace"

# Ray ships the unit's class by value, together with this constant. With a value above 1, TransferQueue switches torch's
# thread count around every request and the idle OpenMP threads spin: 12 MB then take 100 ms instead of 13 ms.
tq_storage.TQ_NUM_THREADS = 1


@dataclass(frozen=True, slots=True)
class Unit:
    """Address of one storage unit, the TransferQueue process that stores blocks."""

    unit_id: str
    name: str
    pid: int
    ip: str
    port: int

    @property
    def peer(self) -> str:
        return f"{self.name} pid={self.pid} {join_host(self.ip, self.port)}"


@dataclass(frozen=True, slots=True)
class Request:
    """Represents one message to one storage unit."""

    unit: int
    kind: Any
    body: dict[str, Any]


class UnitLink:
    """Sends requests to the storage units over pooled sockets. When a connection breaks, the wait for an answer ends at
    once. Thread-safe."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self._closed = False
        self._of_parents: list[Any] = []
        """Sockets that belong to the processes from which this one was forked. To close them here could hang."""
        self._begin()
        renew_in_forks(self, UnitLink._renew)

    def _begin(self) -> None:
        # This is the context that the process shares. A separate context that is garbage-collected with open sockets
        # would wait for them forever.
        self._context = zmq.Context.instance()
        self._idle: list[list[tuple[zmq.Socket, zmq.Socket]]] = [[] for _ in self.units]
        self._lock = threading.Lock()
        # The idle sockets are closed even if `close` is never called.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def _renew(self) -> None:
        self._finalizer.detach()
        self._of_parents.append((self._context, self._idle))
        self._begin()

    def exchange(self, op: str, requests: Sequence[Request], timeout_s: float) -> list[ZMQMessage]:
        """Send all requests to their storage units, then wait for all answers. Raises StoreLost naming the unit whose
        connection breaks or that is silent for SILENT_S seconds, and DataPlaneTimeout if the time limit passes
        first."""
        started = time.monotonic()
        with self._sockets([request.unit for request in requests]) as sockets:
            for request, (channel, _) in zip(requests, sockets, strict=True):
                message = ZMQMessage.create(
                    request_type=request.kind,
                    sender_id=_IDENTITY,
                    receiver_id=self.units[request.unit].unit_id,
                    body=request.body,
                )
                channel.send_multipart(message.serialize(), copy=False)
            return [
                self._receive(op, self.units[request.unit], pair, started, timeout_s)
                for request, pair in zip(requests, sockets, strict=True)
            ]

    def _receive(
        self, op: str, unit: Unit, pair: tuple[zmq.Socket, zmq.Socket], started: float, timeout_s: float
    ) -> ZMQMessage:
        channel, monitor = pair
        poller = zmq.Poller()
        poller.register(channel, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        remaining = max(0.0, started + timeout_s - time.monotonic())
        ready = dict(poller.poll(int(remaining * 1000)))
        if channel not in ready:
            if monitor not in ready:
                raise unanswered("the storage unit", op, unit.peer, started)
            elapsed = time.monotonic() - started
            raise StoreLost("storage unit is lost: connection broke", op=op, peer=unit.peer, elapsed_s=elapsed)
        reply = ZMQMessage.deserialize(channel.recv_multipart(copy=False))
        if reply.sender_id != unit.unit_id:
            raise StoreLost(f"the answer came from {reply.sender_id}, not from this unit", op=op, peer=unit.peer)
        return reply

    @contextmanager
    def _sockets(self, units: Sequence[int]) -> Iterator[list[tuple[zmq.Socket, zmq.Socket]]]:
        """Lend a socket and its connection monitor for each storage unit. They are closed after an error, so that a
        late answer is not taken for the answer to another request."""
        if self._closed:
            raise StoreLost("this client is closed", op="connect", peer=self.units[0].peer)
        pairs = []
        healthy = False
        try:
            for unit in units:
                pairs.append(self._take(unit))
            yield pairs
            healthy = True
        finally:
            with self._lock:
                keep = healthy and not self._closed
                if keep:
                    for unit, pair in zip(units, pairs, strict=True):
                        self._idle[unit].append(pair)
            if not keep:
                _close_all([pairs])

    def _take(self, unit: int) -> tuple[zmq.Socket, zmq.Socket]:
        while True:
            with self._lock:
                pair = self._idle[unit].pop() if self._idle[unit] else None
            if pair is None:
                return self._connect(self.units[unit])
            if pair[1].poll(0) == 0:
                return pair
            _close_all([[pair]])  # The connection broke while it was idle.

    def _connect(self, unit: Unit) -> tuple[zmq.Socket, zmq.Socket]:
        identity = f"{_IDENTITY}_{os.getpid()}_{uuid.uuid4().hex[:12]}".encode()
        channel = create_zmq_socket(self._context, zmq.DEALER, unit.ip, identity)
        channel.setsockopt(zmq.LINGER, 0)
        # The event CLOSED means that the connection was refused. The unit was listening when its address was handed
        # out, so it has ended.
        monitor = channel.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        channel.connect(format_zmq_address(unit.ip, unit.port))
        return channel, monitor

    def close(self) -> None:
        """Close idle sockets now, and each socket in use as soon as its request is over. Idempotent."""
        with self._lock:
            self._closed = True
            _close_all(self._idle)


def _close_all(pools: Sequence[list[tuple[zmq.Socket, zmq.Socket]]]) -> None:
    for pairs in pools:
        while pairs:
            channel, monitor = pairs.pop()
            channel.disable_monitor()
            monitor.close(linger=0)
            channel.close(linger=0)


def _prepare_unit(unit: Any) -> int:
    """Prepare this process to be a storage unit, and return its pid.

    It keeps freed memory for reuse, has short garbage collections, and ends with its raylet.
    """
    end_with_parent()
    keep_freed_memory()
    # Imported objects stay in memory. Collecting them all would delay a put by tens of milliseconds.
    gc.freeze()
    return os.getpid()


def _own_address(own: Listening) -> str:
    """Return the address at which a unit on this host listens; Ray's in a run on one host, too."""
    return ray_address() if own.one_host else own.address()


def _free_port(own: Listening, ip: str) -> int:
    """Return a port at the address `ip` that is free now and belongs to the run's range. Called in a unit."""
    own.adopt()
    with listen(ip) as listener:
        return listener.getsockname()[1]


class SimpleHost(CountingHost):
    """Starts and ends the storage units (TransferQueue's processes). Called from one thread of the directory's
    process."""

    def __init__(self, run_id: str, num_units: int, capacity_bytes: int) -> None:
        """Raise ValueError if Ray is not initialised, and StoreLost if a unit does not start within START_TIMEOUT_S."""
        if not ray.is_initialized():
            raise ValueError("dataplane.store.kind='simple' needs Ray: call ray.init() first, or use 'local' or 'shm'")
        self._uncommitted: deque[int] = deque(maxlen=256)
        config = {"total_storage_size": None, "num_data_storage_units": num_units}
        names = [f"headrace-{run_id}-unit-{number}" for number in range(num_units)]
        # The unit's class is shipped together with these two functions, as with the constant above.
        tq_storage.get_node_ip_address = partial(_own_address, listening())
        tq_storage.get_free_port = partial(_free_port, listening())
        self._actors: list[Any] = [
            tq_storage.SimpleStorageUnit.options(name=name, namespace=NAMESPACE, num_cpus=0).remote(config)  # type: ignore[attr-defined]
            for name in names
        ]
        started = time.monotonic()
        units = []
        for actor, name in zip(self._actors, names, strict=True):
            try:
                info = actor.get_zmq_server_info.remote().future().result(START_TIMEOUT_S)
                pid = actor.__ray_call__.remote(_prepare_unit).future().result(START_TIMEOUT_S)
            except (RayError, FutureTimeout) as error:
                self._end([])
                elapsed = time.monotonic() - started
                raise StoreLost(
                    f"storage unit did not start: {error}", op="start", peer=name, elapsed_s=elapsed
                ) from None
            units.append(Unit(info.id, name, pid, info.ip, info.ports["put_get_socket"]))
        self._link = UnitLink(units)
        super().__init__([f"storage unit {unit.peer}" for unit in units], capacity_bytes)
        address: dict[str, object] = {
            "units": [[unit.unit_id, unit.name, unit.pid, unit.ip, unit.port] for unit in units]
        }
        self.spec = StoreSpec(kind="simple", run_id=run_id, address=address)

    def free_many(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Delete these blocks from the storage units, with one round trip to each, about a millisecond. Idempotent.

        A block that was never committed may still be on its way to its storage unit, so it is deleted again together
        with later blocks. If a storage unit does not answer, its blocks are remembered and sent to it again with the
        next call, unless it is dead.
        """
        for block_id in self._uncommitted:
            self._unfreed.add(block_id % len(self._link.units), block_id, 0)
        for block_id, location in blocks:
            nbytes = self._bytes.pop(block_id, None)
            if nbytes is not None and not location:
                self._uncommitted.append(block_id)
            self._unfreed.add(block_id % len(self._link.units), block_id, nbytes or 0)
        self._deliver()

    def _deliver(self) -> None:
        for unit, block_ids in self._unfreed.waiting():
            try:
                request = Request(unit, ZMQRequestType.CLEAR_DATA, {"global_indexes": block_ids})
                (reply,) = self._link.exchange("clear", [request], self._unfreed.timeout_s(unit))
                if reply.request_type != ZMQRequestType.CLEAR_DATA_RESPONSE:
                    raise StoreLost(str(reply.body.get("message")), op="clear", peer=self._link.units[unit].peer)
            except (StoreLost, DataPlaneTimeout) as error:
                self._undelivered(unit, error, dead=has_died(self._actors[unit]))
            else:
                self._unfreed.delivered(unit, block_ids)

    def _death(self, peer: int) -> Exception | None:
        return StoreLost("Ray reports that the actor has died") if has_died(self._actors[peer]) else None

    def processes(self) -> dict[str, int]:
        """Return the pids of the storage units on this node, by name."""
        here = _own_address(listening()) if ray.is_initialized() else ""
        return {unit.name: unit.pid for unit in self._link.units if unit.ip == here}

    def close(self) -> None:
        """Kill the storage units. Those on this node have ended when this returns. Idempotent."""
        self._link.close()
        self._end(list(self.processes().values()))

    def _end(self, local_pids: Sequence[int]) -> None:
        actors, self._actors = self._actors, []
        if actors:
            end_actors(actors, local_pids)


class SimpleStore(PutsAll):
    """Reads and writes blocks in the storage units over TCP, from any process that can reach them; needs no Ray.
    Thread-safe."""

    def __init__(self, spec: StoreSpec) -> None:
        keep_freed_memory()
        units: Any = spec.address["units"]
        self._link = UnitLink([Unit(*unit) for unit in units])

    @property
    def holders(self) -> list[str]:
        """Names of the storage units; see `NamesHolders`."""
        return [unit.peer for unit in self._link.units]

    def put_many(self, first_block_id: int, blocks: Sequence[BlockPieces], timeout_s: float) -> tuple[bytes, ...]:
        """Send each storage unit its blocks, and return once the units hold them. Blocks with equally many parts travel
        in one message. Parts that are contiguous in memory are sent without a copy."""
        together: dict[tuple[int, int], list[int]] = {}
        for number, block in enumerate(blocks):
            unit = (first_block_id + number) % len(self._link.units)
            together.setdefault((unit, len(block)), []).append(number)
        requests = []
        for (unit, _), numbers in together.items():
            columns = zip(*(blocks[number] for number in numbers), strict=True)
            data = {str(part): [joined(pieces) for pieces in column] for part, column in enumerate(columns)}
            body = {"global_indexes": [first_block_id + number for number in numbers], "data": data}
            requests.append(Request(unit, ZMQRequestType.PUT_DATA, body))
        for request, reply in zip(requests, self._link.exchange("put", requests, timeout_s), strict=True):
            if reply.request_type != ZMQRequestType.PUT_DATA_RESPONSE:
                raise StoreLost(str(reply.body.get("message")), op="put", peer=self._link.units[request.unit].peer)
        return tuple(
            ((first_block_id + number) % len(self._link.units)).to_bytes(HOLDER_BYTES) for number in range(len(blocks))
        )

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        """Return the wanted parts as views of the received messages. Blocks in the same storage unit from which the
        same parts are wanted are fetched with one request."""
        together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for position, want in enumerate(wants):
            unit = want.block.block_id % len(self._link.units)
            together.setdefault((unit, want.parts), []).append(position)
        requests = []
        for (unit, parts), positions in together.items():
            block_ids = [wants[position].block.block_id for position in positions]
            body = {"global_indexes": block_ids, "fields": [str(part) for part in parts]}
            requests.append(Request(unit, ZMQRequestType.GET_DATA, body))
        replies = self._link.exchange("get", requests, timeout_s)
        found: list[dict[int, np.ndarray]] = [{} for _ in wants]
        for (unit, parts), positions, reply in zip(together, together.values(), replies, strict=True):
            peer = self._link.units[unit].peer
            columns = self._columns(reply, peer)
            for part in parts:
                for position, view in zip(positions, columns[str(part)], strict=True):
                    found[position][part] = received_part(view, wants[position], part, peer)
        return found

    def settle(self, wants: Sequence[Want]) -> None:
        """No-op: `get` has already copied the data into this process's memory, so it cannot have changed."""

    def close(self) -> None:
        """Close the sockets. The storage units continue."""
        self._link.close()

    def _columns(self, reply: ZMQMessage, peer: str) -> dict[str, list[Any]]:
        if reply.request_type == ZMQRequestType.GET_DATA_RESPONSE:
            return reply.body["data"]
        message = str(reply.body.get("message"))
        if tq_storage.KEY_NOT_FOUND_MARKER in message:
            raise RowsCleared(f"a block was freed: {message}", op="get", peer=peer)
        raise StoreLost(message, op="get", peer=peer)


def _open_host(config: StoreConfig, run_id: str, host: str) -> SimpleHost:
    return SimpleHost(run_id, config.num_units or 1, config.capacity_mib << 20)


STORE = StoreEntry(_open_host, lambda spec, link: SimpleStore(spec))
