"""The ports that attacks are tried on, each with a real client at work, and the ways in which a stranger uses them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from headrace.actors.weight_sync.transports import control_link
from headrace.actors.weight_sync.transports.control_link import Hello, Link, LinkListener, Note, ReceiverTracker
from headrace.actors.weight_sync.transports.protocol import BucketFrame, ReceiverGroup
from headrace.codecs import messages
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.directory import requests
from headrace.dataplane.errors import ClaimTimeout
from headrace.dataplane.factory import connect
from headrace.dataplane.rpc import frames
from headrace.dataplane.rpc.frames import DirectoryAddress
from headrace.dataplane.security.authenticated_listener import connect_authenticated
from headrace.dataplane.security.handshake import HELLO_BYTES, PROOF_BYTES, new_key
from headrace.dataplane.stores.tcp import wire
from headrace.dataplane.stores.tcp.link import UnitLink
from headrace.dataplane.stores.tcp.unit import StorageUnit
from headrace.testing.data_plane import fresh_run_id
from headrace.tests.dataplane.rpc.served import Served
from headrace.tests.waiting import wait_until

TIMEOUT_S = 30.0
_LAST = (1 << 32) - 1
"""Number of the request that is sent last."""
Address = tuple[str, int]


class AttackedPort(Protocol):
    """A listening port with its service and one real client. A new port needs a class like the two below."""

    @property
    def address(self) -> Address: ...

    @property
    def key(self) -> bytes: ...

    @property
    def service(self) -> str: ...

    def work(self) -> None:
        """Have the real client do something that needs the service, and check that nothing is lost or changed."""
        ...

    def converse(self, address: Address) -> None:
        """Be another real client, with the service behind `address`, which says what clients say."""
        ...

    @property
    def at_once(self) -> int:
        """Number of damaged frames in one connection; 1 where the first one ends it."""
        ...

    def split(self, sent: bytes) -> list[tuple[bytes, bytes]]:
        """Cut what a client sent after the handshake into its frames, each as (header, body)."""
        ...

    def framed(self, header: bytes, body: bytes) -> bytes:
        """Return a frame with this body and this header, in which the length is put right."""
        ...

    def settle(self, connection: socket.socket) -> None:
        """Wait until all that was sent over the connection of a member is handled, or the connection is closed."""
        ...

    def num_strangers(self) -> int:
        """Number of connections that have not proved that they know the key."""
        ...

    def close(self) -> None: ...


class DirectoryPort:
    """The directory's TCP port, as clients on other hosts use it."""

    service = frames.SERVICE
    at_once = 25
    _schema = Schema([Field("ids", Kind.PER_TOKEN, torch.int32)])
    _kept = {f"kept.{n}": torch.arange(n, 100 + n, dtype=torch.int32) for n in range(64)}

    def __init__(self) -> None:
        self._served = Served(lease_s=600.0)
        self.key = self._served.handle.store.key
        self.address = (self._served.address.host, self._served.address.port)
        self._client = connect(self._handle(self.address))
        self._client.register("kept", self._schema)
        self._client.put("kept", list(self._kept), {"ids": list(self._kept.values())})
        self._count = itertools.count()
        self.num_replies = 0
        """Replies that members got whose frames are damaged."""

    def _handle(self, address: Address):
        at = DirectoryAddress("no socket of this name, so that TCP is used", *address)
        return dataclasses.replace(self._served.handle, address=at)

    def work(self) -> None:
        key, ids = f"new.{next(self._count)}", torch.arange(50, dtype=torch.int32)
        self._client.put("kept", [key], {"ids": [ids]})
        batch = self._client.get_keys("kept", [*self._kept, key], ["ids"]).jagged("ids")
        rows = torch.split(batch.values, batch.lengths.tolist())
        assert all(torch.equal(*pair) for pair in zip(rows, [*self._kept.values(), ids], strict=True))
        self._client.clear("kept", [key])
        partitions = self._client.status().partitions
        assert partitions["kept"] == len(self._kept)
        for name in set(partitions) - {"kept"}:  # what members may store under any name
            self._client.unregister(name)

    def converse(self, address: Address) -> None:
        with connect(self._handle(address), name="converses") as client:
            client.register("fuzzed", self._schema, ["train"], group_size=2)
            put = client.put("fuzzed", ["a.0", "a.1"], {"ids": [torch.arange(5, dtype=torch.int32)] * 2}, versions=1)
            client.lookup("fuzzed", ["a.0"])
            claimed = client.claim("fuzzed", "train", ["ids"], 2, whole_groups=True, timeout_s=5)
            client.get(claimed)
            client.release(claimed, "train", "done")
            with contextlib.suppress(ClaimTimeout):
                client.claim("fuzzed", "train", ["ids"], 2, timeout_s=0.01)
            client.status()
            client.clear("fuzzed", put.keys)
            client.unregister("fuzzed")

    def split(self, sent: bytes) -> list[tuple[bytes, bytes]]:
        return split_frames(sent)

    def framed(self, header: bytes, body: bytes) -> bytes:
        return reframed(header, body)

    def settle(self, connection: socket.socket) -> None:
        send(connection, frames.frame(_LAST, messages.encode(requests.Status(None)), "status"))
        reader = frames.FrameReader()
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                replies = reader.feed(data)
                self.num_replies += len(replies)
                if any(number == _LAST for number, _, _ in replies):
                    return

    def num_strangers(self) -> int:
        return len(self._served.server._strangers)

    def close(self) -> None:
        self._client.close()
        self._served.close()


