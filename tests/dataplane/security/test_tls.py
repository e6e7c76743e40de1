"""TLS between the processes of a run: one on the path reads nothing, and what he changes is detected and named."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.errors import DataPlaneError
from headrace.dataplane.factory import DataPlane, connect, open_data_plane
from headrace.dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen
from headrace.dataplane.security.handshake import HandshakeError, new_key, prove_to_server
from headrace.dataplane.security.run_key import RunKey
from headrace.dataplane.security.tls import TlsError, secured
from headrace.tests.dataplane.rpc.test_damage import IDS, SCHEMA, Relay, get, over, put
from headrace.tests.waiting import wait_until

KEY = RunKey.make(new_key(), "", "run", tls=True)
OTHER = RunKey.make(new_key(), "", "run", tls=True)


@contextlib.contextmanager
def served() -> Iterator[tuple[AuthenticatedListener, queue.Queue[socket.socket]]]:
    admitted: queue.Queue[socket.socket] = queue.Queue()
    listener = AuthenticatedListener(listen("127.0.0.1"), KEY, "weights", admitted.put)
    try:
        yield listener, admitted
    finally:
        listener.close()
        while not admitted.empty():
            admitted.get().close()


def pair(served: tuple[AuthenticatedListener, queue.Queue[socket.socket]]) -> tuple[socket.socket, socket.socket]:
    listener, admitted = served
    near = connect_authenticated(listener.host, listener.port, KEY, "weights", 10)
    return near, admitted.get(timeout=10)


def sent(connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left.nbytes:
        left = left[connection.sendmsg([left[:100], left[100:200_000]]) :]


def received(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    left = memoryview(data)
    while left.nbytes:
        pieces = [piece for piece in (left[:1000], left[1000:]) if piece.nbytes]
        left = left[connection.recvmsg_into(pieces)[0] :]
    return bytes(data)


def test_both_ends_send_and_receive_at_once() -> None:
    data = hashlib.shake_128(b"x").digest(1 << 21)
    with served() as one:
        near, far = pair(one)
        with near, far:
            senders = [threading.Thread(target=sent, args=(end, data)) for end in (near, far)]
            found: list[bytes] = []
            readers = [
                threading.Thread(target=lambda end=end: found.append(received(end, len(data)))) for end in (near, far)
            ]
            for thread in (*senders, *readers):
                thread.start()
            for thread in (*senders, *readers):
                thread.join(30)
            assert found == [data, data]
            near.settimeout(0.01)
            with pytest.raises(TimeoutError):
                near.recv(1)
            near.settimeout(10)
            far.shutdown(socket.SHUT_RDWR)
            assert near.recv(1) == b"", "the end of the other end"


def test_who_has_the_handshake_but_no_certificate_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """As one on the path who takes a connection over after its handshake."""
    with served() as (listener, admitted):
        address = listener.host, listener.port
        for key in (OTHER, None):
            taken = socket.create_connection(address, 10)
            prove_to_server(taken, bytes(KEY), "weights", time.monotonic() + 10)
            if key is None:
                taken.sendall(b"\0" * 200)
                with contextlib.suppress(ConnectionError):  # TLS's own word may come before the end.
                    while taken.recv(1 << 10):
                        pass
            else:
                with pytest.raises(TlsError, match=r"the weights at 127.0.0.1:\d+ has no certificate of this run"):
                    secured(taken, key, "weights", time.monotonic() + 10)
            taken.close()
        with pytest.raises(HandshakeError, match="is not the weights of this run"):
            connect_authenticated(*address, OTHER, "weights", 10)
        assert admitted.empty()
        said = re.compile(r"the client at 127.0.0.1:\d+ .*no certificate of (this|its) run")
        wait_until(lambda: said.search(caplog.text) is not None)  # The listener's thread may be behind.


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataPlane]:
    key_file: Path = tmp_path_factory.mktemp("run") / "key"
    config = DataPlaneConfig.model_validate(
        {"store": {"kind": "tcp", "capacity_mib": 8}, "timeout_s": 5.0, "key_file": str(key_file), "tls": True}
    )
    with open_data_plane(config, process=True, listen="127.0.0.1") as plane:
        with connect(plane.handle) as client:
            client.register("p", SCHEMA, ("a",))
        yield plane


def hit(relay: Relay, client: DataPlaneClient, does: Callable[[DataPlaneClient], None]) -> str:
    """Do it while the relay changes a byte, and return the error. Without one, what was read is right (`get`)."""
    try:
        does(client)
    except DataPlaneError as error:
        return str(error)
    return ""  # The server has ended the connection before the request, so another one took its place.


@pytest.mark.processes
@pytest.mark.parametrize("unit", [True, False])
def test_bytes_between_two_hosts_are_neither_read_nor_changed_nor_sent_again(plane: DataPlane, unit: bool) -> None:
    with over(plane, unit=unit) as (relay, handle):
        with connect(handle) as client:
            put(client)
            get(client)
        for recorded in relay.recorded.values():
            assert len(recorded) > 500
            for secret in (IDS[7].numpy().tobytes()[:64], b"reward", b"k.3", bytes(plane.handle.store.key)):
                assert secret not in recorded
        with socket.create_connection(relay.target, 10) as again:  # A recorded connection, sent once more.
            with contextlib.suppress(ConnectionError):
                again.sendall(relay.recorded["up"])
                while again.recv(1 << 16):
                    pass
        with connect(plane.handle) as good:
            assert good.status().rows == 8, "the recorded put was not done again"
        errors = [flipped(plane, relay, handle, where) for where in (("up", 700), ("down", 60), ("down", 300))]
        assert "changed on the way" in errors[1], "within the exchange of certificates"
        with connect(handle) as client:  # Bytes that he makes up, in an open connection.
            client.status()
            get(client)
            relay.reply_before = b"\x17\x03\x03\x00\x20" + b"\0" * 32
            what = hit_by_injection(client)
            peer = "storage unit" if unit else "directory"
            assert f"bytes from the {peer} at 127.0.0.1:{relay.address[1]} were changed on the way" in what, what
        with connect(plane.handle) as good:
            get(good)


def flipped(plane: DataPlane, relay: Relay, handle: object, where: tuple[str, int]) -> str:
    relay.flip = where
    try:
        with connect(handle) as client:  # type: ignore[arg-type]
            return hit(relay, client, get)
    except DataPlaneError as error:  # The directory is reached at once.
        return str(error)
    finally:
        relay.flip = None


def hit_by_injection(client: DataPlaneClient) -> str:
    with pytest.raises(DataPlaneError) as caught:
        get(client)
    return str(caught.value)


@pytest.mark.processes
def test_calls_of_an_event_loop_are_encrypted_too(plane: DataPlane) -> None:
    import asyncio

    from headrace.dataplane.factory import connect_async

    with over(plane, unit=False) as (relay, handle):

        async def use() -> str:
            async with connect_async(handle) as client:
                await client.put("p", ["a.0"], {"ids": IDS[:1], "reward": torch.ones(1)})
                relay.reply_before = b"\x17\x03\x03\x00\x20" + b"\0" * 32
                with pytest.raises(DataPlaneError) as caught:
                    await client.status()
                return str(caught.value)

        assert "bytes from the directory at 127.0.0.1" in asyncio.run(use())
        assert b"a.0" not in relay.recorded["up"]
