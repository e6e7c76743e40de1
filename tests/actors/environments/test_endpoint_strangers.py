"""The endpoint's bounds on what clients take before they are served: places, connections, and lines in the log."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headrace.actors.environments.config import EndpointConfig
from headrace.actors.environments.endpoint import server as endpoint_server
from headrace.actors.environments.endpoint.server import EndpointServer
from headrace.actors.environments.episode import EndpointAddress
from headrace.dataplane.security.authenticated_listener import MAX_STRANGERS, MOST_STRANGERS
from headrace.tests.attacks.mutations import mutated

FRAMES = int(os.environ.get("HEADRACE_FUZZ_FRAMES", "100000"))
"""Damaged requests of the drill."""
LIMITS = EndpointConfig(enabled=True, max_calls=32, max_episode_calls=4, body_timeout_s=30.0)


class Named:
    """As much of an episode as refusals need."""

    def __init__(self, name: str) -> None:
        self.name = name


class Ends:
    """A server, and the connections of a test, which are closed at its end."""

    def __init__(self, server: EndpointServer, addresses: dict[str, EndpointAddress]) -> None:
        self.server = server
        self._addresses = addresses
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes = b"") -> asyncio.StreamReader:
        port = int(self._addresses["a"].url.rpartition(":")[2].partition("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self._writers.append(writer)
        writer.write(data)
        return reader

    def send_more(self, data: bytes) -> None:
        """Send bytes over the newest connection."""
        self._writers[-1].write(data)

    def head(self, name: str, length: int, path: str = "/v1/chat/completions") -> bytes:
        """A request's head, with the secret of an episode."""
        secret = self._addresses[name].secret
        lines = (f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {secret}", f"content-length: {length}")
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()

    async def status(self, name: str) -> int:
        """The status of a call with a body that is no request."""
        reader = await self.connect(self.head(name, 2) + b"{}")
        return int((await reader.readline()).split()[1])

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@asynccontextmanager
async def serving() -> AsyncIterator[Ends]:
    server = EndpointServer(LIMITS)
    episodes: dict[str, Any] = {name: Named(name) for name in "ab"}
    ends = Ends(server, {name: await server.open(episode) for name, episode in episodes.items()})
    try:
        async with asyncio.timeout(3000):
            yield ends
    finally:
        ends.close()
        await server.close()


def run(test: Callable[[Ends], Awaitable[None]]) -> None:
    async def main() -> None:
        async with serving() as ends:
            await test(ends)

    asyncio.run(main())


def test_an_episode_takes_no_more_places_than_its_own() -> None:
    """A call counts from its head on, so heads without bodies keep no other episode out."""

    async def test(ends: Ends) -> None:
        readers = [await ends.connect(ends.head("a", 1000)) for _ in range(32)]
        await ends.until(lambda: ends.server._num_calls >= 4)
        refused = [asyncio.create_task(reader.readline()) for reader in readers]
        while sum(task.done() for task in refused) < 28:
            await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED, timeout=0.01)
        assert all(task.result().split()[1] == b"429" for task in refused if task.done())
        assert ends.server._num_calls == 4 and await ends.status("b") == 400
        ends.close()
        await ends.until(lambda: ends.server._num_calls == 0)
        assert await ends.status("a") == 400, "the places are free again"
        for task in refused:
            task.cancel()

    run(test)


def test_silent_connections_keep_nobody_out() -> None:
    async def test(ends: Ends) -> None:
        readers = [await ends.connect() for _ in range(MAX_STRANGERS + 12)]
        assert await readers[0].read() == b"", "the oldest is closed long before its ten seconds"
        assert await ends.status("b") == 400
        used = await ends.connect(ends.head("b", 2) + b"{}")  # answered, and then silent
        assert (await used.readline()).split()[1] == b"400"
        newer = [await ends.connect() for _ in range(MAX_STRANGERS + 12)]
        await used.read()
        assert await ends.status("b") == 400 and len(newer) < MOST_STRANGERS

    run(test)


def test_a_half_head_ends_in_time_also_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_server, "HEAD_S", 0.2)

    async def test(ends: Ends) -> None:
        first = await ends.connect(b"POST /v1/ch")
        second = await ends.connect(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await second.readline()).split()[1] == b"401"
        ends.send_more(b"GET /v1/mod")
        async with asyncio.timeout(20):
            await first.read()
            await second.read()
        assert ends.server._num_calls == 0

    run(test)


@pytest.mark.parametrize("count", [300, pytest.param(FRAMES, marks=[pytest.mark.drill, pytest.mark.timeout(3600)])])
def test_garbage_fills_no_log_and_ends_nothing(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Requests of a real client with one mutation each, with its secret and without; uvicorn would log each."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"endpoint: seed {seed}")
    dice, started = random.Random(seed), time.monotonic()

    async def test(ends: Ends) -> None:
        whole = ends.head("a", 40) + b'{"model": "m", "messages": [{"role": 1}]}'
        for number in range(count):
            request = whole if number % 2 else whole.replace(b"Bearer ", b"Bearer x")
            await ends.connect(mutated(dice, request))
            if number % 40 == 0:
                assert await ends.status("b") == 400
                ends.close()
        ends.close()
        await ends.until(lambda: ends.server._num_calls == 0)
        assert await ends.status("a") == await ends.status("b") == 400
        assert len(ends.server._sessions) == 2

    with caplog.at_level(logging.WARNING):
        run(test)
    assert len(caplog.records) < 5 + 2 * (time.monotonic() - started)
    assert not [record for record in caplog.records if record.exc_info]
