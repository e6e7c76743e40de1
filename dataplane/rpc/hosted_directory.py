"""Runs the directory (the metadata service) with its store and its sockets, in whatever process hosts it."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import resource
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..block_store import StoreHost, StoreSpec
from ..config import DataPlaneConfig
from ..directory.service import DirectoryService
from .frames import DirectoryAddress
from .server import DirectoryServer

BuildHost = Callable[[str], StoreHost]
"""Function that starts the store's part in the directory's process. It takes the IP address of this host at which
clients of other hosts reach the data plane; "" when all clients are on this host."""


@dataclass(frozen=True, slots=True)
class Started:
    """Description of a directory that has started and answers requests."""

    pid: int
    node: str
    """Name of the directory's host."""
    store: StoreSpec
    store_processes: dict[str, int]
    """Pids of the store's processes on the directory's host, by name."""
    address: DirectoryAddress


class HostedDirectory:
    """Hosts the directory (the metadata service) and the part of the store that allocates and frees blocks."""

    def __init__(self, config: DataPlaneConfig, build_host: BuildHost) -> None:
        self._config = config
        self._build_host = build_host
        self._service: DirectoryService | None = None
        self._server: DirectoryServer | None = None
        self._host: StoreHost | None = None

    async def start(self, name: str, host: str) -> Started:
        """Start the store, and start to answer requests. Returns a description of the directory with its address.

        name: name of the directory's Unix socket. host: IP address at which clients of other hosts reach the directory;
        "" when all clients are on this host, and then it listens only on a Unix socket. Raises the errors of the store.
        """
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each thread of a client takes a descriptor
        # In a thread, as a store may wait for other processes.
        self._host = await asyncio.to_thread(self._build_host, host)
        self._service = DirectoryService(self._config, self._host)
        self._server = DirectoryServer(self._service, self._host.spec.key)
        address = await self._server.start(name, host)
        np.unique(np.empty(0))  # it imports numpy.ma when it is first called: 20 ms that no put should wait for
        gc.freeze()  # what was imported stays: the collector need not look at it again and again
        return Started(os.getpid(), platform.node(), self._host.spec, self._host.processes(), address)

    async def close(self) -> None:
        """Close the store, end the processes that it started, and stop answering requests. Idempotent."""
        if self._service is not None:
            await self._service.close()
        elif self._host is not None:
            self._host.close()
        if self._server is not None:
            await self._server.close()


def directory_name(run_id: str) -> str:
    """Return the name of a run's directory: of its Unix socket, and of its Ray actor if it has one."""
    return f"headrace-{run_id}-directory"
