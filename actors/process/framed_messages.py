"""Sends and receives small messages over a blocking socket, each after its length."""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

from ...codecs import messages

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


def send_message(connection: socket.socket, message: object) -> None:
    """Send one message. Raises OSError when the connection is broken."""
    body = messages.encode(message)
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive_message(connection: socket.socket, kind: type[T], max_bytes: int) -> T:
    """Receive one message. Raises ValueError when it is larger than `max_bytes` or is not of type `kind`, and OSError
    when the connection is broken."""
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"got a message of {length} bytes, expected at most {max_bytes}")
    return messages.decode(_receive_exactly(connection, length), kind)


def _receive_exactly(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray()
    while len(data) < nbytes:
        more = connection.recv(min(nbytes - len(data), 1 << 18))
        if not more:
            raise ConnectionResetError("the connection was closed by the other end")
        data += more
    return data
