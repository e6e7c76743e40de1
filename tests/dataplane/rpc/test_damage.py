"""Bytes that change on the way, between a client and the directory or a storage unit, are told as such."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.directory import requests
from headrace.dataplane.errors import DataPlaneError, DirectoryLost, IntegrityError, StoreLost
from headrace.dataplane.factory import DataPlane, connect, connect_async, open_data_plane
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.rpc.frames import HEADER_BYTES, frame
from headrace.dataplane.security.handshake import CHALLENGE_BYTES, HELLO_BYTES, PROOF_BYTES

pytestmark = pytest.mark.processes
SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("reward", Kind.PER_SAMPLE, torch.float32)])
IDS = [torch.arange(number, 1000 + number, dtype=torch.int32) for number in range(8)]
KEYS = [f"k.{number}" for number in range(8)]
HANDSHAKE = {"up": HELLO_BYTES + PROOF_BYTES, "down": CHALLENGE_BYTES}


class Relay:
    """A network between a client and a port, which changes one byte after the handshake, or puts bytes before it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.target = address
        """Address of the port behind the network."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.flip: tuple[str, int] | None = None
        """Direction and offset of a byte that is to change; None once it has changed."""
        self.reply_before = b""
        """Bytes that come before the next reply."""
        self.recorded = {"up": bytearray(), "down": bytearray()}
        """All bytes that came by, in each direction."""
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self.target)
                threading.Thread(target=self._copy, args=(near, far, "up"), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, "down"), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        seen = -HANDSHAKE[direction]
        with contextlib.suppress(OSError), sink:
            while data := bytearray(source.recv(1 << 16)):
                if self.flip and self.flip[0] == direction and seen <= self.flip[1] < seen + len(data):
                    data[self.flip[1] - seen] ^= 0x40
                    self.flip = None
                if direction == "down" and seen >= 0 and self.reply_before:
                    data[:0], self.reply_before = self.reply_before, b""
                seen += len(data)
                self.recorded[direction] += data
                sink.sendall(data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # This ends the thread's wait, which closing alone does not.
        self._listener.close()
        self._accepting.join(10)


@pytest.fixture(scope="module", params=["auto", "off"])
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlane]:
    config = DataPlaneConfig.model_validate(
        {"store": {"kind": "tcp", "capacity_mib": 8}, "integrity": request.param, "timeout_s": 3.0}
    )
    with open_data_plane(config, process=True, listen="127.0.0.1") as plane:
        with connect(plane.handle) as client:
            client.register("p", SCHEMA, ("a",))
        yield plane


def put(client: DataPlaneClient) -> None:
    client.put("p", KEYS, {"ids": IDS, "reward": torch.ones(8)})


def get(client: DataPlaneClient) -> None:
    found = client.get_keys("p", KEYS, ["ids", "reward"])
    assert torch.equal(found.jagged("ids").values, torch.cat(IDS)), "wrong bytes, and no error"


@contextlib.contextmanager
def over(plane: DataPlane, *, unit: bool) -> Iterator[tuple[Relay, DataPlaneHandle]]:
    """A handle whose clients reach the unit, or the directory, through a relay, and use sockets for all."""
    handle, address = plane.handle.over_sockets(), plane.handle.address
    assert address is not None
    [known] = handle.store.address["units"]  # type: ignore[misc]
    relay = Relay((known[2], known[3]) if unit else (address.host, address.port))
    host, port = relay.address
    if unit:
        units = {**handle.store.address, "units": [(*known[:2], host, port, *known[4:])]}
        handle = dataclasses.replace(handle, store=dataclasses.replace(handle.store, address=units))
    else:
        handle = dataclasses.replace(handle, address=dataclasses.replace(address, local="none", host=host, port=port))
    try:
        yield relay, handle
    finally:
        relay.close()
        with connect(plane.handle) as client:
            client.clear("p")


LATE = HEADER_BYTES + len("put") + 200
"""Offset of a byte of a put's rows, and of the reply to a get."""


@pytest.mark.parametrize("offset", [0, 8, 12, 14, 30, 60, LATE, 5000])
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("does", [put, get])
def test_a_byte_that_changes_on_the_way_to_or_from_a_unit(
    plane: DataPlane, does: Callable[[DataPlaneClient], None], direction: str, offset: int
) -> None:
    unchecked = HEADER_BYTES + len("done") if (does, direction) == (get, "down") else 100
    if plane.handle.config.integrity == "off" and offset > unchecked:
        pytest.skip("bytes of rows are not checked")
    with over(plane, unit=True) as (relay, handle), connect(handle) as client, connect(plane.handle) as good:
        if does is get:
            put(good)
        relay.flip = direction, offset
        try:
            does(client)
        except DataPlaneError as error:
            assert isinstance(error, StoreLost | IntegrityError) and "damaged on the way" in str(error), error
            if does is get:
                assert "'k.0'" in str(error), "its keys are named"
            assert relay.flip is None
        else:
            assert relay.flip is not None, "the message is shorter, and nothing changed"
            put(good) if does is put and good.status().rows == 0 else None
            get(good)
        if does is put:
            assert good.status().rows in (0, 8)


@pytest.mark.parametrize("offset", [2, 8, 20, 25])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_byte_that_changes_on_the_way_to_or_from_the_directory(plane: DataPlane, direction: str, offset: int) -> None:
    with over(plane, unit=False) as (relay, handle), connect(handle) as client:
        relay.flip = direction, offset
        with pytest.raises(DirectoryLost, match=r"damaged on the way.*op=(describe|store)"):
            put(client)
        put(client)
        get(client)

    async def use(handle: DataPlaneHandle, relay: Relay) -> None:
        async with connect_async(handle) as client:
            relay.flip = direction, offset
            with pytest.raises(DirectoryLost, match=r"damaged on the way.*op=status"):
                await client.status()
            assert (await client.status()).rows == 0

    with over(plane, unit=False) as (relay, handle):
        asyncio.run(use(handle, relay))


def test_a_reply_to_another_request_is_none(plane: DataPlane) -> None:
    """A whole reply with the number of another request, such as one that comes late, is not taken for the reply."""
    late = frame(99, requests.reply(b""))

    async def use(handle: DataPlaneHandle, relay: Relay) -> None:
        async with connect_async(handle) as client:
            relay.reply_before = late
            with pytest.raises(DirectoryLost, match=r"number 99 of another request.*op=status"):
                await client.status()
            assert (await client.status()).rows == 0

    with over(plane, unit=False) as (relay, handle):
        with connect(handle) as client:
            relay.reply_before = late
            with pytest.raises(DirectoryLost, match="the number 99 of another request|damaged on the way"):
                client.status()
            assert client.status().rows == 0
        asyncio.run(use(handle, relay))
