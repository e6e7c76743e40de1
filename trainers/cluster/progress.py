"""Tells actors that are slow from those that are stuck: asks them how far they are while they work on long calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from .calls import ActorFailed, Call, ended
from .handles import EngineHandle, TrainHandle

T = TypeVar("T")

ASK_EVERY_S = 1.0
"""Seconds between two questions to the same actor."""


class ProgressWatch:
    """Asks actors how far they are, one question at a time to each, and knows for how long each has stood still."""

    def __init__(self, actors: Iterable[EngineHandle | TrainHandle]) -> None:
        """Begin to watch. Nobody is asked before the first `look`."""
        now = time.monotonic()
        self._asked = dict[EngineHandle | TrainHandle, Call[int]]()
        """The question that each actor has not answered yet."""
        self._figures = dict[EngineHandle | TrainHandle, int]()
        self._moved_s = dict.fromkeys(actors, now)
        self._answered_s = dict.fromkeys(self._moved_s, now)
        self._next_s = dict.fromkeys(self._moved_s, now)
        """Time at which each actor may be asked again."""

    def look(self) -> tuple[bool, dict[EngineHandle | TrainHandle, ActorFailed]]:
        """Take the answers that are there, and ask again; waits for nothing.

        Returns whether any actor has moved, and the actors that failed to answer, with how they failed.
        """
        moved, failed = False, dict[EngineHandle | TrainHandle, ActorFailed]()
        by_call = {call: actor for actor, call in self._asked.items()}
        now = time.monotonic()
        for call, answer in ended(list(by_call), "progress", 0.0):
            actor = by_call[call]
            del self._asked[actor]
            if isinstance(answer, ActorFailed):
                failed[actor] = answer
                continue
            self._answered_s[actor] = now
            if actor not in self._figures or answer != self._figures[actor]:
                moved |= actor in self._figures
                self._figures[actor] = answer
                self._moved_s[actor] = now
        for actor, next_s in self._next_s.items():
            if actor not in self._asked and now >= next_s:
                self._asked[actor] = actor.progress()
                self._next_s[actor] = now + ASK_EVERY_S
        return moved, failed

    def still_s(self, actor: EngineHandle | TrainHandle) -> float:
        """Seconds in which `actor` has made no progress; 0.0 for one that is not watched."""
        return self._since(self._moved_s, actor)

    def silent_s(self, actor: EngineHandle | TrainHandle) -> float:
        """Seconds since `actor` last answered; 0.0 for one that is not watched."""
        return self._since(self._answered_s, actor)

    def _since(self, times: dict[EngineHandle | TrainHandle, float], actor: EngineHandle | TrainHandle) -> float:
        return time.monotonic() - times[actor] if actor in times else 0.0


def gather_slow(
    calls: Sequence[Call[T]],
    workers: Sequence[TrainHandle],
    stage: str,
    *,
    silence_s: float,
    stall_s: float,
    num_bytes: Callable[[], int] = lambda: 0,
    on_look: Callable[[], None] = lambda: None,
) -> list[T]:
    """Wait for calls of train workers that may take hours, as long as the workers get on with them.

    silence_s: seconds for which a worker may leave questions unanswered. stall_s: seconds in which something must move:
    a worker's figure of progress, or `num_bytes`, the bytes that are written so far. on_look is called after each look,
    about once a second, at which nobody was found stuck. The first failure of any call ends the wait at once.

    Raises ActorFailed when a worker died, raised (see its `cause`), or does not get on.
    """
    watch = ProgressWatch(workers)
    results = dict[Call[T], T]()
    written, moved_s = num_bytes(), time.monotonic()
    while pending := [call for call in calls if call not in results]:
        for call, outcome in ended(pending, stage, ASK_EVERY_S):
            if isinstance(outcome, ActorFailed):
                raise outcome
            results[call] = outcome
        moved, _ = watch.look()
        now = time.monotonic()
        if moved or num_bytes() != written:
            written, moved_s = num_bytes(), now
        silent = [worker for worker in workers if watch.silent_s(worker) >= silence_s]
        if silent and len(results) < len(calls):
            names = ", ".join(str(worker.info) for worker in silent)
            raise ActorFailed(f"{stage}: no sign of life within {silence_s:g} s from {names}")
        if now - moved_s >= stall_s:
            late = ", ".join(str(call.actor.info) for call in pending if call not in results)
            raise ActorFailed(f"{stage}: {late} wrote and computed nothing for {stall_s:g} s")
        on_look()
    return [results[call] for call in calls]
