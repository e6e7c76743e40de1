"""Opens connections to the directory (metadata service), by Unix socket or, from other hosts, by TCP.

The Unix socket is tried first. A client on another host does not find it and uses TCP.
"""

from __future__ import annotations

import asyncio
import socket
import time

from ..security.handshake import HandshakeError, prove_to_server, prove_to_server_async
from ..security.tls import is_encrypted, secured
from .frames import SERVICE, DirectoryAddress, set_up_tcp

CONNECT_TIMEOUT_S = 10.0
"""Seconds that the directory's host may take to accept a TCP connection."""
CONNECT_AGAIN_S = 0.02
"""Seconds between attempts to connect while the directory has too many new connections."""


def connected(address: DirectoryAddress, key: bytes, deadline: float) -> socket.socket:
    """Open a blocking connection to the directory, and carry out the handshake.

    A directory that has too many new connections closes some of them, so this function tries to connect until the
    deadline. Raises TimeoutError at the deadline, ConnectionRefusedError when no server listens, and HandshakeError
    when the server does not know the run's key.
    """
    while True:
        connection = _opened(address, deadline)
        try:
            prove_to_server(connection, key, SERVICE, deadline)
            if is_encrypted(key) and connection.family != socket.AF_UNIX:
                return secured(connection, key, SERVICE, deadline)
            return connection
        except (HandshakeError, TimeoutError):
            connection.close()
            raise
        except ConnectionError:
            connection.close()
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(CONNECT_AGAIN_S)
        except BaseException:
            connection.close()
            raise


def _opened(address: DirectoryAddress, deadline: float) -> socket.socket:
    """Open a blocking connection to the directory. Raises TimeoutError and ConnectionRefusedError as `connected`
    does."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Without a timeout, connect would wait for room in the queue of new connections.
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            while not _connects_locally(connection, address):
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(CONNECT_AGAIN_S)
        except ConnectionRefusedError:
            if not address.host:
                raise
            connection.close()
            left_s = max(0.001, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            connection = socket.create_connection((address.host, address.port), left_s)
            set_up_tcp(connection)
    except BaseException:
        connection.close()
        raise
    return connection


async def connected_async(address: DirectoryAddress, key: bytes) -> socket.socket:
    """Open a non-blocking connection to the directory, and carry out the handshake, as `connected` does. The event
    loop is not blocked. The caller limits the time."""
    loop = asyncio.get_running_loop()
    while True:
        connection = await _opened_async(loop, address)
        try:
            await prove_to_server_async(loop, connection, key, SERVICE)
            return connection
        except HandshakeError:
            connection.close()
            raise
        except ConnectionError:
            connection.close()
            await asyncio.sleep(CONNECT_AGAIN_S)
        except BaseException:
            connection.close()
            raise


async def _opened_async(loop: asyncio.AbstractEventLoop, address: DirectoryAddress) -> socket.socket:
    """Open a non-blocking connection to the directory, without blocking the event loop."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        try:
            while not _connects_locally(connection, address):
                await asyncio.sleep(CONNECT_AGAIN_S)
        except ConnectionRefusedError:
            if not address.host:
                raise
            connection.close()
            family, kind, protocol, _, peer = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
            connection.setblocking(False)
            await loop.sock_connect(connection, peer)
            set_up_tcp(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connects_locally(connection: socket.socket, address: DirectoryAddress) -> bool:
    """Connect to the directory's Unix socket. Returns False if the socket's queue of new connections is full; the
    kernel does not wait for room in it. Raises ConnectionRefusedError when there is no such socket on this host."""
    try:
        connection.connect("\0" + address.local)
    except BlockingIOError:
        return False
    return True
