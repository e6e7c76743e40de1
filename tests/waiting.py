"""Waits of tests, each with a bound: for something to become true, and for a call in a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any


def wait_until(what: Callable[[], object], why: object = "", timeout_s: float = 30.0) -> None:
    """Ask every few milliseconds. why: the message of the failure when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.005)


async def until(what: Callable[[], object]) -> None:
    """Ask at every turn of the event loop."""
    async with asyncio.timeout(30.0):
        while not what():
            await asyncio.sleep(0.001)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start `call` in a thread. The list gets what it returns or raises, and the time at which it ended."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)
        result.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result
