"""Cuts weights into cells, so that each process has all of a cell or nothing of it, and lists who can send it to whom.

A cell is the unit of a transfer. Its candidates are the senders that have it; its readers are the receivers of one site
that need it. A site is a host, because a cell crosses a link once for all receivers of a host. Receivers whose own GPU
has what they need are a site of their own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....codecs.integers import ceil_div
from .regions import Box, Party, Specs, within

Owners = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes of a weight, and the numbers of the processes that have or need each."""


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of one weight, or of all weights, as columns with one row for each cell and site."""

    start: np.ndarray
    """Index of the first element in the weight, int64 `[N, axes]`, with zeros for axes that the weight lacks."""
    stop: np.ndarray
    """Index after the last element along each axis, int64 `[N, axes]`, with ones for axes that the weight lacks."""
    nbytes: np.ndarray
    """Number of bytes on the wire, int64 `[N]`."""
    candidates: np.ndarray
    """Number of the set of senders that can send the cell, in `GroupSets`, int64 `[N]`."""
    readers: np.ndarray
    """Number of the set of receivers that need the cell, in `GroupSets`, int64 `[N]`."""
    weight: np.ndarray
    """Number of the weight in the specs, int64 `[N]`."""


@dataclass(slots=True)
class GroupSets:
    """Numbers the sets of processes that occur, in the order in which they first occur."""

    sets: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def number(self, members: tuple[int, ...]) -> int:
        """Return the number of a set."""
        if members not in self._numbers:
            self._numbers[members] = len(self.sets)
            self.sets.append(members)
        return self._numbers[members]


class CellMaker:
    """Makes the cells of all weights for one set of senders and receivers."""

    def __init__(self, specs: Specs, senders: Sequence[Party], receivers: Sequence[Party], limit: int) -> None:
        """limit: largest number of bytes of a cell."""
        self._specs, self._senders, self._receivers, self._limit = specs, senders, receivers, limit
        self._axes = max((len(shape) for _, shape in specs.values()), default=0) or 1
        self._held = _by_weight(specs, senders, "sender")
        self._needed = _by_weight(specs, receivers, "receiver")
        self._made: dict[tuple[tuple[int, ...], int, Owners, Owners], Cells] = {}
        """Cells of each kind of weight: the layers of a model are alike."""
        self.candidates, self.readers = GroupSets(), GroupSets()

    def all(self) -> Cells:
        """Return the cells of all weights, site after site. Raises ValueError if a part of a weight that a receiver
        needs is held by no sender."""
        by_site: dict[tuple[str, str], list[tuple[int, Owners]]] = defaultdict(list)
        held_of: list[Owners] = []
        for number, name in enumerate(self._specs):
            held_of.append(tuple((box, tuple(ranks)) for box, ranks in self._held[name].items()))
            for site, needs in self._sites(name).items():
                by_site[site].append((number, tuple((box, tuple(ranks)) for box, ranks in needs.items())))
        names = list(self._specs)
        found = [
            (number, self._cells(names[number], held_of[number], needs))
            for weights in by_site.values()
            for number, needs in weights
        ]
        parts = [cells for _, cells in found]
        weight = np.repeat(np.array([n for n, _ in found], np.int64), [len(cells.nbytes) for cells in parts])
        empty, none = np.zeros((0, self._axes), np.int64), np.zeros(0, np.int64)
        return Cells(
            np.concatenate([empty, *(cells.start for cells in parts)]),
            np.concatenate([empty, *(cells.stop for cells in parts)]),
            np.concatenate([none, *(cells.nbytes for cells in parts)]),
            np.concatenate([none, *(cells.candidates for cells in parts)]),
            np.concatenate([none, *(cells.readers for cells in parts)]),
            weight,
        )

    def _sites(self, name: str) -> Mapping[tuple[str, str], Mapping[Box, list[int]]]:
        """Return the boxes of a weight that each site needs, and the receivers of the site that need each."""
        at: dict[tuple[str, str], list[Box]] = defaultdict(list)
        for box, ranks in self._held[name].items():
            for sender in {(self._senders[rank].host, self._senders[rank].device) for rank in ranks}:
                at[sender].append(box)
        sites: dict[tuple[str, str], dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
        for box, ranks in self._needed[name].items():
            for rank in ranks:
                place = self._receivers[rank].host, self._receivers[rank].device
                own = place[1] and any(within(box, held) for held in at.get(place, ()))
                sites[place if own else (place[0], "")][box].append(rank)
        return sites

    def _cells(self, name: str, held: Owners, needed: Owners) -> Cells:
        dtype, shape = self._specs[name]
        key = (shape, dtype.itemsize, held, needed)
        if key not in self._made:
            self._made[key] = self._make(name, dtype.itemsize, held, needed)
        return self._made[key]

    def _make(self, name: str, itemsize: int, held: Owners, needed: Owners) -> Cells:
        boxes = _corners([box for box, _ in (*held, *needed)], self._axes)
        start, stop = _grid(boxes)
        low, high = boxes[None, :, :, 0], boxes[None, :, :, 1]
        inside: np.ndarray = np.all((start[:, None] >= low) & (stop[:, None] <= high), axis=2)
        wanted = inside[:, len(held) :].any(1)
        start, stop, inside = start[wanted], stop[wanted], inside[wanted]
        _, rows, kind = np.unique(np.packbits(inside, axis=1), axis=0, return_index=True, return_inverse=True)
        sources: list[int] = []
        targets: list[int] = []
        for row in rows.tolist():
            senders = _members(held, inside[row, : len(held)])
            readers = _members(needed, inside[row, len(held) :])
            if not senders:
                box = [f"{low}:{high}" for low, high in zip(start[row], stop[row], strict=True)]
                box = box[: len(self._specs[name][1])]
                raise ValueError(f"weights: {name!r}: no sender has [{', '.join(box)}], which a receiver needs")
            sources.append(self.candidates.number(self._nearest(senders, readers)))
            targets.append(self.readers.number(readers))
        start, stop, origin = _split(start, stop, itemsize, self._limit)
        kind = kind.reshape(-1)[origin]
        nbytes = (stop - start).prod(1) * itemsize
        none = np.zeros(0, np.int64)
        return Cells(start, stop, nbytes, np.array(sources, np.int64)[kind], np.array(targets, np.int64)[kind], none)

    def _nearest(self, senders: tuple[int, ...], readers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the senders on a GPU of the readers, else those on their host, else all of them."""
        host = self._receivers[readers[0]].host
        devices = {self._receivers[reader].device for reader in readers} - {""}
        here = tuple(rank for rank in senders if self._senders[rank].host == host)
        return tuple(rank for rank in here if self._senders[rank].device in devices) or here or senders


