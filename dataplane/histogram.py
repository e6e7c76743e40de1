"""Latency histograms: counts in fixed, log-spaced buckets, the same in every process, so that counts add up."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

STEPS_PER_OCTAVE = 4
OCTAVES = 30
EDGES: tuple[float, ...] = tuple(
    1e-6 * 2 ** (step / STEPS_PER_OCTAVE) for step in range(OCTAVES * STEPS_PER_OCTAVE + 1)
)
"""Seconds, ascending: bucket i counts what is over EDGES[i - 1] and at most EDGES[i]. 1 us to 18 minutes, each 19 %
over the one before: the most that a percentile can be off by."""
NUM_BUCKETS = len(EDGES) + 1
"""The last one counts what is over the last edge."""


def bucket_of(seconds: float) -> int:
    """The bucket that counts a call of so many seconds."""
    return bisect_left(EDGES, seconds)


def percentile(counts: Sequence[int], share: float) -> float:
    """Seconds that `share` (over 0, at most 1) of the counted calls took at most; NaN when none is counted.

    By nearest rank, and within that bucket as if its calls lay evenly on the log scale. Calls over the last edge count
    as that edge.
    """
    assert 0 < share <= 1 and len(counts) == NUM_BUCKETS
    total = sum(counts)
    if not total:
        return math.nan
    rank = max(1, math.ceil(share * total))
    bucket, below = 0, 0
    while below + counts[bucket] < rank:
        below += counts[bucket]
        bucket += 1
    top = EDGES[min(bucket, len(EDGES) - 1)]
    if bucket in (0, len(EDGES)):
        return top
    return top * 2 ** (((rank - below) / counts[bucket] - 1) / STEPS_PER_OCTAVE)


def at_most(counts: Sequence[int]) -> list[int]:
    """Calls that took at most each edge, `[len(EDGES)]`: what is left of all calls took longer than the last."""
    running, found = 0, []
    for count in counts[: len(EDGES)]:
        running += count
        found.append(running)
    return found
