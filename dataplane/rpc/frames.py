"""Encodes requests and replies as frames, for a stream socket between a client and the directory.

A frame is a header and a body. The header gives the number of bytes of the body, the number of the request, and the
number of bytes of the op's name (the op is the requested operation). The body is the op's name and the payload of a
request, or a reply. A reply has the number of its request, and replies come in any order.

A frame with the number of an earlier request and the op CANCEL cancels this request, and has no reply itself. The
request is then answered soon: either as usual, or by a reply that it was cancelled before it took effect. A connection
begins with the handshake of `dataplane/security/handshake.py`, and frames follow it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

HEADER = struct.Struct("<QIB")
SERVICE = "directory"
"""Name of the directory in handshakes."""
CANCEL = "cancel"
"""Op of a frame that cancels the request with the same number."""
MAX_FRAME_BYTES = 1 << 32
"""Largest number of bytes of a frame's body. A frame whose header announces more is refused before its body is read."""


@dataclass(frozen=True, slots=True)
class DirectoryAddress:
    """Address at which a directory (a metadata service of the data plane) listens. Plain and picklable."""

    local: str
    """Name of the directory's Unix socket, which is in the abstract namespace, for clients on the same host."""
    host: str
    """IP address for clients on other hosts; "" when the directory serves only its own host."""
    port: int


def frame(number: int, body: bytes, op: str = "") -> bytes:
    """Encode one frame. A large body is better sent separately, after the frame's `head`, which saves a copy."""
    return head(number, len(body), op) + body


def head(number: int, nbytes: int, op: str = "") -> bytes:
    """Encode the beginning of a frame, up to its payload of `nbytes` bytes. Raises ValueError when the frame's body
    would have more than MAX_FRAME_BYTES."""
    name = op.encode()
    if len(name) + nbytes > MAX_FRAME_BYTES:
        raise ValueError(f"{op or 'reply'}: got a message of {nbytes} bytes, expected less than {MAX_FRAME_BYTES}")
    return HEADER.pack(len(name) + nbytes, number, len(name)) + name


class FrameReader:
    """Parser that takes bytes as they arrive, and returns frames as they become complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of received bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[int, str, bytes]]:
        """Return (request number, op, payload) of every frame that `data` completes.

        Raises ValueError when a frame's header announces more than MAX_FRAME_BYTES.
        """
        if self._buffer:
            self._buffer += data
            data = self._buffer  # type: ignore[assignment]
        frames: list[tuple[int, str, bytes]] = []
        position, end = 0, len(data)
        while end - position >= HEADER.size:
            nbytes, number, op_bytes = HEADER.unpack_from(data, position)
            if nbytes > MAX_FRAME_BYTES:
                raise ValueError(f"got a frame of {nbytes} bytes, expected at most {MAX_FRAME_BYTES}")
            body = position + HEADER.size
            if end - body < nbytes:
                break
            op = bytes(data[body : body + op_bytes]).decode() if op_bytes else ""
            frames.append((number, op, bytes(data[body + op_bytes : body + nbytes])))
            position = body + nbytes
        if data is self._buffer:
            del self._buffer[:position]
        elif position < end:
            self._buffer += data[position:] if position else data
        return frames


KEEP_ALIVE_S = 30
"""Seconds after which an idle connection is probed. Middleboxes forget connections that are idle for minutes."""
PROBE_S = 10
PROBES = 3
USER_TIMEOUT_MS = 60_000
"""Milliseconds for which sent data may remain unacknowledged by the peer before the connection is ended."""


def set_up_tcp(connection: socket.socket) -> None:
    """Set a TCP socket's options. Small frames are sent at once, and a dead host is noticed within about a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
