"""Waits for calls for as long as the actors that have not answered get on with their work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .calls import ActorFailed, ActorHandle, Call, ended

T = TypeVar("T")

LOOK_S = 1.0
"""Seconds between two questions how far an actor is."""


def gather_moving(
    calls: Sequence[Call[T]], stage: str, timeout_s: float, ask: Callable[[Any], Call[int]]
) -> list[T | ActorFailed]:
    """Wait for all calls; returns, in order, each call's result or its ActorFailed.

    The wait ends `timeout_s` after the last sign of progress of those that have not answered, however long it has taken
    until then. ask: asks an actor for a number that changes whenever it gets on.
    """
    results: dict[Call[T], T | ActorFailed] = {}
    questions: dict[ActorHandle, Call[int]] = {}
    seen: dict[ActorHandle, int] = {}
    look_s, since = min(LOOK_S, timeout_s / 4), time.monotonic()
    while pending := [call for call in calls if call not in results]:
        left_s = since + timeout_s - time.monotonic()
        if left_s <= 0.0:
            break
        results.update(ended(pending, stage, min(look_s, left_s)))
        for call in pending:
            if call not in results and call.actor not in questions:
                questions[call.actor] = ask(call.actor)
        for question, answer in ended(list(questions.values()), stage, 0.0):
            del questions[question.actor]
            if isinstance(answer, ActorFailed):
                continue  # the call itself says what happened
            if seen.setdefault(question.actor, answer) != answer:
                seen[question.actor], since = answer, time.monotonic()
    late = f"{stage}: no answer and no progress within {timeout_s:g} s from"
    return [results[call] if call in results else ActorFailed(f"{late} {call.actor.info}") for call in calls]
