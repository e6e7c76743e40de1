"""Implements the reference store `local`: a dict in the directory's process, which answers the other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...codecs import messages
from ..block_store import BlockStore, StoreSpec, Want
from ..directory.requests import body_of
from ..errors import RowsCleared
from ..rpc.links import InProcessLink, Link
from .registry import StoreEntry


@dataclass(frozen=True, slots=True)
class _Put:
    block_id: int
    parts: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class _Get:
    blocks: tuple[tuple[int, tuple[int, ...]], ...]
    """Block id and numbers of the wanted parts (the block's byte arrays) for each block. A block without part numbers
    is only checked for whether it still exists."""


class LocalHost:
    """Holds the bytes of all blocks in this process's memory. Thread-safe."""

    def __init__(self, run_id: str) -> None:
        self.spec = StoreSpec("local", run_id, {})
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, tuple[np.ndarray, ...]] = {}
        self._refused: set[int] = set()
        """Ids of the blocks that were freed before they were written. A late write of such a block is refused."""
        self._lock = threading.Lock()

    def allocate(self, block_id: int, nbytes: int) -> bytes | None:
        with self._lock:
            self._sizes[block_id] = nbytes
        return b""

    def free(self, block_id: int, location: bytes) -> None:
        with self._lock:
            if self._sizes.pop(block_id, None) is not None and self._blocks.pop(block_id, None) is None:
                self._refused.add(block_id)

    def usage_bytes(self) -> int:
        """Return the number of bytes of the blocks that are reserved or written."""
        with self._lock:
            return sum(self._sizes.values())

    def unfreed_bytes(self) -> int:
        """Return 0, because a block is freed at once."""
        return 0

    def shortage(self) -> str:
        """Return "", because the directory's capacity is the only limit."""
        return ""

    def processes(self) -> dict[str, int]:
        """Return an empty dict, because the bytes are in the directory's own process."""
        return {}

    def close(self) -> None:
        with self._lock:
            self._sizes.clear()
            self._blocks.clear()

    def write(self, block_id: int, parts: Iterable[np.ndarray]) -> None:
        """Store copies of the block's parts. Raises RowsCleared when the block was freed before it was written."""
        copies = tuple(part.copy() for part in parts)
        for copy in copies:
            copy.flags.writeable = False
        with self._lock:
            if block_id in self._refused:
                raise RowsCleared(f"block {block_id} was freed before it was written", op="put")
            self._blocks[block_id] = copies

    def read(self, block_id: int, numbers: Sequence[int]) -> dict[int, np.ndarray]:
        """Return parts of a block without copying them: part number -> array. Raises RowsCleared if the block was
        freed, and ValueError if it has no such part."""
        with self._lock:
            parts = self._blocks.get(block_id)
        if parts is None:
            raise RowsCleared(f"block {block_id} was freed", op="get")
        absent = [number for number in numbers if not 0 <= number < len(parts)]
        if absent:
            raise ValueError(f"block {block_id}: got part {absent[0]}, expected one below {len(parts)}")
        return {number: parts[number] for number in numbers}

    def serve(self, request: bytes) -> bytes:
        """Answer a request of a store in another process. The first byte is `p` for a `_Put` or another letter for a
        `_Get`, and the encoded message follows."""
        kind, body = request[:1], request[1:]
        if kind == b"p":
            put = messages.decode(body, _Put)
            self.write(put.block_id, put.parts)
            return b""
        got = [self.read(block_id, numbers) for block_id, numbers in messages.decode(body, _Get).blocks]
        return messages.encode([list(parts.values()) for parts in got])


class LocalStore:
    """Reads and writes blocks from within the directory's own process. A put copies the parts, and a get returns
    views."""

    def __init__(self, host: LocalHost) -> None:
        self._host = host

    def put(
        self, block_id: int, location: bytes, parts: Iterable[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        self._host.write(block_id, parts)
        return b""

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        return [self._host.read(want.block.block_id, want.parts) for want in wants]

    def settle(self, wants: Sequence[Want]) -> None:
        """No-op: the views keep their bytes alive and unchanged, even if the block was freed."""

    def close(self) -> None:
        """No-op: there is no connection to close."""


class LinkedLocalStore:
    """Reads and writes blocks from any other process. The bytes travel with calls to the directory, so this is for
    tests and small runs."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def put(
        self, block_id: int, location: bytes, parts: Iterable[np.ndarray], offsets: Sequence[int], timeout_s: float
    ) -> bytes:
        self._ask("put", b"p" + messages.encode(_Put(block_id, tuple(parts))), timeout_s)
        return b""

    def get(self, wants: Sequence[Want], timeout_s: float) -> list[dict[int, np.ndarray]]:
        request = _Get(tuple((want.block.block_id, want.parts) for want in wants))
        reply = self._ask("get", b"g" + messages.encode(request), timeout_s)
        got = messages.decode(reply, list[list[np.ndarray]])
        return [dict(zip(want.parts, parts, strict=True)) for want, parts in zip(wants, got, strict=True)]

    def settle(self, wants: Sequence[Want]) -> None:
        """No-op: `get` returned a copy, which cannot have changed."""

    def close(self) -> None:
        """No-op: the link belongs to the client, which closes it."""

    def _ask(self, op: str, request: bytes, timeout_s: float) -> bytes:
        started = time.monotonic()
        reply = self._link.call("store", request, timeout_s)
        return body_of(reply, op, time.monotonic() - started)


def _attach(spec: StoreSpec, link: Link) -> BlockStore:
    """Return a store that uses the host's memory directly, or one that uses a connection to the directory. The first is
    for the directory's process; the second uses this process's link."""
    if isinstance(link, InProcessLink) and isinstance(link.host, LocalHost):
        return LocalStore(link.host)
    return LinkedLocalStore(link)


STORE = StoreEntry(lambda config, run_id, host: LocalHost(run_id), _attach)
