"""Draws the schedule of a chaos benchmark from a seed: which faults strike in which order, and for how long."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .pairs import PAIRS, STORES, Pair, StoreKind

TWICE = 2
"""Minimum number of times that each fault must strike each kind of process for which it is planned."""
REST_S = 1.5
"""Maximum number of seconds between the recovery from a fault and the next fault."""
LASTS_S = (1.0, 4.0)
"""Minimum and maximum duration of a fault in seconds."""
ON_TOP_SHARE = 0.15
"""Share of faults after which the next fault strikes without waiting for the run's recovery."""


@dataclass(frozen=True, slots=True)
class Injury:
    """One planned fault: where, for how long, and how it follows the fault before it."""

    pair: Pair
    lasts_s: float
    """Duration of the fault in seconds. A kill or a cut ignores it, because it is over at once."""
    rest_s: float
    """Seconds to wait before this fault, once the run has recovered from the one before."""
    on_top: bool
    """True if the next fault is to strike without waiting until the run has recovered from this one."""
    choice: float
    """Random number in [0, 1) that selects one of the run's processes of the wanted kind."""


def schedule(seed: int) -> dict[StoreKind, list[Injury]]:
    """Return the planned faults of each store's run, in random order. Over all runs together, each pair (a kind of
    fault in a kind of process) occurs at least twice.

    If a run has suffered all of its faults before its time is over, it goes on with those of `more`.
    """
    dice = random.Random(seed)
    found: dict[StoreKind, list[Pair]] = {store: [] for store in STORES}
    for position, pair in enumerate(PAIRS):
        for number in range(TWICE):  # in another store each time, and equally often in each store over all pairs
            found[pair.stores[(position + number) % len(pair.stores)]].append(pair)
    return {store: _injuries(pairs, dice) for store, pairs in found.items()}


def more(store: StoreKind, seed: int, again: int) -> list[Injury]:
    """Return further faults for a run that has suffered all faults of `schedule`. Each pair that exists with the store
    comes once, in a new random order.

    again: 1 for the first additional list, 2 for the second, and so on.
    """
    pairs = [pair for pair in PAIRS if store in pair.stores]
    return _injuries(pairs, random.Random(f"{seed}/{store}/{again}"))


def _injuries(pairs: list[Pair], dice: random.Random) -> list[Injury]:
    pairs = list(pairs)
    dice.shuffle(pairs)
    return [
        Injury(
            pair,
            lasts_s=dice.uniform(*LASTS_S),
            rest_s=dice.uniform(0.0, REST_S),
            on_top=dice.random() < ON_TOP_SHARE,
            choice=dice.random(),
        )
        for pair in pairs
    ]
