"""Encodes requests and replies as frames, for a stream socket between a client and the directory.

A frame is a header and a body. The header gives the number of bytes of the body, the number of the request, the number
of bytes of the op's name (the op is the requested operation), and checksums of the body and of the header itself. The
body is the op's name and the payload of a request, or a reply. A reply has the number of its request, and replies come
in any order. The end that receives a frame checks both checksums before it uses anything else of the frame, so that
damage on the way is reported as such. The number 0 belongs to no request: a reply with it says why a connection ends.

A frame with the number of an earlier request and the op CANCEL cancels this request, and has no reply itself. The
request is then answered soon: either as usual, or by a reply that it was cancelled before it took effect. A connection
begins with the handshake of `dataplane/security/handshake.py`, and frames follow it.
"""

from __future__ import annotations

import secrets
import socket
import struct
from dataclasses import dataclass

import xxhash

_FIELDS, _SUM = struct.Struct("<QIBI"), struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _SUM.size
LAST_NUMBER = (1 << 32) - 1
"""Largest number of a request. The next one after it has the number 1 again."""
TOKEN_BYTES = 8
SERVICE = "directory"
"""Name of the directory in handshakes."""
CANCEL = "cancel"
"""Op of a frame that cancels the request with the same number."""
TOKEN = "token"
"""Op of the first frame of a connection, whose number is 0 and which has no reply. Its payload, together with the
number of a request, is the identity of that request."""
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


class Damaged(ConnectionError, ValueError):
    """The bytes of a message changed on the way, as its checksum shows, so the connection cannot be used further."""


def frame(number: int, body: bytes, op: str = "") -> bytes:
    """Encode one frame. A large body is better sent separately, after the frame's `head`, which saves a copy."""
    return head(number, body, op) + body


def head(number: int, payload: bytes, op: str = "", *, raw_bytes: int = 0) -> bytes:
    """Encode the beginning of a frame, up to its payload. raw_bytes: number of bytes that follow the payload without
    being covered by the frame's checksum. Raises ValueError when the frame's body would have more than
    MAX_FRAME_BYTES."""
    name = op.encode()
    nbytes = len(payload) + raw_bytes
    if len(name) + nbytes > MAX_FRAME_BYTES:
        raise ValueError(f"{op or 'reply'}: got a message of {nbytes} bytes, expected less than {MAX_FRAME_BYTES}")
    return header(len(name) + nbytes, number, len(name), digest(name, payload)) + name


def header(nbytes: int, number: int, op_bytes: int, checksum: int) -> bytes:
    """Encode a header with its own checksum; the arguments are what `read_header` returns."""
    fields = _FIELDS.pack(nbytes, number, op_bytes, checksum)
    return fields + _SUM.pack(xxhash.xxh32_intdigest(fields))


def read_header(data: bytes | bytearray | memoryview, start: int = 0) -> tuple[int, int, int, int]:
    """Return the fields of a header: body bytes, request number, bytes of the op's name, checksum for `check`. Raises
    Damaged when the header has changed on the way, or announces more than MAX_FRAME_BYTES."""
    end = start + _FIELDS.size
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh32_intdigest(memoryview(data)[start:end]):
        raise Damaged("the header of a message was damaged on the way")
    fields = _FIELDS.unpack_from(data, start)
    if fields[0] > MAX_FRAME_BYTES or fields[2] > fields[0]:
        raise Damaged(f"got a frame of {fields[0]} bytes, expected {fields[2]} to {MAX_FRAME_BYTES}")
    return fields


def check(expected: int, op: bytes | memoryview, payload: bytes | bytearray | memoryview) -> None:
    """Raise Damaged unless the op's name and the payload have the checksum `expected`."""
    if digest(op, payload) != expected:
        raise Damaged(f"a message of {len(payload)} bytes was damaged on the way")


def other_number(number: int, reply: bytes) -> Damaged:
    """Return the error for a reply whose number no request has. The reply with the number 0 is a text."""
    return Damaged(f"got a reply with the number {number} of another request" if number else reply.decode())


def digest(op: bytes | memoryview, payload: bytes | bytearray | memoryview) -> int:
    """Return the checksum of a frame's body. payload: the part of the payload that it covers."""
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh32_intdigest(op) if op else 0) & 0xFFFFFFFF


def identity(token: bytes, number: int) -> bytes:
    """Return the identity of a request. token: TOKEN_BYTES random bytes of its sender."""
    return token + number.to_bytes(4, "little")


def new_token() -> bytes:
    return secrets.token_bytes(TOKEN_BYTES)


class FrameReader:
    """Parser that takes bytes as they arrive, and returns frames as they become complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of received bytes of a frame that is not complete."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[int, str, bytes]]:
        """Return (request number, op, payload) of every frame that `data` completes.

        Raises Damaged as `read_header` and `check` do.
        """
        if self._buffer:
            self._buffer += data
            data = self._buffer  # type: ignore[assignment]
        frames: list[tuple[int, str, bytes]] = []
        position, end = 0, len(data)
        while end - position >= HEADER_BYTES:
            nbytes, number, op_bytes, checksum = read_header(data, position)
            body = position + HEADER_BYTES
            if end - body < nbytes:
                break
            op, payload = bytes(data[body : body + op_bytes]), bytes(data[body + op_bytes : body + nbytes])
            check(checksum, op, payload)
            frames.append((number, op.decode(), payload))
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
