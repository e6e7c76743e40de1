"""Counts the calls of clients and the bytes they move, by operation. Counts of several processes and steps add up."""

from __future__ import annotations

import math
import struct
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..codecs import messages

# ---------------- Latency histograms count in fixed, log-spaced buckets, so that counts of all processes add up.

STEPS_PER_OCTAVE = 4
OCTAVES = 30
EDGES: tuple[float, ...] = tuple(
    1e-6 * 2 ** (step / STEPS_PER_OCTAVE) for step in range(OCTAVES * STEPS_PER_OCTAVE + 1)
)
"""Bounds of the histograms' buckets in seconds, ascending: bucket i counts calls that took over EDGES[i - 1] and at
most EDGES[i]. The bounds go from 1 us to 18 minutes, each 19 % above the previous one. A percentile therefore errs by
at most 19 %."""
NUM_BUCKETS = len(EDGES) + 1
"""Number of buckets; the last one counts calls over the last edge."""


def bucket_of(seconds: float) -> int:
    """Return the number of the histogram bucket that counts a call of `seconds`."""
    return bisect_left(EDGES, seconds)


def percentile(counts: Sequence[int], share: float) -> float:
    """Return the seconds that `share` (over 0, at most 1) of the counted calls took at most; NaN when none is counted.

    counts: number of calls in each bucket (see EDGES). The nearest-rank method is used; calls within a bucket are
    assumed to lie evenly on the log scale. A call over the last edge counts as that edge.
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
    """Return for each i the number of calls that took at most EDGES[i] seconds, `[len(EDGES)]`. counts: number of calls
    in each bucket; those over the last edge are not in the result."""
    running, found = 0, []
    for count in counts[: len(EDGES)]:
        running += count
        found.append(running)
    return found


MIN_CALLS = 10
"""Number of calls below which no cost line (seconds of a call as a linear function of its bytes) is fitted, because a
line always fits a few points well."""
MIN_SPREAD = 1e-3
"""Standard deviation of the calls' bytes, relative to their mean, below which all calls count as equally large and no
cost line is fitted."""
MIN_ERRORS = 3.0
"""Number of standard errors used to accept a cost line (seconds of a call as a linear function of its bytes): the
fitted seconds per byte must be more than this many above 0, and the fitted fixed cost at most this many below 0."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """Linear model of the seconds that a call takes: `fixed_s + nbytes / bytes_per_s`."""

    fixed_s: float
    """Seconds that a call takes regardless of its bytes; 0 when this time is too short to be detected next to the time
    for the bytes."""
    bytes_per_s: float


@dataclass(slots=True)
class OpTraffic:
    """Counts and sums over the calls of one operation. The sums `moved_*` cover only the calls that moved bytes; the
    cost line (seconds of a call as a linear function of its bytes) is fitted to them."""

    calls: int = 0
    """Number of calls that have finished or failed."""
    seconds: float = 0.0
    """Seconds spent in all calls, waits included."""
    nbytes: int = 0
    """Number of bytes that the calls moved; 0 for operations on metadata."""
    buckets: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    """Histogram of the calls' seconds: number of calls in each bucket (see EDGES)."""
    moved: int = 0
    """Number of calls that moved bytes."""
    moved_s: float = 0.0
    moved_xx: float = 0.0
    """Sum of bytes squared over the calls that moved bytes."""
    moved_xy: float = 0.0
    """Sum of bytes times seconds over the calls that moved bytes."""
    moved_yy: float = 0.0
    """Sum of seconds squared over the calls that moved bytes."""

    def count(self, seconds: float, nbytes: int) -> None:
        """Count one more call, which took `seconds` and moved `nbytes` bytes."""
        self.calls += 1
        self.seconds += seconds
        self.buckets[bucket_of(seconds)] += 1
        if nbytes:
            self.nbytes += nbytes
            self.moved += 1
            self.moved_s += seconds
            self.moved_xx += nbytes * nbytes
            self.moved_xy += nbytes * seconds
            self.moved_yy += seconds * seconds

    def merge(self, other: OpTraffic) -> None:
        """Add the calls counted in `other`, such as those of another process."""
        for name in ("calls", "seconds", "nbytes", "moved", "moved_s", "moved_xx", "moved_xy", "moved_yy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]

    def percentile(self, share: float) -> float:
        """Return the seconds that `share` of the calls took at most; NaN without calls."""
        return percentile(self.buckets, share)

    def cost_line(self) -> CostLine | None:
        """Fit the seconds of the calls as a linear function of their bytes, by least squares. Only calls that moved
        bytes are used.

        Returns None when the line is undetermined: when there are fewer than MIN_CALLS calls, when all have about the
        same size, when the slope is less than MIN_ERRORS standard errors above 0, or when the fixed cost is more than
        MIN_ERRORS standard errors below 0.
        """
        n, x, y = self.moved, float(self.nbytes), self.moved_s
        if n < MIN_CALLS:
            return None
        sxx, sxy, syy = self.moved_xx - x * x / n, self.moved_xy - x * y / n, self.moved_yy - y * y / n
        if sxx <= n * (MIN_SPREAD * x / n) ** 2:
            return None
        slope = sxy / sxx
        fixed = (y - slope * x) / n
        variance = max(0.0, syy - slope * sxy) / (n - 2)
        if slope <= MIN_ERRORS * math.sqrt(variance / sxx):
            return None
        if fixed < -MIN_ERRORS * math.sqrt(variance * self.moved_xx / (n * sxx)):
            return None
        return CostLine(max(0.0, fixed), 1 / slope)


class Traffic:
    """Counts of calls and bytes for each operation, by its name. Not thread-safe."""

    def __init__(self) -> None:
        self.ops: dict[str, OpTraffic] = {}

    def of(self, op: str) -> OpTraffic:
        """Return the counts of operation `op`. Creates empty counts if there are none yet."""
        found = self.ops.get(op)
        if found is None:
            found = self.ops[op] = OpTraffic()
        return found

    def merge(self, other: Traffic) -> None:
        for op, calls in other.ops.items():
            self.of(op).merge(calls)

    @staticmethod
    def sum_of(reports: Iterable[bytes]) -> Traffic:
        """Return the sum of several encoded reports (from `to_bytes`). Raises ValueError when one is malformed."""
        total = Traffic()
        for report in reports:
            total.merge(Traffic.from_bytes(report))
        return total

    @property
    def calls(self) -> int:
        """Number of calls of all operations."""
        return sum(each.calls for each in self.ops.values())

    @property
    def bytes_put(self) -> int:
        return sum(each.nbytes for op, each in self.ops.items() if op == "put")

    @property
    def bytes_got(self) -> int:
        return sum(each.nbytes for op, each in self.ops.items() if op != "put")

    def to_bytes(self) -> bytes:
        """Encode the counts for a report to the driver. An operation takes about 15 bytes for a single call and up to
        50 for many."""
        return messages.encode([_packed(op, each) for op, each in self.ops.items()]) if self.ops else b""

    @staticmethod
    def from_bytes(data: bytes) -> Traffic:
        """Decode what `to_bytes` encoded. Raises ValueError for other bytes."""
        traffic = Traffic()
        for packed in messages.decode(data, list[_Packed]) if data else ():
            traffic.ops[packed[0]] = _unpacked(packed)
        return traffic


_Packed = tuple[str, int, bytes, list[int]]
"""Encoded counts of one operation: its name, number of bytes, sums as float32, and integer counts. The integers are the
calls, the calls that moved bytes, and (bucket, count) of each bucket that is not empty. A single call has no such
integers, and its only sum is its seconds."""


def _packed(op: str, of: OpTraffic) -> _Packed:
    if of.calls == 1:
        return op, of.nbytes, struct.pack("<f", of.seconds), []
    sums = (of.seconds, of.moved_s, of.moved_xx, of.moved_xy, of.moved_yy) if of.moved else (of.seconds,)
    filled = [number for pair in enumerate(of.buckets) if pair[1] for number in pair]
    return op, of.nbytes, struct.pack(f"<{len(sums)}f", *sums), [of.calls, of.moved, *filled]


def _unpacked(packed: _Packed) -> OpTraffic:
    """Decode one operation's counts. Raises ValueError when the parts do not fit together."""
    op, nbytes, sums, counts = packed
    moved = counts[1] if len(counts) > 1 else 0
    numbers, filled = counts[2::2], counts[3::2]
    if (
        len(sums) != (20 if moved else 4)
        or len(numbers) != len(filled)
        or not all(0 <= n < NUM_BUCKETS for n in numbers)
    ):
        raise ValueError(f"traffic of {op!r}: got {len(sums)} bytes of sums and counts {counts}, which do not fit")
    traffic = OpTraffic()
    if not counts:
        traffic.count(struct.unpack("<f", sums)[0], nbytes)
        return traffic
    traffic.calls, traffic.moved, traffic.nbytes = counts[0], moved, nbytes
    for number, count in zip(numbers, filled, strict=True):
        traffic.buckets[number] = count
    traffic.seconds, *rest = struct.unpack(f"<{len(sums) // 4}f", sums)
    if rest:
        traffic.moved_s, traffic.moved_xx, traffic.moved_xy, traffic.moved_yy = rest
    return traffic


# ---------------- These counters record what a client has done. A call costs about 1 us; see docs/reference/metrics.md.


class ClientStats:
    """Counters of what one client has done. They only grow, and may be read at any time. Thread-safe."""

    def __init__(self) -> None:
        self.directory_calls = 0
        self.directory_bytes = 0
        """Number of bytes of all requests to the directory (the metadata service) and of their replies."""
        self._lock = threading.Lock()
        self._recent = Traffic()
        """Calls since the last `take`."""
        self._taken = Traffic()

    def renew_lock(self) -> None:
        """Make a new lock, in a forked process. A thread of its parent may have had the old one."""
        self._lock = threading.Lock()

    def count_call(self, op: str, seconds: float, nbytes: int = 0) -> None:
        """Count a call that has finished or failed.

        seconds: its duration, waits included. nbytes: the bytes of the blocks it committed or the columns it returned.
        """
        with self._lock:
            self._recent.of(op).count(seconds, nbytes)

    def count_directory(self, nbytes: int) -> None:
        """Count one request to the directory. nbytes: number of bytes of the request and its reply."""
        with self._lock:
            self.directory_calls += 1
            self.directory_bytes += nbytes

    def take(self) -> Traffic:
        """Return the counts of the calls since the last `take`, for a periodic report. The totals keep these calls."""
        with self._lock:
            taken, self._recent = self._recent, Traffic()
            self._taken.merge(taken)
        return taken

    def total(self) -> Traffic:
        """Return the counts of all calls so far, as a consistent copy."""
        total = Traffic()
        with self._lock:
            total.merge(self._taken)
            total.merge(self._recent)
        return total

    @property
    def calls(self) -> Counter[str]:
        """Number of finished or failed calls, by operation."""
        return Counter({op: each.calls for op, each in self.total().ops.items()})

    @property
    def bytes_put(self) -> int:
        """Number of bytes of the blocks that puts committed: values, indexes and headers."""
        return self.total().bytes_put

    @property
    def bytes_got(self) -> int:
        """Total size in bytes of the columns that reads returned."""
        return self.total().bytes_got

    def snapshot(self) -> dict[str, float]:
        """Return all counters by name. They are the totals, such as `calls` and `bytes_put`, and `calls/<op>` and
        `seconds/<op>` for each operation."""
        total = self.total()
        return {
            "calls": total.calls,
            "bytes_put": total.bytes_put,
            "bytes_got": total.bytes_got,
            "directory_calls": self.directory_calls,
            "directory_bytes": self.directory_bytes,
            **{f"calls/{op}": each.calls for op, each in total.ops.items()},
            **{f"seconds/{op}": each.seconds for op, each in total.ops.items()},
        }
