"""Signals to stop that come during the optimizer step."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from headrace.trainers.grpo.training_modes import interrupts_held


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """A shell that started the tests in the background has SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "it is restored"
    signal.signal(signal.SIGINT, before)


def test_the_first_interrupt_waits_for_the_end_of_the_body() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached


def test_the_second_interrupt_is_raised_at_once_and_only_once() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("not reached")
    assert caught.value.__context__ is None


def test_an_interrupt_is_not_lost_when_the_body_fails() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, interrupts_held():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("a worker died")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_signal_that_nobody_handles_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_an_interrupt_nothing_is_raised() -> None:
    with interrupts_held():
        pass
