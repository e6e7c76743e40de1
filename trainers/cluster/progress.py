"""Tells slow actors from stuck ones: asks them about their progress while they work on long calls.

`gather_moving` waits for calls that may fail independently of each other, and returns each one's outcome. `gather_slow`
waits for calls of train workers that are useful only together, and raises the first failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from .calls import ActorFailed, ActorHandle, Call, ended
from .handles import TrainHandle

T = TypeVar("T")

ASK_EVERY_S = 1.0
"""Seconds between two progress queries to the same actor."""


class ProgressWatch:
    """Queries actors about their progress, with at most one unanswered query to each, and tracks how long each has made
    no progress."""

    def __init__(
        self,
        actors: Iterable[ActorHandle],
        ask: Callable[[Any], Call[int]] = lambda actor: actor.progress(),
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        """Begin to watch `actors`. No actor is queried before the first `look`.

        ask: function that queries an actor for a number that changes whenever it makes progress. ask_every_s: seconds
        between two queries to the same actor.
        """
        now = time.monotonic()
        self._ask = ask
        self._ask_every_s = ask_every_s
        self._asked = dict[ActorHandle, Call[int]]()
        """Unanswered queries: actor -> call."""
        self._figures = dict[ActorHandle, int]()
        self._moved_s = dict.fromkeys(actors, now)
        self._answered_s = dict.fromkeys(self._moved_s, now)
        self._next_s = dict.fromkeys(self._moved_s, now)
        """Actor -> `time.monotonic` time from which it may be queried again."""

    def look(self, only: Collection[ActorHandle] | None = None) -> tuple[bool, dict[ActorHandle, ActorFailed]]:
        """Collect the answers that have arrived and send new queries, without waiting for their answers.

        only: actors to query again; None queries all watched actors. Returns whether any actor has made progress, and
        the queries that failed: actor -> failure.
        """
        moved, failed = False, dict[ActorHandle, ActorFailed]()
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
            if actor not in self._asked and now >= next_s and (only is None or actor in only):
                self._asked[actor] = self._ask(actor)
                self._next_s[actor] = now + self._ask_every_s
        return moved, failed

    def still_s(self, actor: ActorHandle) -> float:
        """Return for how many seconds `actor` has made no progress; 0.0 for an actor that is not watched."""
        return self._since(self._moved_s, actor)

    def silent_s(self, actor: ActorHandle) -> float:
        """Return the seconds since `actor` last answered a query; 0.0 for an actor that is not watched."""
        return self._since(self._answered_s, actor)

    def _since(self, times: dict[ActorHandle, float], actor: ActorHandle) -> float:
        return time.monotonic() - times[actor] if actor in times else 0.0


def gather_moving(
    calls: Sequence[Call[T]], stage: str, timeout_s: float, ask: Callable[[Any], Call[int]]
) -> list[T | ActorFailed]:
    """Wait for all calls; returns, in order, each call's result or its ActorFailed.

    The wait has no time limit while any actor that has not answered makes progress; it ends when none has made any for
    `timeout_s` seconds. ask: function that queries an actor for a number that changes whenever it makes progress.
    """
    results: dict[Call[T], T | ActorFailed] = {}
    look_s, moved_s = min(ASK_EVERY_S, timeout_s / 4), time.monotonic()
    watch = ProgressWatch([call.actor for call in calls], ask, look_s)
    while pending := [call for call in calls if call not in results]:
        left_s = moved_s + timeout_s - time.monotonic()
        if left_s <= 0.0:
            break
        results.update(ended(pending, stage, min(look_s, left_s)))
        moved, _ = watch.look([call.actor for call in pending if call not in results])  # their calls tell what failed
        if moved:
            moved_s = time.monotonic()
    late = f"{stage}: no answer and no progress within {timeout_s:g} s from"
    return [results[call] if call in results else ActorFailed(f"{late} {call.actor.info}") for call in calls]


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
    """Wait for calls of train workers that may take hours, and return their results in order. The wait has no time
    limit while the workers make progress; the first failure of any call ends it at once.

    silence_s: seconds for which a worker may leave a progress query unanswered. stall_s: seconds within which the
    progress number of some worker must change, or the number of bytes written so far, which `num_bytes` returns.
    on_look: callback after each check, about once a second, that found no worker stuck.

    Raises ActorFailed if a worker died, raised an exception (see its `cause`), or makes no progress.
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
