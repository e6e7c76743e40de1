"""Frames requests and replies on a stream socket between a client and the directory.

A frame is a header (bytes of the body, number of the request, bytes of the op's name), then the body: the op's name and
the payload, or a reply. Replies bear their request's number and come in any order. A request may be followed by a frame
with the same number and the op CANCEL, which has no answer of its own: the request is then answered soon, either as
ever or by saying that it was cancelled before it took effect. The first frame of a connection is the run's token; a
directory that does not know it closes the connection.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field

HEADER = struct.Struct("<QIB")
CANCEL = "cancel"
"""Op of the frame that cancels the request of its number."""
MAX_FRAME_BYTES = 1 << 32
"""Number of bytes that a frame's body has at most. A frame that says that it has more is refused before it is read."""
MAX_TOKEN_BYTES = 64
"""Number of bytes that are read at most from a peer that has not shown the token."""


@dataclass(frozen=True, slots=True)
class DirectoryAddress:
    """Describes where a directory listens. Plain and picklable."""

    local: str
    """Name of its Unix socket in the abstract namespace, for clients on its host."""
    host: str
    """Address for clients on other hosts; "" when it serves its own host only."""
    port: int
    token: bytes = field(repr=False)
    """Secret that a client must show to use the directory."""


def frame(number: int, body: bytes, op: str = "") -> bytes:
    """Encode one frame. A large body is better sent after its `head`, without a copy."""
    return head(number, len(body), op) + body


def head(number: int, nbytes: int, op: str = "") -> bytes:
    """Encode a frame up to its payload of `nbytes` bytes. Raises ValueError when it has more than MAX_FRAME_BYTES."""
    name = op.encode()
    if len(name) + nbytes > MAX_FRAME_BYTES:
        raise ValueError(f"{op or 'reply'}: got a message of {nbytes} bytes, expected less than {MAX_FRAME_BYTES}")
    return HEADER.pack(len(name) + nbytes, number, len(name)) + name


def is_token(shown: bytes, token: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(shown, token)


class FrameReader:
    """Takes bytes as they arrive, and gives frames as they become complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Return the number of bytes of the incomplete frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[tuple[int, str, bytes]]:
        """Return (request number, op, payload) of every frame that `data` completes.

        Raises ValueError when a frame says that it has more than MAX_FRAME_BYTES.
        """
        if self._buffer:
            self._buffer += data
            data = self._buffer  # type: ignore[assignment]
        frames: list[tuple[int, str, bytes]] = []
        position, end = 0, len(data)
        while end - position >= HEADER.size:
            nbytes, number, op_bytes = HEADER.unpack_from(data, position)
            if nbytes > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {nbytes} bytes, expected at most {MAX_FRAME_BYTES}")
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
