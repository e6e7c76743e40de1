"""The ledger compares the rows that were trained with the rows that were put, over the history that survived.

A run that goes back to a checkpoint takes steps again that it has taken before; what they did to the weights is undone,
and their rows are trained again, as they must be. So "twice" means: twice in the history that survived. It is defined
by the notes of the driver and of the train workers:

- An epoch begins whenever the driver opens a feed, at step c: at the start, or after going back to the checkpoint of
  step c. Data plane and partition together are unique to an epoch.
- A step n is committed in an epoch when the driver counts it, after all train workers have taken the optimizer step.
- Step n of the history that survived is the one of the last epoch that began before it (c < n). Earlier epochs' step n
  was undone, as all steps after c are when a run goes back to c.

The prompts come in the order of their positions (`in_order`), P groups of G rows a step. So the history of N steps must
have trained every row of the positions 0 to N * P - 1, and each of them once:

lost         a row of these positions that no surviving step has trained
twice        a row that surviving steps have trained more than once, or that was put twice into one partition
wrong bytes  a row that a train worker read with other bytes than were put under its key there, or trained unread
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...actors.protocols import TRAIN_FIELDS
from ...actors.rollout.prompts import base36, row_key
from .control import Note

Place = tuple[int, str]
"""Id of the data plane, and the partition."""
SHOWN = 5
"""Number of keys that are named in a complaint."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The outcome of the comparison."""

    steps: int
    """Number of steps of the history that survived."""
    undone: int
    """Number of steps that were committed and undone."""
    epochs: int
    rows_put: int
    """Number of different rows that were put, by key."""
    rows_trained: int
    """Number of rows of the history that survived."""
    reads_checked: int
    """Number of rows that train workers read, each compared field by field."""
    lost: list[str] = field(default_factory=list)
    """Keys."""
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """Sentences about notes that contradict one another."""

    @property
    def complaints(self) -> list[str]:
        """Return a sentence for each kind of error that was found."""
        found = [
            f"{len(keys)} rows {what}: {', '.join(keys[:SHOWN])}"
            for what, keys in (
                ("were put and lost", self.lost),
                ("were trained or put twice", self.twice),
                ("had wrong bytes", self.wrong),
            )
            if keys
        ]
        return found + self.odd


@dataclass(slots=True)
class _Epoch:
    """The time from one opening of a feed to the next."""

    place: Place
    after: int
    """Step after which it begins."""
    committed: dict[int, list[int]] = field(default_factory=dict)
    """Positions of the groups of each committed step."""


def balance(notes: Iterable[Note], *, prompts_per_step: int, group_size: int) -> Balance:
    """Compare what the notes of one run say. They must be in the order of time."""
    epochs: list[_Epoch] = []
    by_place: dict[Place, _Epoch] = {}
    trained: dict[tuple[Place, int], list[str]] = defaultdict(list)
    put = _Puts()
    reads: list[tuple[Place, Note]] = []
    odd: list[str] = []
    for note in notes:
        if "plane" not in note:
            continue
        place = (note["plane"], note["partition"])
        if "begins" in note:
            epochs.append(_Epoch(place, note["begins"]))
            if place in by_place:
                odd.append(f"the partition {place[1]} of data plane {place[0]} was opened twice")
            by_place[place] = epochs[-1]
        elif "committed" in note:
            by_place[place].committed[note["committed"]] = note["positions"]
        elif "trained" in note:
            trained[place, note["trained"]] += note["keys"]
        elif "putting" in note:
            put.intend(place, note)
        elif "put" in note:
            put.confirm(place, note)
        elif "read" in note:
            reads.append((place, note))
    wrong, seen = put.compare(reads)
    surviving = _surviving(epochs, odd)
    keys: list[str] = []
    for step, epoch in surviving.items():
        mine = trained.get((epoch.place, step), [])
        wanted = [row_key(base36(p), s) for p in epoch.committed[step] for s in range(group_size)]
        if sorted(mine) != sorted(wanted):
            odd.append(
                f"step {step} trained {len(mine)} rows, the driver counted {len(wanted)} "
                f"({len(set(mine) ^ set(wanted))} differ)"
            )
        wrong += [key for key in mine if (epoch.place, key) not in seen]
        keys += mine
    counts = Counter(keys)
    expected = [row_key(base36(p), s) for p in range(len(surviving) * prompts_per_step) for s in range(group_size)]
    foreign = counts.keys() - set(expected)
    if foreign:
        odd.append(f"{len(foreign)} rows were trained before their turn: {', '.join(sorted(foreign)[:SHOWN])}")
    return Balance(
        steps=len(surviving),
        undone=sum(len(epoch.committed) for epoch in epochs) - len(surviving),
        epochs=len(epochs),
        rows_put=len(put.keys),
        rows_trained=len(keys),
        reads_checked=sum(len(note["keys"]) for _, note in reads),
        lost=[key for key in expected if key not in counts],
        twice=[key for key, count in counts.items() if count > 1] + put.twice,
        wrong=sorted(set(wrong)),
        odd=odd,
    )