def split_frames(sent: bytes) -> list[tuple[bytes, bytes]]:
    """Cut frames of `rpc/frames.py`, each into its header with the op's name, and its payload."""
    found = []
    while sent:
        nbytes, _, op_bytes, _ = frames.read_header(sent)
        start, end = frames.HEADER_BYTES + op_bytes, frames.HEADER_BYTES + nbytes
        found.append((sent[:start], sent[start:end]))
        sent = sent[end:]
    return found


def reframed(header: bytes, body: bytes, covered: int | None = None) -> bytes:
    """Return a frame with this header and payload, in which the length and the checksums are put right.

    So what is damaged reaches the decoders. covered: bytes of the payload under the checksum; None for all."""
    _, number, op_bytes, _ = frames.read_header(header)
    op = header[frames.HEADER_BYTES :]
    return frames.header(len(op) + len(body), number, op_bytes, frames.digest(op, body[:covered])) + op + body


class UnitPort:
    """The port of a storage unit of the store `tcp`."""

    service = wire.SERVICE
    at_once = 1
    _kept = bytes(range(64)) * 100

    def __init__(self) -> None:
        self.key = new_key()
        self._unit = StorageUnit(fresh_run_id(), "unit-0", self.key, "127.0.0.1", 4 << 20)
        self.address = (self._unit.address.host, self._unit.address.port)
        self._link = UnitLink(self._unit.address, self.key)
        self._put(self._link, 1, self._kept)
        self._count = itertools.count(1 << 40)

    def _put(self, link: UnitLink, block_id: int, data: bytes) -> None:
        request = wire.encode(wire.Put(block_id, (len(data),), 0.0))
        link.ask("put", "put", request, [memoryview(data)], time.monotonic() + TIMEOUT_S)

    def _get(self, link: UnitLink, block_id: int, nbytes: int) -> bytes:
        column = wire.column
        request = wire.Get(column([block_id]), column([0]), column([0]), column([nbytes]))
        head, deadline = wire.encode(request), time.monotonic() + TIMEOUT_S
        with link.answer(link.send("get", "get", head, (), deadline)) as (connection, _, raw_bytes):
            data = bytearray(raw_bytes)
            connection.receive_into([memoryview(data)], deadline)
        return bytes(data[: -wire.ENDING.size])

    def _free(self, link: UnitLink, block_ids: list[int]) -> None:
        request = wire.encode(wire.Free(wire.column(block_ids)))
        link.ask("clear", "free", request, (), time.monotonic() + TIMEOUT_S)

    def work(self) -> None:
        block_id = next(self._count)
        for other in set(self._unit._pool._held) - {1}:  # what members may store under any id
            self._free(self._link, [other])
        if not self._unit._pool.holds(1):  # a member may have deleted it
            self._put(self._link, 1, self._kept)
        self._put(self._link, block_id, bytes(640))
        assert self._get(self._link, block_id, 640) == bytes(640)
        assert self._get(self._link, 1, len(self._kept)) == self._kept
        self._free(self._link, [block_id])

    def converse(self, address: Address) -> None:
        near = dataclasses.replace(self._unit.address, host=address[0], port=address[1])
        link = UnitLink(near, self.key)
        self._put(link, 7, bytes(128))
        self._get(link, 7, 100)
        reserve = wire.encode(wire.Reserve(8, 128, 0.0))
        link.ask("put", "reserve", reserve, (), time.monotonic() + TIMEOUT_S)
        link.ask("put", "cut", wire.encode(wire.Cut(8, (64,))), (), time.monotonic() + TIMEOUT_S)
        self._free(link, [7, 8])
        link.close()

    def split(self, sent: bytes) -> list[tuple[bytes, bytes]]:
        return split_frames(sent)

    def framed(self, header: bytes, body: bytes) -> bytes:
        return reframed(header, body, 4 + int.from_bytes(body[:4], "little"))  # the head, without what follows it

    def settle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # refused already
            connection.shutdown(socket.SHUT_WR)
            received(connection)

    def num_strangers(self) -> int:
        return len(self._unit._listener._strangers)

    def close(self) -> None:
        self._link.close()
        self._unit.close()


