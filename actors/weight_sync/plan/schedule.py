"""Chooses who sends which cell, fills buckets for each pair of sender and receiver, and puts the buckets in order."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....codecs.integers import ALIGN, round_up


def choose_evenly(groups: Sequence[tuple[int, ...]], group: np.ndarray, nbytes: np.ndarray, num: int) -> np.ndarray:
    """Choose one process for each cell, so that all have about the same number of bytes. Returns int64 `[N]`.

    groups: sets of processes. group: number of the set from which the process of each cell is chosen, int64 `[N]`.
    nbytes: bytes of each cell, int64 `[N]`. num: number of processes. The smallest sets are served first; within a set,
    the processes with the fewest bytes so far take consecutive cells until all have equally many.
    """
    chosen = np.zeros(len(group), np.int64)
    loads = np.zeros(num, np.int64)
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(len(groups) + 1))
    for number in sorted(range(len(groups)), key=lambda number: (len(groups[number]), number)):
        cells = order[ends[number] : ends[number + 1]]
        if len(cells):
            members = np.array(groups[number], np.int64)
            chosen[cells] = members[_level(loads[members], nbytes[cells])]
            np.add.at(loads, chosen[cells], nbytes[cells])
    return chosen


def _level(loads: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Return for each cell the index of the process that takes it, so that the loads become as equal as possible."""
    order = np.argsort(loads, kind="stable")
    have = loads[order]
    levels = (nbytes.sum() + np.cumsum(have)) / np.arange(1, len(have) + 1)
    taking = max(1, int((levels > have).sum()))
    upto = np.cumsum(levels[taking - 1] - have[:taking])
    middle = np.cumsum(nbytes) - nbytes / 2
    return order[np.minimum(np.searchsorted(upto, middle), taking - 1)]


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of a plan as columns, in the order in which they are sent."""

    sender: np.ndarray
    """Number of the sender of each bucket, int64 `[buckets]`."""
    receiver: np.ndarray
    """Number of the receiver that takes the bucket over the link, int64 `[buckets]`. The other receivers of its host
    read it from the memory of this one."""
    nbytes: np.ndarray
    """Number of bytes of each bucket, int64 `[buckets]`."""
    rows: np.ndarray
    """Numbers of the cells of all buckets, bucket after bucket, int64 `[N]`."""
    ends: np.ndarray
    """Position in `rows` after the last cell of each bucket, int64 `[buckets]`; `begins` has that of the first."""
    begins: np.ndarray
    offset: np.ndarray
    """First byte of each cell in its bucket, in the order of `rows`, int64 `[N]`."""


def fill_buckets(
    sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray, limit: int, num_receivers: int
) -> Buckets:
    """Fill the buckets of each pair with its cells in order, each at a multiple of ALIGN bytes, and order the buckets.

    sender, receiver, nbytes: those of each cell, int64 `[N]`. limit: largest number of bytes of a bucket, a multiple of
    ALIGN, and at least that of every cell.
    """
    rows = np.lexsort((receiver, sender))
    pair = sender[rows] * num_receivers + receiver[rows]
    room = round_up(nbytes[rows], ALIGN)
    after = np.cumsum(room)
    last = np.searchsorted(pair, pair, side="right")
    begins: list[int] = []
    begin = 0
    while begin < len(rows):
        begins.append(begin)
        full = np.searchsorted(after, after[begin] - room[begin] + limit, side="right")
        begin = min(int(full), int(last[begin]))
    first = np.array(begins, np.int64)
    ends = np.append(first[1:], len(rows))[: len(first)]
    start = after - room
    offset = start - np.repeat(start[first], ends - first) if len(first) else start
    sizes = offset[ends - 1] + nbytes[rows][ends - 1]
    order = _order(sender[rows][first], receiver[rows][first], sizes, num_receivers)
    return Buckets(
        sender[rows][first][order], receiver[rows][first][order], sizes[order], rows, ends[order], first[order], offset
    )


def _order(sender: np.ndarray, receiver: np.ndarray, nbytes: np.ndarray, num_receivers: int) -> np.ndarray:
    """Order the buckets as they would start if each process sent, or received, one at a time at one speed.

    A sender that is free turns to the receiver that is free first, then to the one with the most bytes to come. The
    first choices of equal ones are spread over the receivers, so that not all senders start with the same one.
    """
    queues: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for bucket in range(len(sender) - 1, -1, -1):
        queues[int(sender[bucket])].setdefault(int(receiver[bucket]), []).append(bucket)
    spread = {rank: number * num_receivers // len(queues) for number, rank in enumerate(sorted(queues))}
    options = {
        rank: sorted(queue, key=lambda to, rank=rank: (to - spread[rank]) % num_receivers)
        for rank, queue in queues.items()
    }
    free = np.zeros(num_receivers, np.int64)
    left = np.zeros(num_receivers, np.int64)
    np.add.at(left, receiver, nbytes)
    begun = np.zeros(len(sender), np.int64)
    waiting = [(0, rank) for rank in sorted(queues)]
    while waiting:
        now, rank = heapq.heappop(waiting)
        among = np.array(options[rank], np.int64)
        times = np.maximum(free[among], now)
        best = int(among[np.lexsort((-left[among], times))[0]])
        bucket = queues[rank][best].pop()
        if not queues[rank][best]:
            options[rank].remove(best)
        begun[bucket] = max(int(free[best]), now)
        free[best] = begun[bucket] + nbytes[bucket]
        left[best] -= nbytes[bucket]
        if options[rank]:
            heapq.heappush(waiting, (int(free[best]), rank))
    return np.argsort(begun, kind="stable")
