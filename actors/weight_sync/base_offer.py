"""Train ranks that start again read the base of an adapter from an engine's memory instead of the model's folder.

    rank      part(weight, box) ---> engine
    rank      <--- dtype, bytes                 one part at a time, at most `PART_BYTES` where a row is no larger

The caller compares each weight with the `BaseRecord` of the rank's first start, which covers the engine's memory and
the way.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

import torch

from ...codecs.memory import flat_bytes
from ...codecs.schema import DTYPES
from ...dataplane.listen_address import listening
from ...dataplane.security.authenticated_listener import AuthenticatedListener, connect_authenticated, listen
from ..process.framed_messages import receive_message, send_message
from .pairs.payload_wire import receive_payload, send_payload
from .plan.regions import Box

SERVICE = "weights to recover"
"""Name of the connections in handshakes."""
PART_BYTES = 16 << 20
_MAX_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """Digests that a train rank takes of an adapter's base when it first reads it."""

    base: str
    """Digest of the base's files, as in `AdapterSpec`."""
    weights: dict[str, tuple[str, int]]
    """Dtype in the files, and xxh3_64 of this rank's part, of each weight by its name."""
    note: str = ""
    """Sentence about where the rank has read the base; "" at the first start."""


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """Address at which an engine's process sends parts of its weights."""

    engine: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """Facts about the base for a train rank that starts again."""

    record: BaseRecord
    offer: WeightOffer | None
    """The engine that has the base; None if the rank has to read the model's folder."""


@dataclass(frozen=True, slots=True)
class KnownBase:
    """The base of an adapter as a rank that starts again knows it."""

    record: BaseRecord
    connect: Callable[[], WeightReader] | None
    """Function that connects to the engine that has the base; None if there is none."""
    always: bool
    """True if the engine is used even where the model's folder is faster."""


@dataclass(frozen=True, slots=True)
class _Part:
    weight: str
    box: Box


@dataclass(frozen=True, slots=True)
class _Reply:
    dtype: str
    nbytes: int
    error: str = ""


class WeightServer:
    """Sends parts of weights to every process that knows the run's key, until it is closed."""

    def __init__(self, engine: str, key: bytes, read: Callable[[str], torch.Tensor], timeout_s: float) -> None:
        """read: function that returns a weight by its name, or raises KeyError; several threads call it. timeout_s:
        longest time that a client may take no bytes. Raises OSError when listening fails."""
        self._read, self._timeout_s = read, timeout_s
        self._closed = False
        host = listening().address()
        self._listener = AuthenticatedListener(listen(host), key, SERVICE, self._admit)
        self.offer = WeightOffer(engine, host, self._listener.port)

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._closed = True
        self._listener.close()

    def _admit(self, connection: socket.socket) -> None:
        threading.Thread(target=self._serve, args=(connection,), daemon=True, name="headrace-recovery").start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(connection):
            while not self._closed:
                connection.settimeout(self._timeout_s)
                wanted = receive_message(connection, _Part, _MAX_MESSAGE_BYTES)
                try:
                    box = tuple(slice(*ends) for ends in wanted.box)
                    part = self._read(wanted.weight)[box].detach().cpu().contiguous()
                except (LookupError, AttributeError) as error:
                    send_message(connection, _Reply("", 0, f"no such weight ({error})"))
                    continue
                payload = flat_bytes(part)
                send_message(connection, _Reply(str(part.dtype).removeprefix("torch."), len(payload)))
                send_payload(connection, payload.numpy().data, _patience(self._timeout_s, lambda: self._closed))


class WeightReader:
    """Connection of a train rank to a `WeightServer`."""

    def __init__(self, offer: WeightOffer, key: bytes, timeout_s: float) -> None:
        """timeout_s: longest wait without a byte. Raises OSError if the server cannot be reached."""
        self.engine = offer.engine
        self._timeout_s = timeout_s
        self._connection = connect_authenticated(offer.host, offer.port, key, SERVICE, timeout_s)

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._connection.close()

    def parts(self, weight: str, box: Box, dtype: torch.dtype) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield a box of a weight part by part, in the order of its rows.

        Each part comes with its place in the box, and in `dtype`. Raises OSError if the engine is lost or has no such
        weight, or keeps it with fewer digits than `dtype` has.
        """
        (start, stop), *rest = box or ((0, 1),)
        row_bytes = max(1, math.prod(end - first for first, end in rest) * dtype.itemsize)
        step = max(1, PART_BYTES // row_bytes)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            part = ((first, last), *rest) if box else ()
            place = ((first - start, last - start), *((0, end - low) for low, end in rest)) if box else ()
            yield place, self._part(weight, part, dtype)

    def _part(self, weight: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        self._connection.settimeout(self._timeout_s)
        send_message(self._connection, _Part(weight, box))
        try:
            reply = receive_message(self._connection, _Reply, _MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise ConnectionError(f"no bytes for {self._timeout_s:g} s") from error
        if reply.error:
            raise OSError(f"{weight}: {reply.error}")
        kept, shape = DTYPES[reply.dtype], tuple(stop - start for start, stop in box)
        if torch.promote_types(kept, dtype) != kept:
            raise OSError(f"{weight}: the engine keeps it in {reply.dtype}, expected no fewer digits than {dtype}")
        if reply.nbytes != math.prod(shape) * kept.itemsize:
            raise OSError(f"{weight}: got {reply.nbytes} bytes, expected the shape {shape}")
        payload = torch.empty(reply.nbytes, dtype=torch.uint8)
        receive_payload(self._connection, payload.numpy().data, _patience(self._timeout_s, lambda: False))
        return payload.view(kept).view(shape).to(dtype)


def _patience(timeout_s: float, is_over: Callable[[], bool]) -> Callable[[bool], None]:
    """Return the function that ends a transfer without progress. is_over: whether to end it at once."""
    moved = [time.monotonic()]

    def look(has_moved: bool) -> None:
        if has_moved:
            moved[0] = time.monotonic()
        if is_over() or time.monotonic() - moved[0] > timeout_s:
            raise ConnectionError(f"no bytes for {timeout_s:g} s")

    return look
