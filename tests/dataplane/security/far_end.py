"""Carries out the server's part of a handshake over a socket of which the test has both ends."""

from __future__ import annotations

import socket
import time

from headrace.dataplane.security.authenticated_listener import Stranger


def prove_to_client(connection: socket.socket, key: bytes, service: str, timeout_s: float = 10.0) -> None:
    """Answer a client over a connected blocking socket, whose timeout is changed. Raises HandshakeError when the client
    does not know the key, TimeoutError after `timeout_s` seconds, and ConnectionError when the client ends the
    connection."""
    stranger, deadline = Stranger(connection, key, service, connection.close), time.monotonic() + timeout_s
    while not stranger.has_proved:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        data = connection.recv(stranger.num_missing)
        if not data:
            raise ConnectionResetError
        connection.sendall(stranger.hear(data))
