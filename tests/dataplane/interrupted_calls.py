"""Interrupts client calls by signals whose handler raises, at random moments, and counts what they leave behind."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.errors import KeysNotFound
from headrace.dataplane.factory import connect
from headrace.dataplane.handle import DataPlaneHandle
from headrace.tests.waiting import wait_until

SCHEMA = Schema([Field("ids", Kind.PER_TOKEN, torch.int32), Field("x", Kind.PER_SAMPLE, torch.float32)])
OPERATIONS = ("put", "get", "claim", "release", "clear")
SETTLED_S = 5.0
"""Seconds after an interrupt within which nothing may be left of its call."""
LEFT = ("rows", "leases", "leased_rows", "bytes_used", "bytes_reserved", "waiting_claims", "waiting_puts")


class OwnError(Exception):
    """Raised by the handler of a test, as alarm handlers raise."""


@dataclass
class Tally:
    """What came of the calls of one operation."""

    interrupted: int = 0
    completed: int = 0
    others: list[str] = field(default_factory=list)
    """Errors that are not the handler's."""


@contextlib.contextmanager
def alarms(error: type[BaseException]) -> Iterator[None]:
    """Let SIGALRM raise `error` in the main thread within the context."""

    def handler(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


class Interrupter:
    """Makes calls of one client that are interrupted at random moments. Another client is never interrupted."""

    def __init__(self, handle: DataPlaneHandle, seed: int) -> None:
        self.client: Any = connect(handle, name="interrupted")
        self.other: Any = connect(handle, name="other")
        self.other.register("p", SCHEMA, ["a"])
        self._random = random.Random(seed)
        self._number = 0

    def close(self) -> None:
        self.client.close()
        self.other.close()

    def run(self, operation: str, error: type[BaseException], signals: int) -> Tally:
        """Make calls until `signals` of them were interrupted, at most ten times as many. After each call, its rows
        must be as before, or as after the whole call; they are then cleared."""
        tally, typical_s = Tally(), 0.002
        with alarms(error):
            while tally.interrupted < signals and tally.interrupted + tally.completed < 10 * signals:
                self._number += 1
                keys = [f"{self._number}.{row}" for row in range(3)]
                call, check = getattr(self, f"_{operation}")(keys)
                result, started = None, time.perf_counter()
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, self._random.random() * typical_s * 1.2 + 1e-6)
                        result = call()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except error:
                    pass
                except Exception as other:
                    tally.others.append(f"{type(other).__name__}: {other}")
                if result is None:
                    tally.interrupted += 1
                else:
                    tally.completed += 1
                    typical_s = 0.9 * typical_s + 0.1 * (time.perf_counter() - started)
                check(result)
        return tally

    def leftovers(self) -> dict[str, int]:
        """What is left SETTLED_S after the last interrupt, without the zeros."""

        def found() -> dict[str, int]:
            status = self.other.status()
            return {name: getattr(status, name) for name in LEFT if getattr(status, name)}

        with contextlib.suppress(AssertionError):
            wait_until(lambda: not found(), timeout_s=SETTLED_S)
        return found()

    # ---------------- Each returns a call for new rows, and the check of its result, which is None after an interrupt.

    def _put(self, keys: list[str]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        return (lambda: self._rows(self.client, keys)), lambda done: done and self.other.clear("p", keys)

    def _get(self, keys: list[str]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        receipt, number = self._rows(self.other, keys), self._number

        def check(batch: Any) -> None:
            assert batch is None or (batch["x"] == number).all()
            self.other.clear("p", keys)

        return (lambda: self.client.get(receipt)), check

    def _claim(self, keys: list[str]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        self._rows(self.other, keys)

        def check(held: Any) -> None:
            if held is not None:
                self.client.release(held, "a", "retry")
            self._expect_free(keys)

        return (lambda: self.client.claim("p", "a", ["x"], 3)), check

    def _release(self, keys: list[str]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        self._rows(self.other, keys)
        held = [self.client.claim("p", "a", ["x"], 3)]

        def check(_: Any) -> None:
            held.clear()  # What was not released is given back with its receipt.
            self._expect_free(keys)

        return (lambda: self.client.release(held.pop(), "a", "retry") is None), check

    def _clear(self, keys: list[str]) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
        self._rows(self.other, keys)

        def check(_: Any) -> None:
            with contextlib.suppress(KeysNotFound):
                assert self.other.clear("p", keys) == 3

        return (lambda: self.client.clear("p", keys)), check

    def _rows(self, client: Any, keys: list[str]) -> Any:
        ids, x = [torch.full((200,), self._number)] * 3, torch.full((3,), float(self._number))
        return client.put("p", keys, {"ids": ids, "x": x})

    def _expect_free(self, keys: list[str]) -> None:
        again = self.other.claim("p", "a", ["x"], 3, timeout_s=SETTLED_S)
        assert sorted(again.keys) == sorted(keys)
        self.other.clear("p", keys)
