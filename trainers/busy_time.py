"""Busy time: when actors were at work, and how much of a stretch of time that fills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Busy:
    """One piece of work. Those of an actor may overlap."""

    actor: str
    start_s: float
    """`time.monotonic` of the driver, like `end_s`."""
    end_s: float
    """Infinite while it goes on."""


def covered_s(work: Iterable[Busy], start_s: float, end_s: float) -> float:
    """Seconds between `start_s` and `end_s` in which at least one of `work` was under way."""
    total, reached = 0.0, start_s
    for piece in sorted(work, key=lambda piece: piece.start_s):
        stop = min(piece.end_s, end_s)
        total += max(0.0, stop - max(piece.start_s, reached))
        reached = max(reached, stop)
    return total


def mean_covered_s(work: Iterable[Busy], num_actors: int, start_s: float, end_s: float) -> float:
    """`covered_s` of each of `num_actors` actors, on average; an actor without work has 0."""
    by_actor: dict[str, list[Busy]] = {}
    for piece in work:
        by_actor.setdefault(piece.actor, []).append(piece)
    return sum(covered_s(pieces, start_s, end_s) for pieces in by_actor.values()) / max(1, num_actors)
