"""What clients have done and moved, by operation: counts that add up over calls, processes and steps."""

from __future__ import annotations

import math
import struct
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..codecs import messages

# ---------------- Latency histograms: counts in fixed, log-spaced buckets, the same in every process, so that counts
# add up.

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


MIN_CALLS = 10
"""Through few points a line can always be laid."""
MIN_SPREAD = 1e-3
"""Standard deviation of the calls' bytes over their mean below which all calls count as equally large."""
MIN_ERRORS = 3.0
"""Standard errors that the seconds a byte must be above 0, and that the fixed cost may be below it."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """What a call costs: `fixed_s + nbytes / bytes_per_s`."""

    fixed_s: float
    """Seconds of a call that moves next to nothing; 0 when it is too small to be seen beside the bytes' share."""
    bytes_per_s: float


@dataclass(slots=True)
class OpTraffic:
    """One operation's calls. The sums `moved_*` are over the calls that moved bytes, and make the cost line."""

    calls: int = 0
    """Finished or failed."""
    seconds: float = 0.0
    """Spent in them, waits included."""
    nbytes: int = 0
    """Moved by them; 0 for operations on metadata."""
    buckets: list[int] = field(default_factory=lambda: [0] * NUM_BUCKETS)
    """Calls by seconds, see `histogram`."""
    moved: int = 0
    """Calls that moved bytes."""
    moved_s: float = 0.0
    moved_xx: float = 0.0
    """Sum of bytes squared."""
    moved_xy: float = 0.0
    """Sum of bytes x seconds."""
    moved_yy: float = 0.0
    """Sum of seconds squared."""

    def count(self, seconds: float, nbytes: int) -> None:
        """One more call."""
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
        """Add another's calls to these."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.nbytes += other.nbytes
        self.buckets = [mine + theirs for mine, theirs in zip(self.buckets, other.buckets, strict=True)]
        self.moved += other.moved
        self.moved_s += other.moved_s
        self.moved_xx += other.moved_xx
        self.moved_xy += other.moved_xy
        self.moved_yy += other.moved_yy

    def percentile(self, share: float) -> float:
        """Seconds that `share` of the calls took at most; NaN without calls."""
        return percentile(self.buckets, share)

    def cost_line(self) -> CostLine | None:
        """Least squares of seconds over bytes, calls that moved none (or failed) left out.

        None when it is undetermined: fewer than MIN_CALLS calls, calls of one size, or seconds that are no line over
        the bytes: a slope less than MIN_ERRORS standard errors above 0, a fixed cost more than as many below it.
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
    """OpTraffic by operation. Not thread-safe."""

    def __init__(self) -> None:
        self.ops: dict[str, OpTraffic] = {}

    def of(self, op: str) -> OpTraffic:
        """The operation's, which then stands in `ops`."""
        found = self.ops.get(op)
        if found is None:
            found = self.ops[op] = OpTraffic()
        return found

    def merge(self, other: Traffic) -> None:
        for op, calls in other.ops.items():
            self.of(op).merge(calls)

    @staticmethod
    def sum_of(reports: Iterable[bytes]) -> Traffic:
        """What several reports (`to_bytes`) come to. Raises ValueError when one is none."""
        total = Traffic()
        for report in reports:
            total.merge(Traffic.from_bytes(report))
        return total

    @property
    def calls(self) -> int:
        """Of all operations."""
        return sum(each.calls for each in self.ops.values())

    @property
    def bytes_put(self) -> int:
        return sum(each.nbytes for op, each in self.ops.items() if op == "put")

    @property
    def bytes_got(self) -> int:
        return sum(each.nbytes for op, each in self.ops.items() if op != "put")

    def to_bytes(self) -> bytes:
        """For a report to the driver: about 15 bytes for a single call, up to 50 for many calls of one operation."""
        return messages.encode([_packed(op, each) for op, each in self.ops.items()]) if self.ops else b""

    @staticmethod
    def from_bytes(data: bytes) -> Traffic:
        """Raises ValueError when `data` is none."""
        traffic = Traffic()
        for packed in messages.decode(data, list[_Packed]) if data else ():
            traffic.ops[packed[0]] = _unpacked(packed)
        return traffic


_Packed = tuple[str, int, bytes, list[int]]
"""Operation, bytes, sums as float32, and counts: calls, calls that moved bytes, and (bucket, count) of the buckets that
are not empty. Of a single call there is nothing to count, and its seconds are the only sum."""


def _packed(op: str, of: OpTraffic) -> _Packed:
    if of.calls == 1:
        return op, of.nbytes, struct.pack("<f", of.seconds), []
    sums = (of.seconds, of.moved_s, of.moved_xx, of.moved_xy, of.moved_yy) if of.moved else (of.seconds,)
    filled = [number for pair in enumerate(of.buckets) if pair[1] for number in pair]
    return op, of.nbytes, struct.pack(f"<{len(sums)}f", *sums), [of.calls, of.moved, *filled]


def _unpacked(packed: _Packed) -> OpTraffic:
    """Raises ValueError when the parts do not belong together."""
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


# ---------------- What one client has done and moved so far. About a microsecond a call; see docs/reference/metrics.md.


class ClientStats:
    """Counters that only grow. Thread-safe; read them whenever you like."""

    def __init__(self) -> None:
        self.directory_calls = 0
        self.directory_bytes = 0
        """Requests and replies."""
        self._lock = threading.Lock()
        self._recent = Traffic()
        """Since the last `take`."""
        self._taken = Traffic()
        self._moved: dict[int, int] = {}
        """Bytes of calls that are not counted yet, by thread."""

    def count_bytes(self, *, put: int = 0, got: int = 0) -> None:
        """Bytes of the call that this thread counts next: of committed blocks, or of the columns handed out.

        Both clients count a call in the thread that ended its operation, with nothing in between.
        """
        self._moved[threading.get_ident()] = put + got

    def count_call(self, op: str, seconds: float) -> None:
        """A call has finished or failed, after so many seconds, waits included."""
        with self._lock:
            self._recent.of(op).count(seconds, self._moved.pop(threading.get_ident(), 0))

    def count_directory(self, nbytes: int) -> None:
        """One request and its reply."""
        with self._lock:
            self.directory_calls += 1
            self.directory_bytes += nbytes

    def take(self) -> Traffic:
        """The calls since the last `take`; they stay in the totals. For whoever reports this client's figures."""
        with self._lock:
            taken, self._recent = self._recent, Traffic()
            self._taken.merge(taken)
        return taken

    def total(self) -> Traffic:
        """All calls, in a copy that agrees with itself."""
        total = Traffic()
        with self._lock:
            total.merge(self._taken)
            total.merge(self._recent)
        return total

    @property
    def calls(self) -> Counter[str]:
        """Finished or failed calls, by operation."""
        return Counter({op: each.calls for op, each in self.total().ops.items()})

    @property
    def bytes_put(self) -> int:
        """Bytes of committed blocks: values, indexes and headers."""
        return self.total().bytes_put

    @property
    def bytes_got(self) -> int:
        """Bytes of the columns handed out."""
        return self.total().bytes_got

    def snapshot(self) -> dict[str, float]:
        """Flat: the counters by name, `calls` in all, and `calls/<op>`, `seconds/<op>`."""
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
