"""The thread that makes the items of a pass: what its consumer sees when it fails or ends."""

from __future__ import annotations

import threading

import pytest

from headrace.actors.train.reader import Prefetch


def test_a_failure_that_comes_as_a_wait_runs_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait of the consumer returns at its time limit, and by then the thread has failed and ended."""
    go = threading.Event()

    def fail(number: int, stop: threading.Event) -> int:
        go.wait(10)
        raise ZeroDivisionError("by chance")

    prefetch = Prefetch(fail, 1, depth=1, name="pass")
    wait = prefetch._changed.wait

    def run_out(timeout: float | None = None) -> bool:
        go.set()
        wait(10)
        prefetch._thread.join(10)
        return False

    monkeypatch.setattr(prefetch._changed, "wait", run_out)
    with pytest.raises(ZeroDivisionError, match="by chance"):
        prefetch.take()


def test_a_thread_that_ended_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefetch, "_run", lambda self: None)
    prefetch = Prefetch(lambda number, stop: number, 3, depth=1, name="pass")
    with pytest.raises(RuntimeError, match="pass: ended before item 0 of 3"):
        prefetch.take()


def test_items_come_in_order() -> None:
    prefetch = Prefetch(lambda number, stop: number, 5, depth=2, name="pass")
    assert [prefetch.take() for _ in range(5)] == [0, 1, 2, 3, 4] and prefetch.done
    assert prefetch.close(10)