def _surviving(epochs: list[_Epoch], odd: list[str]) -> dict[int, _Epoch]:
    """Return the epoch of each step of the history that survived."""
    history: dict[int, _Epoch] = {}
    for epoch in epochs:
        missing = [step for step in range(1, epoch.after + 1) if step not in history]
        if missing:
            odd.append(f"the run went on after step {epoch.after}, but step {missing[0]} was never counted")
        history = {step: earlier for step, earlier in history.items() if step <= epoch.after}
        history |= dict.fromkeys(sorted(epoch.committed), epoch)
    last = max(history, default=0)
    gaps = sorted(set(range(1, last + 1)) - history.keys())
    if gaps:
        odd.append(f"the history ends at step {last}, but step {gaps[0]} is missing")
    return history


class _Puts:
    """The rows that were put into each partition, with their digests by field."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.twice: list[str] = []
        self._intended: dict[tuple[Place, str], list[tuple[int, dict[str, str]]]] = defaultdict(list)
        """(pid, digests by field) of each attempt to put a row."""
        self._done: dict[tuple[Place, str], dict[str, str]] = {}

    def intend(self, place: Place, note: Note) -> None:
        for number, key in enumerate(note["keys"]):
            digests = {name: values[number] for name, values in note["putting"].items()}
            self._intended[place, key].append((note["pid"], digests))

    def confirm(self, place: Place, note: Note) -> None:
        for key in note["keys"]:
            self.keys.add(key)
            if (place, key) in self._done:
                self.twice.append(key)
            mine = [digests for pid, digests in self._intended[place, key] if pid == note["pid"]]
            self._done[place, key] = mine[-1] if mine else {}

    def compare(self, reads: Iterable[tuple[Place, Note]]) -> tuple[list[str], set[tuple[Place, str]]]:
        """Return the keys that were read with other bytes than were put, and the rows that were read whole and right.

        A row whose put was not confirmed, as its process was killed, may be that of any attempt.
        """
        wrong: list[str] = []
        fields: dict[tuple[Place, str], set[str]] = defaultdict(set)
        for place, note in reads:
            for number, key in enumerate(note["keys"]):
                found = {name: values[number] for name, values in note["read"].items()}
                done = self._done.get((place, key))
                attempts = [done] if done else [digests for _, digests in self._intended.get((place, key), [])]
                # Columns that train workers have written themselves were not put by a rollout actor.
                right = any(
                    all(digests.get(name, value) == value for name, value in found.items()) for digests in attempts
                )
                if right:
                    fields[place, key] |= found.keys()
                else:
                    wrong.append(key)
        return wrong, {row for row, names in fields.items() if names >= set(TRAIN_FIELDS)}
