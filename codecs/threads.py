"""Runs a few calls side by side that leave other threads the interpreter, such as digests of large arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_in_threads(calls: Sequence[Callable[[], Result]], most: int) -> list[Future[Result]]:
    """Run calls in at most `most` threads, and return them when all have ended.

    Calls may run twice, and the last result counts: where no thread can be started, as when the interpreter ends, this
    thread runs them, even if another took them before.
    """
    with ThreadPoolExecutor(most) as threads:
        try:
            return [threads.submit(call) for call in calls]
        except RuntimeError:
            return [_run(call) for call in calls]


def _run(call: Callable[[], Result]) -> Future[Result]:
    ended: Future[Result] = Future()
    try:
        ended.set_result(call())
    except BaseException as error:
        ended.set_exception(error)
    return ended
