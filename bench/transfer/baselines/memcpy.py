"""The memcpy baseline copies the same bytes within one process, into warm memory. No contender can be faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from ..contenders import BYTE_OPS, Op, Share
from ..digests import Digests
from ..workloads import Load, LoadSpec
from .byte_parts import digest, parts_of, slices


class MemcpyContender:
    """The memcpy baseline in the driver. It has no server, because it copies within one process."""

    name = "memcpy"
    ops: frozenset[Op] = BYTE_OPS

    def factory(self, spec: LoadSpec) -> Callable[[], MemcpyEndpoint]:
        return MemcpyEndpoint

    def part(self, token: Any, share: Share) -> Any:
        return token

    def close(self) -> None:
        """No-op: nothing was started."""


class MemcpyEndpoint:
    """The memcpy baseline in a worker process. It copies between buffers that the warm-up has touched before times are
    measured."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._target: list[np.ndarray] = []
        self._sources: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> tuple[int, ...]:
        if not self._parts:
            self._parts = parts_of(load)
            self._target = [np.ones_like(part) for part in self._parts]
        for target, part in zip(self._target, self._parts, strict=True):
            np.copyto(target, part)
        return tuple(len(part) for part in self._parts)

    def get(self, token: tuple[int, ...], share: Share, fields: Sequence[str] | None) -> list[np.ndarray]:
        """Copy as many bytes as a reader's share has, within this process. The source holds a known pattern, so that
        `expected` can compute the digests of a correct copy."""
        if share.count not in self._sources:
            sources = _pattern(token, share)
            self._sources[share.count] = sources, [np.ones_like(piece) for piece in sources]
        sources, targets = self._sources[share.count]
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        return targets

    def expected(self, load: Load, share: Share) -> Digests:
        return digest(_pattern(tuple(len(part) for part in parts_of(load)), share))

    def fingerprint(self, got: list[np.ndarray]) -> Digests:
        return digest(got)

    def close(self) -> None:
        self._parts, self._target, self._sources = [], [], {}


def _pattern(sizes: tuple[int, ...], share: Share) -> list[np.ndarray]:
    pieces = slices([np.broadcast_to(np.uint8(0), size) for size in sizes], share)
    return [np.resize(np.arange(251, dtype=np.uint8), len(piece)) for piece in pieces]
