"""An interrupt of a client call, at whatever moment, leaves nothing leased, reserved or readable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.dataplane import meta
from headrace.dataplane.client.client import DataPlaneClient
from headrace.dataplane.client.shielded_calls import Shielded, _Threads, _threads, can_be_interrupted
from headrace.dataplane.factory import DataPlane, connect, connect_async
from headrace.dataplane.rpc.cancellation import Cancellation
from headrace.dataplane.rpc.shared_channel import SharedChannel
from headrace.tests.dataplane.client.local_plane import SCHEMA, ids
from headrace.tests.dataplane.interrupted_calls import OPERATIONS, Interrupter, OwnError, alarms
from headrace.tests.dataplane.rpc.served import Served
from headrace.tests.waiting import wait_until

SIGNALS = 30


@pytest.fixture(scope="module")
def interrupter() -> Iterator[Interrupter]:
    """Clients over sockets, whose directory runs in a thread."""
    with contextlib.closing(Served()) as served, contextlib.closing(Interrupter(served.handle, seed=40)) as interrupter:
        yield interrupter


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a signal can come in a finalizer
@pytest.mark.parametrize("error", [KeyboardInterrupt, OwnError])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_signals_at_random_moments_leave_nothing(
    interrupter: Interrupter, operation: str, error: type[BaseException]
) -> None:
    tally = interrupter.run(operation, error, SIGNALS)
    assert tally.interrupted == SIGNALS and tally.others == []
    assert interrupter.leftovers() == {} and torch.is_grad_enabled()


def test_a_put_leaves_the_state_of_torch_alone(client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt at the beginning of torch.no_grad leaves gradients switched off in the caller's thread."""
    monkeypatch.setattr(torch.no_grad, "__enter__", lambda _: pytest.fail("it was used"))
    client.put("p", ["g.0", "g.1"], {"ids": ids(2), "score": [torch.ones((), requires_grad=True)] * 2})


@contextlib.contextmanager
def interrupted(when: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send SIGALRM, whose handler raises, once `when.name` has returned for the first time."""
    real, signals = getattr(when, name), [signal.SIGALRM]

    def then_signal(*arguments: Any) -> Any:
        result = real(*arguments)
        if signals:
            os.kill(os.getpid(), signals.pop())
        return result

    with alarms(OwnError), monkeypatch.context() as patch:
        patch.setattr(when, name, then_signal)
        with pytest.raises(OwnError):
            yield


def test_a_signal_while_a_receipt_is_decoded(
    client: DataPlaneClient, plane: DataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put("p", ["a.0"], {"ids": ids(1)})
    with interrupted(meta, "_from_body", monkeypatch):
        client.claim("p", "a", ["ids"], 1)
    wait_until(lambda: client.status().leases == 0)
    data = client.lookup("p", ["a.0"]).to_bytes()
    with interrupted(meta, "_from_body", monkeypatch):
        meta.KVBatchMeta.from_bytes(data)  # raises the handler's error, not a ValueError


def test_a_reply_that_comes_between_a_cancellation_and_its_task_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[asyncio.Task[Any]] = []
    real = SharedChannel.data_received

    def cancelled_before(channel: SharedChannel, data: bytes) -> None:
        if tasks:
            tasks.pop().cancel()
        real(channel, data)

    async def use(served: Served) -> None:
        async with connect_async(served.handle) as client:
            await client.register("p", SCHEMA, ["a"])
            await client.put("p", ["a.0"], {"ids": ids(1)})
            call = asyncio.create_task(client.claim("p", "a", ["ids"], 1))
            await asyncio.sleep(0)  # The request has been sent.
            tasks.append(call)
            with pytest.raises(asyncio.CancelledError):
                await call
            status = await client.status()
            assert not tasks and status.leases == 0

    monkeypatch.setattr(SharedChannel, "data_received", cancelled_before)
    with contextlib.closing(Served()) as served:
        asyncio.run(use(served))


class RaisesOnceAcquired:
    """A lock in whose last instruction a signal comes."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release

    def acquire(self, timeout: float) -> None:
        assert self._lock.acquire(timeout=timeout)
        raise OwnError


def test_a_signal_between_the_end_and_the_return_undoes_the_result() -> None:
    undone: list[int] = []
    shielded = Shielded(lambda cancellation: 7, undone.append)
    shielded._ended = RaisesOnceAcquired(shielded._ended)  # type: ignore[assignment]
    with pytest.raises(OwnError):
        shielded.result()
    assert undone == [7]


def test_a_second_signal_does_not_stop_the_taking_back(monkeypatch: pytest.MonkeyPatch) -> None:
    undone, go_on = [], threading.Event()

    def run(cancellation: Cancellation) -> int:
        os.kill(os.getpid(), signal.SIGALRM)
        wait_until(lambda: cancellation.requested)
        os.kill(os.getpid(), signal.SIGALRM)
        assert go_on.wait(10)
        return 7

    with alarms(OwnError), pytest.raises(OwnError):
        Shielded(run, undone.append).result()
    assert undone == []
    go_on.set()
    wait_until(lambda: undone == [7])


@pytest.mark.long
def test_calls_of_asyncio_that_are_cancelled_at_random_moments_leave_nothing(plane: DataPlane) -> None:
    rng = random.Random(41)

    async def use(client: Any) -> None:
        async with connect_async(plane.handle) as twin:
            for number in range(2 * SIGNALS):
                keys = [f"{number}.0"]
                calls = [twin.put("p", keys, {"ids": ids(1)}), twin.claim("p", "a", ["ids"], 1)]
                for call in calls:
                    task = asyncio.create_task(call)
                    await asyncio.sleep(rng.random() * 0.002)
                    task.cancel()
                    while number % 2 and not task.done():  # Every second call is cancelled again and again.
                        await asyncio.sleep(0)
                        task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                    del task
                client.clear("p")
                status = client.status()
                assert (status.leases, status.bytes_used, status.bytes_reserved) == (0, 0, 0)

    with connect(plane.handle) as client:
        client.register("p", SCHEMA, ["a"])
        asyncio.run(use(client))


def test_a_signal_while_a_taking_back_begins_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    undone: list[int] = []
    real, errors = _threads.run, [OwnError("second")]

    def run(job: Any) -> None:
        if job.__name__ == "_abandon" and errors:
            raise errors.pop()
        real(job)

    shielded = Shielded(lambda cancellation: 7, undone.append)
    shielded._ended = RaisesOnceAcquired(shielded._ended)  # type: ignore[assignment]
    monkeypatch.setattr(_threads, "run", run)
    with pytest.raises(OwnError, match="^$"):
        shielded.result()
    assert undone == [7] and not errors


def test_the_main_thread_is_not_asked_whether_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread.is_alive that is interrupted marks the thread as ended, in Python 3.11 and 3.12."""
    monkeypatch.setattr(threading.Thread, "is_alive", lambda thread: pytest.fail("it was asked"))
    assert can_be_interrupted()


def test_jobs_that_wait_for_each_other_have_threads_of_their_own() -> None:
    threads, ends = _Threads(), [threading.Event() for _ in range(20)]

    def job(number: int) -> None:
        if number + 1 < len(ends):
            threads.run(lambda: job(number + 1))
            assert ends[number + 1].wait(10)
        ends[number].set()

    for _ in range(3):
        threads.run(lambda: job(0))
        assert ends[0].wait(10)
        for end in ends:
            end.clear()


def test_a_job_runs_in_this_thread_when_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    ran: list[str] = []
    _Threads().run(lambda: ran.append(threading.current_thread().name))
    assert ran == [threading.current_thread().name]
