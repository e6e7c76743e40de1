"""Compares the turns that a run trained on with the answers that its engines made, and lengths between two runs.

An answer belongs to the turn that has its tokens and log-probs and follows the tokens that it continued. The engine
draws every answer anew, so a turn that was drawn again after a kill differs from the one before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.tests.drills.agents.recording import digest
from headrace.tests.drills.chaos.control import Note

Pieces = dict[tuple[str, str], list[tuple[list[int], list[float]]]]
"""Answers by episode and by the digest of the tokens that they continue: token ids and log-probs."""
DRAWS = 10_000


@dataclass(slots=True)
class Accounts:
    """What a run trained on, turn by turn."""

    turns: dict[str, int] = field(default_factory=dict)
    """Row key -> number of turns of the policy."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Row key -> number of tokens of the policy."""
    foreign: list[str] = field(default_factory=list)
    """Turns with tokens that no engine made at that place."""
    twice: list[str] = field(default_factory=list)
    """Answers that are in several turns."""
    lost: list[str] = field(default_factory=list)
    """Answers that the journal had at a kill, of episodes that were trained on without them."""


def accounts(notes: Sequence[Note], journaled: Sequence[tuple[str, list[int]]] = ()) -> Accounts:
    """Return the accounts of a run. notes: notes of the recording hook, in order of time. journaled: answers that the
    journal of turns had at kills, as (episode, token ids)."""
    pieces, puts, place_of = _read(notes)
    found, used = Accounts(), Counter[tuple[str, str, int]]()
    kept: defaultdict[str, list[list[int]]] = defaultdict(list)
    for key, place in sorted(place_of.items()):
        ids, mask, logprobs = puts[place, key]
        spans = list(_turns(mask))
        found.turns[key], found.tokens[key] = len(spans), sum(mask)
        for start, end in spans:
            while start < end:
                at = (key, digest(ids[:start]))
                fits = [
                    number
                    for number, (made, probs) in enumerate(pieces.get(at, ()))
                    if made and ids[start : start + len(made)] == made and logprobs[start : start + len(made)] == probs
                ]
                if not fits:
                    found.foreign.append(f"{key} at {start}")
                    break
                used[*at, fits[0]] += 1
                made = pieces[at][fits[0]][0]
                kept[key].append(made)
                start += len(made)
    found.twice = [f"{key} after {after}" for (key, after, _), count in used.items() if count > 1]
    found.lost = [f"{key}: {ids}" for key, ids in journaled if key in place_of and ids not in kept[key]]
    return found


def _read(notes: Sequence[Note]) -> tuple[Pieces, dict, dict[str, tuple[int, str]]]:
    """Return the answers, the rows that were put by place and key, and the place of each trained row. A step that was
    undone is trained again later, so that the last note about a row counts."""
    pieces: Pieces = defaultdict(list)
    puts, place_of = {}, {}
    for note in notes:
        if "made" in note:
            episode = note["made"].partition("/")[0]
            for ids, logprobs in note["answers"]:
                pieces[episode, note["after"]].append((ids, logprobs))
        elif "tokens" in note:
            rows = zip(note["keys"], note["tokens"], strict=True)
            puts |= {((note["plane"], note["partition"]), key): row for key, row in rows}
        elif "trained" in note:
            place_of |= dict.fromkeys(note["keys"], (note["plane"], note["partition"]))
    return pieces, puts, place_of


def _turns(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    yield from zip(edges[::2], edges[1::2], strict=True)


# ---------------------------------------------------------------- two samples


def chance(first: Sequence[float], second: Sequence[float], seed: int = 0) -> float:
    """Return the p-value of a two-sided permutation test of equal means, over DRAWS permutations."""
    both, count = np.array([*first, *second], float), len(first)
    rng = np.random.default_rng(seed)
    seen = abs(both[:count].mean() - both[count:].mean())
    sums = np.array([rng.permutation(both)[:count].sum() for _ in range(DRAWS)])
    far = np.abs(sums / count - (both.sum() - sums) / (len(both) - count)) >= seen - 1e-12
    return (1 + int(far.sum())) / (1 + DRAWS)


def power(count: int, share: float, other: float, level: float, trials: int = 4000, seed: int = 0) -> float:
    """Return the probability that a two-sample test notices another share of long episodes.

    count: number of episodes of each sample. share, other: share of long episodes in each. level: level of the test.
    With two lengths, the permutation test of the means is a test of the two shares; a normal one stands for it here.
    """
    rng = np.random.default_rng(seed)
    first, second = rng.binomial(count, share, trials) / count, rng.binomial(count, other, trials) / count
    pooled = (first + second) / 2
    z = np.abs(first - second) / np.sqrt(np.maximum(2 * pooled * (1 - pooled) / count, 1e-12))
    return float(np.mean(z > {0.01: 2.576, 0.05: 1.960}[level]))
