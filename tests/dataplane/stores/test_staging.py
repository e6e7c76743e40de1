"""Buffers and threads that a transfer library is given: back in the pool when unused, left behind when stuck."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from headrace.codecs.integers import ALIGN
from headrace.dataplane.stores import mooncake_client
from headrace.dataplane.stores.deadline import DeadlineThreads
from headrace.dataplane.stores.mooncake_client import MIN_BYTES, StagingPool


def test_buffer_comes_back_with_its_last_view_and_is_never_lent_twice() -> None:
    registered: dict[int, int] = {}
    pool = StagingPool(registered.__setitem__, registered.__delitem__)
    first = pool.take(1000)
    first[:] = 7
    view = first[10:20].view(np.int16)
    address = first.ctypes.data
    assert address % ALIGN == 0 and registered == {address: MIN_BYTES}
    del first
    second = pool.take(1000)
    second[:] = 9
    assert second.ctypes.data != address and set(view.tolist()) == {0x0707} and len(registered) == 2
    del view
    assert pool.idle_bytes() == MIN_BYTES
    assert pool.take(MIN_BYTES).ctypes.data == address
    assert pool.take(0).size == 0


def test_sizes_waste_little_and_idle_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[int, int] = {}
    pool = StagingPool(registered.__setitem__, registered.__delitem__)
    for nbytes in (1, MIN_BYTES + 1, 5_000_001, 100_000_000):
        buffer = pool.take(nbytes)
        assert buffer.size == nbytes and nbytes <= registered[buffer.ctypes.data] <= nbytes * 1.25 + MIN_BYTES
        del buffer
    monkeypatch.setattr(mooncake_client, "KEEP_BYTES", 4 * MIN_BYTES)
    pool.take(3 * MIN_BYTES)
    assert max(registered.values()) < 10_000_000, "the large ones were let go first"
    assert pool.idle_bytes() == sum(registered.values()) <= 8 * MIN_BYTES


def test_calls_end_in_time_and_stuck_ones_are_left_behind() -> None:
    threads = DeadlineThreads("test")
    go = threading.Event()
    assert threads.run(lambda: 5, 1.0) == 5
    with pytest.raises(KeyError):
        threads.run(lambda: {}["x"], 1.0)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        threads.run(lambda: go.wait(10), 0.1)
    assert time.monotonic() - started < 1.0
    assert threads.run(lambda: 6, 1.0) == 6, "another thread takes the next call"
    errors: list[Exception] = []

    def wait() -> None:
        try:
            threads.run(lambda: go.wait(10), 10.0)
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    threads.end(ConnectionError("gone"))
    waiting.join(1.0)
    assert isinstance(errors[0], ConnectionError)
    with pytest.raises(ConnectionError):
        threads.run(lambda: 7, 1.0)
    assert not threads.wait_idle(0.0), "two calls are still under way"
    go.set()
    assert threads.wait_idle(5.0)
