"""The schedule of a benchmark: which fault comes when, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from .pairs import PAIRS, Pair

StoreKind = Literal["shm", "simple"]
STORES: tuple[StoreKind, ...] = ("shm", "simple")
"""Stores of the benchmark's runs, one after another: with `shm` the engines are embedded in the rollout actors, with
`simple` they are actors of their own, and there is a storage unit."""
TWICE = 2
"""Number of times that each pair comes at least."""
REST_S = 1.5
"""Longest rest between a recovery and the next fault."""
LASTS_S = (1.0, 4.0)
"""Shortest and longest time that a fault lasts."""
ON_TOP_SHARE = 0.15
"""Share of faults that do not wait until the run has recovered from the one before."""


@dataclass(frozen=True, slots=True)
class Injury:
    """One fault that is to come."""

    pair: Pair
    lasts_s: float
    """Seconds that it lasts; a kill or a cut is over at once."""
    rest_s: float
    """Seconds after the recovery from the fault before."""
    on_top: bool
    """Whether it comes without waiting for that recovery."""
    choice: float
    """Number in [0, 1) that chooses one of several processes of the kind."""


def schedule(seed: int) -> dict[StoreKind, list[Injury]]:
    """Return the faults of each store's run, in their order. Over all runs, each pair comes at least twice.

    A run that has suffered all of them and has time left begins again with another order (`more`).
    """
    dice = random.Random(seed)
    found: dict[StoreKind, list[Pair]] = {store: [] for store in STORES}
    for pair in PAIRS:
        if pair.store == "any":
            for number in range(TWICE):
                found[STORES[number % len(STORES)]].append(pair)
        else:
            found[pair.store] += [pair] * TWICE
    return {store: _injuries(pairs, dice) for store, pairs in found.items()}


def more(store: StoreKind, seed: int, again: int) -> list[Injury]:
    """Return faults for a run that has suffered those of `schedule`: each pair of the store once, in another order.

    again: 1 for the first such list, 2 for the next.
    """
    pairs = [pair for pair in PAIRS if pair.store in ("any", store)]
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