def _by_weight(specs: Specs, parties: Sequence[Party], kind: str) -> Mapping[str, dict[Box, list[int]]]:
    found: dict[str, dict[Box, list[int]]] = {name: {} for name in specs}
    for number, party in enumerate(parties):
        for region in party.regions:
            boxes = found.get(region.weight)
            if boxes is None:
                raise ValueError(f"weights: {kind} {number} has a region of {region.weight!r}, which no spec lists")
            ranks = boxes.setdefault(region.box, [])
            if not ranks or ranks[-1] != number:
                ranks.append(number)
    for name, boxes in found.items():
        shape = specs[name][1]
        for box, ranks in boxes.items():
            if len(box) != len(shape) or not all(0 <= a < b <= size for (a, b), size in zip(box, shape, strict=True)):
                raise ValueError(f"weights: {kind} {ranks[0]} has the box {box} of {name!r}, which has shape {shape}")
    return found


def _corners(boxes: Sequence[Box], axes: int) -> np.ndarray:
    """Return the boxes as an array, int64 `[boxes, axes, 2]`."""
    return np.array([(*box, *[(0, 1)] * (axes - len(box))) for box in boxes], np.int64).reshape(len(boxes), axes, 2)


def _grid(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start and stop, `[cells, axes]` each, of the cells between all ends of boxes along each axis."""
    ends = [np.unique(boxes[:, axis]) for axis in range(boxes.shape[1])]
    start = np.stack([part.ravel() for part in np.meshgrid(*(part[:-1] for part in ends), indexing="ij")], 1)
    stop = np.stack([part.ravel() for part in np.meshgrid(*(part[1:] for part in ends), indexing="ij")], 1)
    return start, stop


def _members(owners: Owners, among: np.ndarray) -> tuple[int, ...]:
    return tuple(sorted({*itertools.chain.from_iterable(owners[index][1] for index in among.nonzero()[0])}))


def _split(start: np.ndarray, stop: np.ndarray, itemsize: int, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut cells of more than `limit` bytes along their first axes. Returns start, stop, and for each part the number of
    the cell that it is a part of."""
    origin = np.arange(len(start))
    while True:
        sizes = stop - start
        nbytes = sizes.prod(1) * itemsize
        axis = (sizes > 1).argmax(1)
        rows = np.arange(len(start))
        along = sizes[rows, axis]
        parts = np.minimum(np.maximum(ceil_div(nbytes, limit), 1), along)
        if (parts == 1).all():
            return start, stop, origin
        rows = np.repeat(rows, parts)
        part = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
        first, axis, along, parts = start[rows, axis[rows]], axis[rows], along[rows], parts[rows]
        start, stop, origin = start[rows], stop[rows], origin[rows]
        each = np.arange(len(rows))
        start[each, axis], stop[each, axis] = first + along * part // parts, first + along * (part + 1) // parts
