"""Implements baselines whose bytes are kept by a server in one of the benchmark's processes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from ..contenders import BYTE_OPS, Endpoint, Op, Share
from ..workloads import LoadSpec


class Server(Protocol):
    """A server that runs in its own thread from when it is created."""

    address: tuple[str, int]

    def close(self) -> None:
        """End the server's thread. Idempotent."""
        ...


class Host(Protocol):
    """A process that can run the servers of baselines."""

    def serve(self, name: str, start: Callable[[], Server]) -> tuple[str, int]:
        """Start a server in the benchmark's serving process; returns its address."""
        ...

    def stop(self, name: str) -> None:
        """End the server `name`."""
        ...


class ServedContender:
    """A baseline in the driver that starts a server and gives its address to the endpoints in the worker processes."""

    ops: frozenset[Op] = BYTE_OPS

    def __init__(
        self, name: str, host: Host, start: Callable[[], Server], endpoint: Callable[[tuple[str, int]], Endpoint]
    ) -> None:
        self.name = name
        self._host = host
        self._endpoint = endpoint
        self._address = host.serve(name, start)

    def factory(self, spec: LoadSpec) -> Callable[[], Endpoint]:
        return functools.partial(self._endpoint, self._address)

    def part(self, token: Any, share: Share) -> Any:
        return token

    def close(self) -> None:
        self._host.stop(self.name)
