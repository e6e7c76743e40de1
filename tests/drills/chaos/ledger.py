"""The ledger compares the rows that a run trained on with the rows that were put, to find lost and doubled rows.

When a run goes back to a checkpoint, it repeats the steps after that checkpoint. The first attempt is undone: its
effect on the weights is lost, and its rows must be trained on again. Only the steps that were not undone count. They
are called the surviving history, and follow from the notes of the driver and of the train workers:

- An epoch begins at step c whenever the driver opens a feed of rollouts: at its start, or after going back to the
  checkpoint of step c. No two epochs share the same data plane and partition.
- Step n is committed in an epoch when the driver counts it, after all train workers have taken the optimizer step.
- The surviving step n is the one of the last epoch that began before it (c < n). Step n of an earlier epoch was undone,
  because going back to step c undoes all steps after c.

Prompts are taken in the order of their positions in the prompt stream (sampler `in_order`), P prompts with G rows each
per step. A surviving history of N steps must therefore have trained on every row of positions 0 to N * P - 1 exactly
once. Errors are:

lost         a row of these positions on which no surviving step has trained
twice        a row on which surviving steps have trained more than once, or that was put twice into one partition
wrong bytes  one that was read with other bytes than were put under its key in that partition, or that was trained on
             although no complete and correct read of it was noted
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.actors.images.config import IMAGES
from headrace.actors.protocols import TRAIN_FIELDS
from headrace.actors.rollout.prompts import base36, row_key
from headrace.tests.drills.chaos.control import Note

Place = tuple[int, str]
"""Place where a row was put: (id of the data plane, name of the partition)."""
SHOWN = 5
"""Maximum number of row keys that an error message quotes."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Result of comparing the rows that a run trained on with the rows that were put."""

    steps: int
    """Number of steps in the surviving history, which no return to a checkpoint has undone."""
    undone: int
    """Number of steps that were committed, and later undone by a return to a checkpoint."""
    epochs: int
    rows_put: int
    """Number of distinct keys among the rows that were put."""
    rows_trained: int
    """Number of rows that the surviving steps trained on."""
    reads_checked: int
    """Number of rows that train workers read. Each was compared, field by field, with what was put."""
    lost: list[str] = field(default_factory=list)
    """Keys of the rows on which the surviving steps should have trained, but did not."""
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    """Sentences about notes that contradict each other or the order of the prompts."""

    @property
    def complaints(self) -> list[str]:
        """Return one sentence for each kind of row error that was found, followed by the sentences of `odd`."""
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
    """The part of a run between two moments at which the driver opened a feed of rollouts."""

    place: Place
    after: int
    """Number of the step from which the epoch continues; 0 at the start of a run."""
    committed: dict[int, list[int]] = field(default_factory=dict)
    """For each committed step, the positions of its groups in the prompt stream."""


def balance(notes: Iterable[Note], *, prompts_per_step: int, group_size: int, may_lose_rows: bool = False) -> Balance:
    """Compare the rows put, read and trained on according to the notes of one run, which must be in order of time.

    may_lose_rows: True if hosts with rows were lost, whose rows are made again and put into the same partition."""
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
        twice=[key for key, count in counts.items() if count > 1] + ([] if may_lose_rows else put.twice),
        wrong=sorted(set(wrong)),
        odd=odd,
    )


def _surviving(epochs: list[_Epoch], odd: list[str]) -> dict[int, _Epoch]:
    """Return the epoch to which each step of the surviving history belongs, by step number. Steps that are missing in
    the notes are reported in `odd`."""
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
    """The rows that were put into each partition, with a digest of each field."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.twice: list[str] = []
        self._intended: dict[tuple[Place, str], list[tuple[int, dict[str, str]]]] = defaultdict(list)
        """For each row, all attempts to put it: (pid of the writer, field name -> digest)."""
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
        """Return the keys of rows that were read with wrong bytes, and the rows that were read correctly. Wrong bytes
        are others than were put; correct are rows of which all training fields were.

        If no put of a row was confirmed, because its writer was killed, the bytes of any attempt to put it count as
        correct.
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
        shown = {IMAGES} & {name for digests in self._done.values() for name in digests}
        return wrong, {row for row, names in fields.items() if names >= {*TRAIN_FIELDS, *shown}}
