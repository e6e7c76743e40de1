"""Baselines that move bytes without knowing rows: memcpy, one raw TCP stream, and zmq with a frame per field.

memcpy copies the same bytes within one process, into memory that is already in use; no contender can be faster. The
other two keep the bytes in a server in one of the benchmark's processes, and connect to it, by default over loopback.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
import xxhash
from tensordict import TensorDict

from ...codecs.batch import Jagged, Ragged
from ...codecs.memory import as_bytes
from .contenders import BYTE_OPS, BYTES, Digests, Endpoint, Op, Share
from .workloads import Load, LoadSpec


def parts_of(load: Load) -> list[np.ndarray]:
    """Return the values of each field of the workload's first put as a 1-D uint8 array. The array is the column's own
    memory. A column of objects is packed with msgpack."""
    parts = []
    for name in load.first:
        column = load.batch[name]
        if isinstance(column, list):
            parts.append(np.frombuffer(msgspec.msgpack.encode(column), np.uint8))
        else:
            values = column.values if isinstance(column, Jagged | Ragged) else column
            parts.append(as_bytes(values if isinstance(values, torch.Tensor) else torch.as_tensor(values)))
    return parts


def slices(parts: list[np.ndarray], share: Share) -> list[np.ndarray]:
    """Return the piece of each field's bytes that belongs to a reader's share."""
    ranges = [share.byte_range(len(part)) for part in parts]
    return [part[start:stop] for part, (start, stop) in zip(parts, ranges, strict=True)]


def digest(pieces: list[np.ndarray]) -> Digests:
    """Compute one xxh3 digest over all pieces in order."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece.data)
    return {BYTES: np.array([state.intdigest()], np.uint64)}


class MemcpyEndpoint:
    """The memcpy baseline in a worker process. The warm-up touches its buffers before times are measured."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._target: list[np.ndarray] = []
        self._sources: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> tuple[int, ...]:
        if not self._parts:
            self._parts = parts_of(load)
            self._target = [np.ones_like(part) for part in self._parts]
        for target, part in zip(self._target, self._parts, strict=True):
            np.copyto(target, part)
        return tuple(len(part) for part in self._parts)

    def get(self, token: tuple[int, ...], share: Share, fields: Sequence[str] | None) -> list[np.ndarray]:
        """Copy as many bytes within this process as a reader's share has. The source holds a known pattern, so that
        `expected` can compute the digests of a correct copy."""
        if share.count not in self._sources:
            sources = _pattern(token, share)
            self._sources[share.count] = sources, [np.ones_like(piece) for piece in sources]
        sources, targets = self._sources[share.count]
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        return targets

    def expected(self, load: Load, share: Share) -> Digests:
        return digest(_pattern(tuple(len(part) for part in parts_of(load)), share))

    def fingerprint(self, got: list[np.ndarray]) -> Digests:
        return digest(got)

    def close(self) -> None:
        self._parts, self._target, self._sources = [], [], {}


def _pattern(sizes: tuple[int, ...], share: Share) -> list[np.ndarray]:
    pieces = slices([np.broadcast_to(np.uint8(0), size) for size in sizes], share)
    return [np.resize(np.arange(251, dtype=np.uint8), len(piece)) for piece in pieces]


class Server(Protocol):
    """A server that runs in its own thread from its creation on."""

    address: tuple[str, int]

    def close(self) -> None:
        """End the server's thread. Idempotent."""
        ...


class Host(Protocol):
    """A process that can run the servers of baselines."""

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        """Start a server in the benchmark's serving process, and return its address."""
        ...

    def stop(self, name: str) -> None:
        """End the server `name`."""
        ...


class PlainContender:
    """The driver's side of a baseline that consists only of endpoints in worker processes. It starts nothing."""

    ops: frozenset[Op] = BYTE_OPS

    def __init__(self, name: str, endpoint: Callable[[], Endpoint]) -> None:
        self.name = name
        self._endpoint = endpoint

    def factory(self, spec: LoadSpec) -> Callable[[], Endpoint]:
        return self._endpoint

    def part(self, token: Any, share: Share) -> Any:
        return token

    def close(self) -> None:
        """End everything that was started, which is nothing by default. Idempotent."""


class ServedContender(PlainContender):
    """The driver's side of a baseline with a server. It starts the server and gives its address to the endpoints."""

    def __init__(
        self, name: str, host: Host, start: Callable[[], Server], endpoint: Callable[[tuple[str, int]], Endpoint]
    ) -> None:
        super().__init__(name, functools.partial(endpoint, host.serve(name, start)))
        self._host = host

    def close(self) -> None:
        self._host.stop(self.name)


TIMEOUT_S = 60.0
_PUT, _GET = 0, 1
_REQUEST = struct.Struct("<BQQ")
"""Format of a request: kind, start and stop."""


