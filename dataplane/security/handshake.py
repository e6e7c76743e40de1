"""Proves to both ends of a connection that the other end knows the run's key. The key itself is never sent.

client -> server   MAGIC, the client's nonce                    HELLO_BYTES
server -> client   the server's nonce, the server's proof       CHALLENGE_BYTES
client -> server   the client's proof                           PROOF_BYTES

A nonce is 32 random bytes, drawn for each connection. A proof is the HMAC-SHA256, under the run's key, of the role
(server or client), the name of the service, and both nonces. A recorded proof is worthless for another connection, as
the other end's nonce differs; a server's proof cannot serve as a client's; and a proof for one service is invalid for
another.

The handshake does not encrypt or authenticate what is sent later. An attacker who can change packets on the network
between the two ends can take over the connection after the handshake.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

MAGIC = b"hdrace03"
"""First bytes of a connection: the protocol and its version."""
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
CHALLENGE_BYTES = NONCE_BYTES + PROOF_BYTES
KEY_BYTES = 32


class HandshakeError(ConnectionError):
    """The other end of a connection did not prove that it knows the run's key."""


def new_key() -> bytes:
    """Return a new random key of KEY_BYTES bytes for a run."""
    return secrets.token_bytes(KEY_BYTES)


class ClientHandshake:
    """Client's part of one handshake, without I/O."""

    def __init__(self, key: bytes, service: str) -> None:
        """service: name of the service that the server must prove to be, such as "directory"."""
        self._key = key
        self._service = service
        self._nonce = secrets.token_bytes(NONCE_BYTES)

    @property
    def hello(self) -> bytes:
        """Bytes that the client sends first, HELLO_BYTES long."""
        return MAGIC + self._nonce

    def answer(self, challenge: bytes) -> bytes:
        """Check the server's proof in its `challenge` (CHALLENGE_BYTES bytes), and return the client's proof. Raises
        HandshakeError when the server's proof is wrong."""
        server_nonce, proof = challenge[:NONCE_BYTES], challenge[NONCE_BYTES:]
        expected = _proof(self._key, b"server", self._service, self._nonce, server_nonce)
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError(f"the peer is not the {self._service} of this run: it does not know the run's key")
        return _proof(self._key, b"client", self._service, self._nonce, server_nonce)


class ServerHandshake:
    """Server's part of one handshake, without I/O."""

    def __init__(self, key: bytes, service: str) -> None:
        """service: name of the service that listens here."""
        self._key = key
        self._service = service
        self._expected: bytes | None = None

    @property
    def needed_bytes(self) -> int:
        """Number of bytes that the client has to send next."""
        return HELLO_BYTES if self._expected is None else PROOF_BYTES

    def challenge(self, hello: bytes) -> bytes:
        """Return the bytes that answer a client's `hello` (HELLO_BYTES bytes). Raises HandshakeError when `hello` does
        not begin with MAGIC."""
        if len(hello) != HELLO_BYTES or hello[: len(MAGIC)] != MAGIC:
            raise HandshakeError("the client's first bytes are not those of this version of Headrace")
        nonce = secrets.token_bytes(NONCE_BYTES)
        client_nonce = hello[len(MAGIC) :]
        self._expected = _proof(self._key, b"client", self._service, client_nonce, nonce)
        return nonce + _proof(self._key, b"server", self._service, client_nonce, nonce)

    def check(self, proof: bytes) -> None:
        """Raise HandshakeError unless `proof` (PROOF_BYTES bytes) is the client's proof for the challenge given. The
        comparison takes constant time, so that its duration reveals nothing about the right proof."""
        if self._expected is None or not hmac.compare_digest(proof, self._expected):
            raise HandshakeError("the client did not prove that it knows the run's key")


def _proof(key: bytes, role: bytes, service: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    text = b"headrace %s of %s\0" % (role, service.encode())
    return hmac.digest(key, text + client_nonce + server_nonce, "sha256")


# ---------------- These functions carry out the handshake over a blocking socket, or on an event loop.


def prove_to_server(connection: socket.socket, key: bytes, service: str, deadline: float) -> None:
    """Carry out the client's part over a connected blocking socket, whose timeout it changes.

    deadline: time by the clock `time.monotonic()`. Raises HandshakeError when the server does not know the key,
    TimeoutError at the deadline, and ConnectionError when the server ends the connection.
    """
    handshake = ClientHandshake(key, service)
    connection.settimeout(left_s(deadline))
    connection.sendall(handshake.hello)
    connection.sendall(handshake.answer(_receive(connection, CHALLENGE_BYTES, deadline)))


async def prove_to_server_async(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, key: bytes, service: str
) -> None:
    """Carry out the client's part over a connected non-blocking socket. The caller limits the time. Raises
    HandshakeError and ConnectionError as `prove_to_server` does."""
    handshake = ClientHandshake(key, service)
    await loop.sock_sendall(connection, handshake.hello)
    challenge = b""
    while len(challenge) < CHALLENGE_BYTES:
        data = await loop.sock_recv(connection, CHALLENGE_BYTES - len(challenge))
        if not data:
            raise ConnectionResetError
        challenge += data
    await loop.sock_sendall(connection, handshake.answer(challenge))


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Receive exactly `nbytes` bytes, which may arrive in several pieces."""
    data = b""
    while len(data) < nbytes:
        connection.settimeout(left_s(deadline))
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def left_s(deadline: float) -> float:
    """Return the seconds until `deadline`, by the clock `time.monotonic()`. Raises TimeoutError when the deadline has
    passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
