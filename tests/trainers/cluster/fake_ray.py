"""Actors without processes for tests of the driver: each call is answered by a function of the test, or not yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.codecs import messages
from headrace.trainers.cluster import calls
from headrace.trainers.cluster.calls import DriverMeter
from headrace.trainers.cluster.handles import EngineHandle, RolloutHandle, TrainHandle

PENDING = object()
"""Answer of a call that has not ended."""
Answer = Callable[[str], Any]
"""Function from a method's name to its result, PENDING, or an exception that the call raises at the driver. It is asked
again each time that the call is looked at."""


class FakeActor:
    """A Ray actor as its handle sees it."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.sent: list[str] = []
        self.call = self

    def options(self, concurrency_group: str) -> FakeActor:
        return self

    def remote(self, method: str, message: bytes, *actors: Any) -> Any:
        self.sent.append(method)
        return lambda: self.answer(method)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the driver's calls reach fake actors."""

    def wait(references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        return [reference for reference in references if reference() is not PENDING][:num_returns], []

    def get(reference: Any, timeout: float) -> bytes:
        answer = reference()
        if isinstance(answer, BaseException):
            raise answer
        return messages.encode(answer)

    monkeypatch.setattr(calls.ray, "wait", wait)
    monkeypatch.setattr(calls.ray, "get", get)


def worker(answer: Answer, rank: int = 0) -> TrainHandle:
    return TrainHandle(lambda: FakeActor(answer), f"train worker {rank}", DriverMeter())


def engine(answer: Answer, index: int = 0) -> EngineHandle:
    return EngineHandle(lambda: FakeActor(answer), f"engine {index}", DriverMeter())


def rollout(answer: Answer, index: int = 0) -> RolloutHandle:
    return RolloutHandle(lambda: FakeActor(answer), f"rollout {index}", DriverMeter())
