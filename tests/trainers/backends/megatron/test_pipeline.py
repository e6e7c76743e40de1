"""The order of passes in `OpenPipeline`: no stage waits for ever, however a step is cut into calls, or runs ahead.

Stages are threads; a message is taken by its receiver before its sender continues, as with the strictest of transports.
"""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.tests.example_counts import examples

pytestmark = pytest.mark.megatron
BOUND_S = 60.0


class Wire:
    """One direction between two stages: `send` returns once the message was received."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Any] = queue.Queue(1)
        self._taken = threading.Semaphore(0)

    def put(self, message: Any) -> None:
        self._messages.put(message, timeout=BOUND_S)

    def wait(self) -> None:
        assert self._taken.acquire(timeout=BOUND_S), "the stage did not receive it"

    def receive(self) -> Any:
        message = self._messages.get(timeout=BOUND_S)
        self._taken.release()
        return message


class Neighbours:
    """As much of Megatron's `P2PCommunicator` as a pipeline uses. `down` and `up` are the wires before and behind."""

    def __init__(self, before: tuple[Wire, Wire] | None, behind: tuple[Wire, Wire] | None) -> None:
        self.before, self.behind = before, behind

    def recv_forward(self, shapes: Any, first: bool) -> Any:
        return None if self.before is None else self.before[0].receive()

    def send_forward(self, sent: Any, last: bool) -> None:
        if self.behind is not None:
            self.behind[0].put(sent)
            self.behind[0].wait()

    def recv_backward(self, shapes: Any, last: bool) -> Any:
        return None if self.behind is None else self.behind[1].receive()

    def send_backward(self, gradient: Any, first: bool) -> None:
        if self.before is not None:
            self.before[1].put(gradient)
            self.before[1].wait()

    def send_forward_recv_backward(self, sent: Any, shapes: Any, last: bool) -> Any:
        if self.behind is None:
            return None
        self.behind[0].put(sent)
        gradient = self.behind[1].receive()
        self.behind[0].wait()
        return gradient

    def send_backward_recv_forward(self, gradient: Any, shapes: Any, first: bool) -> Any:
        if self.before is None:
            return None
        self.before[1].put(gradient)
        received = self.before[0].receive()
        self.before[1].wait()
        return received


def passes(depth: int, steps: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """The passes of each of `depth` stages in order, as (letter, microbatch). steps: for each step the counts of its
    calls."""
    from headrace.trainers.backends.megatron import library, pipeline

    def forward_step(forward: Any, micros: Any, model: Any, count: int, received: Any, *_: Any, **__: Any) -> Any:
        micro = next(micros)
        assert received in (None, micro), "the stage before has sent another microbatch"
        model.append(("F", micro))
        return micro, 0

    def backward_step(received: Any, sent: Any, gradient: Any, *_: Any) -> Any:
        assert gradient in (None, sent), "the stage behind has sent another gradient"
        orders[threading.current_thread().name].append(("B", sent))
        return sent

    wires = [(Wire(), Wire()) for _ in range(depth - 1)]
    orders: dict[str, list[tuple[str, int]]] = {str(stage): [] for stage in range(depth)}
    failures: list[BaseException] = []

    def run(stage: int) -> None:
        neighbours = Neighbours(wires[stage - 1] if stage else None, wires[stage] if stage < depth - 1 else None)
        pipe = pipeline.OpenPipeline(orders[str(stage)])
        made = pipeline._Stage(neighbours, None, None, stage == 0, stage == depth - 1, depth - 1 - stage)
        pipe._stage = lambda: made
        micros = iter(range(10_000))
        try:
            for counts in steps:
                for count in counts:
                    pipe.run(micros, count, None)
                pipe.drain()
        except BaseException as error:
            failures.append(error)

    with monkeypatch.context() as patched:
        patched.setattr(library, "forward_step", forward_step)
        patched.setattr(library, "backward_step", backward_step)
        patched.setattr(library, "get_model_type", lambda model: None)
        patched.setattr(library, "parallel_state", SimpleNamespace(get_context_parallel_world_size=lambda: 1))
        threads = [threading.Thread(target=run, args=(stage,), name=str(stage)) for stage in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
    assert not failures and not any(thread.is_alive() for thread in threads), failures
    return list(orders.values())


@pytest.mark.processes  # the first import of megatron-core 0.19 asks git for a revision
@settings(max_examples=examples(60))
@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=2))
def test_every_stage_runs_each_pass_once_and_in_order(depth: int, steps: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = passes(depth, steps, patch)
    for stage, order in enumerate(found):
        for letter in "FB":
            assert [micro for one, micro in order if one == letter] == list(range(sum(map(sum, steps))))
        open_now = 0
        for letter, _ in order:
            open_now += 1 if letter == "F" else -1
            assert 0 <= open_now <= depth - stage, "it holds the activations of more microbatches than it needs to"


def test_calls_do_not_change_the_order_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = passes(3, [[9]], monkeypatch)
    assert passes(3, [[1, 1, 3, 2, 2]], monkeypatch) == whole
    assert "".join(letter for letter, _ in whole[0]) == "FF" + 7 * "FB" + "BB"