class WeightsPort:
    """The control port of a sender of weights, which looks at its receivers all the time."""

    service = control_link.SERVICE
    at_once = 1

    def __init__(self) -> None:
        self.key = new_key()
        self._listener = LinkListener("127.0.0.1", self.key)
        self.address = ("127.0.0.1", self._listener.port)
        self._tracker = ReceiverTracker(1, [ReceiverGroup("engine", 2)], self._listener, 10.0)
        self._ended = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        self._link = Link.connect(*self.address, self.key, TIMEOUT_S)
        self._link.send(Hello(1, 1, ""))
        wait_until(lambda: 1 in self._tracker.groups)
        self._count = itertools.count()

    def _look(self) -> None:
        try:
            while not self._ended.wait(0.0005):
                self._tracker.poll()
        except BaseException as error:
            self._failed.append(error)

    def work(self) -> None:
        assert not self._failed, self._failed
        bucket = next(self._count)
        self._link.send(Note("through", number=bucket))
        wait_until(lambda: self._tracker.through[1] == bucket)
        sent = Note("frame", frame=BucketFrame(bucket, "whole", 1 << 20, bucket))
        self._tracker.tell(sent)
        assert self._link.receive(Note, TIMEOUT_S) == sent
        assert 1 not in self._tracker.failed and 1 not in self._tracker.gave_up | self._tracker.done

    def converse(self, address: Address) -> None:
        link = Link.connect(*address, self.key, TIMEOUT_S)
        link.send(Hello(1, 2, "group"))
        for note in (Note("through", number=3), Note("failed", "text"), Note("done"), Note("gave up")):
            link.send(note)
        link.close()

    def split(self, sent: bytes) -> list[tuple[bytes, bytes]]:
        found = []
        while sent:
            (length,) = struct.unpack_from("<I", sent)
            found.append((sent[:4], sent[4 : 4 + length]))
            sent = sent[4 + length :]
        return found

    def framed(self, header: bytes, body: bytes) -> bytes:
        return struct.pack("<I", len(body)) + body

    def settle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # refused already
            connection.shutdown(socket.SHUT_WR)
            received(connection)

    def num_strangers(self) -> int:
        return len(self._listener._listener._strangers)

    def close(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)
        self._tracker.close()
        self._link.close()
        self._listener.close()


PORTS: dict[str, Callable[[], AttackedPort]] = {
    "directory": DirectoryPort,
    "storage unit": UnitPort,
    "weights": WeightsPort,
}


def recorded(port: AttackedPort) -> bytes:
    """Return all that a client sends in one connection, with the handshake, as the network sees it."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        between.settimeout(TIMEOUT_S)

        def pass_on() -> None:
            near, _ = between.accept()
            with near, socket.create_connection(port.address) as far:
                back = threading.Thread(target=_copy, args=(far, near, bytearray()))
                back.start()
                _copy(near, far, seen)
                back.join(TIMEOUT_S)

        thread = threading.Thread(target=pass_on)
        thread.start()
        port.converse(between.getsockname())
        thread.join(TIMEOUT_S)
    return bytes(seen)


def _copy(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    with contextlib.suppress(OSError):  # the other direction has ended the connection
        while data := source.recv(1 << 16):
            seen += data
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def frames_of(port: AttackedPort) -> list[tuple[bytes, bytes]]:
    """Return the frames that a real client sends after the handshake, each as (header, body)."""
    found = port.split(recorded(port)[HELLO_BYTES + PROOF_BYTES :])
    assert len(found) >= 3
    return found


@contextlib.contextmanager
def stranger(port: AttackedPort) -> Iterator[socket.socket]:
    """A connection of a client that has not proved anything."""
    with socket.create_connection(port.address, TIMEOUT_S) as connection:
        yield connection


def member(port: AttackedPort) -> socket.socket:
    """A connection of a client that has proved to know the key."""
    return connect_authenticated(*port.address, port.key, port.service, TIMEOUT_S)


def send(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it is refused already
        connection.sendall(data)


def received(connection: socket.socket) -> bytes:
    """All that comes until the other end closes the connection. Raises TimeoutError when it does not."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            data += more
    return bytes(data)