class TcpServer:
    """Keeps the last stream that it received, and sends ranges of its bytes. Each connection has a thread."""

    def __init__(self, host: str = "127.0.0.1", buffer_bytes: int = 0) -> None:
        """Listen at a free port of the IP address `host`. buffer_bytes: as for `TcpEndpoint`."""
        self._buffer_bytes = buffer_bytes
        self._listener = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._held = np.empty(0, np.uint8)
        threading.Thread(target=self._accept, name="tcp-baseline", daemon=True).start()

    def close(self) -> None:
        self._held = np.empty(0, np.uint8)
        try:
            # The shutdown wakes accept; a close alone would leave it waiting.
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # The server was closed already.
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # The listener was closed.
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        _set_up(connection, self._buffer_bytes)
        request = bytearray(_REQUEST.size)
        with connection:
            while _receive(connection, memoryview(request)):
                kind, start, stop = _REQUEST.unpack(request)
                if kind == _GET:
                    connection.sendall(self._held[start:stop].data)
                    continue
                if len(self._held) != stop:  # A put of equal size reuses the memory of the last put.
                    self._held = np.ones(stop, np.uint8)
                _receive(connection, self._held.data)
                connection.sendall(b"\1")


class TcpEndpoint:
    """The TCP baseline in a worker process, with one connection to the server."""

    def __init__(self, address: tuple[str, int], buffer_bytes: int = 0) -> None:
        """buffer_bytes: size of the kernel's buffers of the connection; 0 leaves it to the kernel."""
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S)
        _set_up(self._socket, buffer_bytes)
        self._parts: list[np.ndarray] = []
        self._buffer = np.empty(0, np.uint8)

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> int:
        self._parts = self._parts or parts_of(load)
        return self.send(self._parts)

    def send(self, parts: Sequence[np.ndarray]) -> int:
        """Put arrays of bytes, end to end, and return their number of bytes."""
        nbytes = sum(map(len, parts))
        self._socket.sendall(_REQUEST.pack(_PUT, 0, nbytes))
        for part in parts:
            self._socket.sendall(part.data)
        if self._socket.recv(1) != b"\1":
            raise ConnectionError("the TCP baseline's server closed the connection")
        return nbytes

    def get(self, token: int, share: Share, fields: Sequence[str] | None) -> np.ndarray:
        return self.read(*share.byte_range(token))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Get a range of the bytes that were put last, into memory that the next call of equal size uses again."""
        if len(self._buffer) != stop - start:
            self._buffer = np.ones(stop - start, np.uint8)
        self._socket.sendall(_REQUEST.pack(_GET, start, stop))
        if not _receive(self._socket, self._buffer.data):
            raise ConnectionError("the TCP baseline's server closed the connection")
        return self._buffer

    def expected(self, load: Load, share: Share) -> Digests:
        joined = np.concatenate(parts_of(load))
        start, stop = share.byte_range(len(joined))
        return digest([joined[start:stop]])

    def fingerprint(self, got: np.ndarray) -> Digests:
        return digest([got])

    def close(self) -> None:
        self._socket.close()
        self._parts, self._buffer = [], np.empty(0, np.uint8)


def _set_up(connection: socket.socket, buffer_bytes: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer_bytes else ():
        connection.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill `into` with received bytes. Returns False if the other side has closed the connection."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if not count:
            return False
        at += count
    return True


TIMEOUT_MS = 60_000
POLL_MS = 200
_PUT_FRAME, _ACK_FRAME = b"put", b"ack"


class ZmqServer:
    """Keeps the frames of the last message that it received, and sends pieces of these frames."""

    def __init__(self) -> None:
        import zmq  # Headrace does not depend on zmq. Without it, only this baseline is absent.

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address: tuple[str, int] = ("127.0.0.1", int(port))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="zmq-baseline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)

    def _serve(self) -> None:
        held: list[Any] = []
        while not self._closed.is_set():
            if not self._socket.poll(POLL_MS):
                continue
            request = self._socket.recv_multipart(copy=False)
            if request[0].bytes == _PUT_FRAME:
                held = request[1:]
                self._socket.send(_ACK_FRAME)
                continue
            share = Share(int(request[0].bytes), int(request[1].bytes), np.empty(0, np.int64))
            pieces = slices([np.frombuffer(frame.buffer, np.uint8) for frame in held], share)
            self._socket.send_multipart([piece.data for piece in pieces], copy=False)
        self._socket.close()
        self._context.term()


class ZmqEndpoint:
    """The ZeroMQ baseline in a worker process, with one REQ socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.rcvtimeo = self._socket.sndtimeo = TIMEOUT_MS
        self._socket.connect(f"tcp://{address[0]}:{address[1]}")
        self._parts: list[np.ndarray] = []

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> None:
        self._parts = self._parts or parts_of(load)
        self._socket.send_multipart([_PUT_FRAME, *[part.data for part in self._parts]], copy=False)
        assert self._socket.recv() == _ACK_FRAME

    def get(self, token: None, share: Share, fields: Sequence[str] | None) -> list[np.ndarray]:
        """Request the share's pieces and return views of the received frames."""
        self._socket.send_multipart([b"%d" % share.index, b"%d" % share.count])
        frames = self._socket.recv_multipart(copy=False)
        return [np.frombuffer(frame.buffer, np.uint8) for frame in frames]

    def expected(self, load: Load, share: Share) -> Digests:
        return digest(slices(parts_of(load), share))

    def fingerprint(self, got: list[np.ndarray]) -> Digests:
        return digest(got)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._parts = []
