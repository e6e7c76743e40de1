"""A directory with sockets in a thread of the test's own process, which a test can stall."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from headrace.dataplane.config import DataPlaneConfig
from headrace.dataplane.directory.service import DirectoryService
from headrace.dataplane.handle import DataPlaneHandle
from headrace.dataplane.rpc.frames import DirectoryAddress
from headrace.dataplane.rpc.server import DirectoryServer
from headrace.dataplane.store_choice import build_store_host
from headrace.testing.data_plane import fresh_run_id


def config(**options: Any) -> DataPlaneConfig:
    """Return the configuration of a store of 64 MiB in the directory's process, unless `options` say otherwise."""
    settings = {"store": {"kind": "local", "capacity_mib": 64}, "timeout_s": 10.0, **options}
    return DataPlaneConfig.model_validate(settings)


class Served:
    """A directory with sockets, on a loop of its own."""

    def __init__(self, **options: Any) -> None:
        """options: of the data plane's configuration."""
        self.config = config(**options)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        run_id = fresh_run_id()
        self.host = build_store_host(self.config, run_id)
        self.server, self.service, self.address = self.run(self._start)
        self.handle = DataPlaneHandle(run_id, self.config, self.host.spec, "no actor", self.address, "directory pid=7")

    async def _start(self) -> tuple[DirectoryServer, DirectoryService, DirectoryAddress]:
        service = DirectoryService(self.config, self.host)
        server = DirectoryServer(service, self.host.spec.key)
        return server, service, await server.start("headrace-test", "127.0.0.1")

    def run(self, make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result(10)

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """The directory does nothing within the context, as a process that is stopped."""
        began, go_on = threading.Event(), threading.Event()
        self.loop.call_soon_threadsafe(lambda: (began.set(), go_on.wait(60)))
        assert began.wait(10)
        try:
            yield
        finally:
            go_on.set()

    def close(self) -> None:
        self.run(self.service.close)
        self.run(self.server.close)
        self.run(lambda: asyncio.sleep(0.01))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
