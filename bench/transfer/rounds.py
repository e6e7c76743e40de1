"""Measures contenders (stores and baselines) in turns on the same rows, so that noise affects all of them alike."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .contenders import Contender, Op, RowContender, Share, shares
from .processes import CALL_TIMEOUT_S, PRODUCER, LoadSize, ProcessLost, ProcessPool, Span, call, consumer
from .results import IN_TURNS, Result, StepResult
from .workloads import WRITE_BACK, LoadSpec

_logger = logging.getLogger(__name__)

ROUND_BUDGET_S = 0.4
MAX_ITERATIONS = 12
"""Maximum number of iterations in one turn of a contender. A turn has as many as fit into ROUND_BUDGET_S seconds, but
at least one and at most this number."""
CLAIM_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 60.0
"""Seconds to wait for the end of the calls of a failed case."""

_runs = itertools.count()

Keep = Callable[[Sequence[Result | StepResult]], None]
"""A function that keeps results as soon as they are measured."""

Seat = tuple[ProcessPool, Contender]
"""A contender (store or baseline), and the pool of processes in which it is measured."""


@dataclass(slots=True)
class Case:
    """The measurement of one contender (store or baseline) on one workload."""

    pool: ProcessPool
    """Pool whose processes the case uses. It is usually the same for all contenders."""
    contender: Contender
    spec: LoadSpec
    size: LoadSize
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Measured seconds for each operation. `gets` is recorded as `get2`, `get4` and so on, by the number of readers."""
    failure: str = ""
    iterations: int = 1
    wire_bytes: int = 0
    """Number of bytes that one put writes, including block headers; 0 if the contender does not count them."""

    @property
    def label(self) -> str:
        return f"{self.spec.name}/{self.contender.name}"

    def note(self, op: str, seconds: float) -> None:
        self.seconds.setdefault(op, []).append(seconds)

    def results(self) -> list[Result]:
        """Return one result per operation. A failed case has a single result with the reason."""
        name, contender = self.spec.name, self.contender.name
        if self.failure:
            return [Result(name, "all", contender, 0, (), self.failure)]
        return [
            Result(
                name,
                op,
                contender,
                self._bytes(op),
                tuple(seconds),
                wire_bytes=self.wire_bytes if op == "put" else 0,
            )
            for op, seconds in self.seconds.items()
        ]

    def _bytes(self, op: str) -> int:
        if op in ("clear", "claim"):
            return 0
        if op == "field":
            return self.size.field_bytes[self.size.first[0]]
        return self.size.field_bytes[WRITE_BACK] if op == "write_back" else self.size.nbytes


@dataclass(frozen=True, slots=True)
class Pattern:
    """The operations that are measured in each case, and the number of repeats."""

    ops: frozenset[Op]
    readers: tuple[int, ...]
    """Numbers of concurrent readers with which `gets` is measured."""
    repeats: int
    """Number of rounds after the warm-up."""


def measure(
    seats: Sequence[Seat], specs: Sequence[LoadSpec], pattern: Pattern, tell: Callable[[str], None], keep: Keep
) -> None:
    """Measure every contender on every workload, in rounds in which each contender has one turn. The warm-up before
    them verifies every read. keep: function that gets the results, also those of the rounds before an interruption."""
    cases = open_cases(seats, specs)
    try:
        for case in cases:
            tell(f"{case.label}: warm-up and verification")
            attempt(case, cases, lambda case=case: _warm_up(case, pattern))
        for number in range(pattern.repeats):
            tell(f"{', '.join(spec.name for spec in specs)}: round {number + 1} of {pattern.repeats}")
            for case in cases:
                for iteration in range(case.iterations):
                    ops = pattern.ops if iteration == 0 else pattern.ops - {"claim"}
                    attempt(case, cases, lambda case=case, ops=ops: _iterate(case, ops, pattern.readers, False))
    finally:
        keep([result for case in cases for result in case.results()])
    close_cases(cases)


def measure_in_turns(pool: ProcessPool, pair: Sequence[Contender], spec: LoadSpec, turns: int) -> list[Result]:
    """Measure put and get of two contenders alternately. The ratio of their times then does not depend on when each was
    measured. Returns results of the operations IN_TURNS. Seconds at the same index belong to the same turn."""
    ops: frozenset[Op] = frozenset(("put", "get"))
    cases = open_cases([(pool, contender) for contender in pair], [spec])
    for case in cases:
        attempt(case, cases, lambda case=case: _warm_up(case, Pattern(ops, (), turns)))
    for turn in range(turns):
        for case in cases if turn % 2 else reversed(cases):
            attempt(case, cases, lambda case=case: _iterate(case, ops, (), False))
    close_cases(cases)
    return [replace(result, op=IN_TURNS.get(result.op, result.op)) for case in cases for result in case.results()]


def open_cases(seats: Sequence[Seat], specs: Sequence[LoadSpec]) -> list[Case]:
    """Make one case for every contender on every workload, and open its endpoints in the processes of its pool."""
    cases = []
    for spec in specs:
        size = call(seats[0][0], PRODUCER, "size", spec)
        cases += [Case(pool, contender, spec, size) for pool, contender in seats]
    for case in cases:
        attempt(case, cases, lambda case=case: _join(case))
    return cases


def close_cases(cases: Sequence[Case]) -> None:
    """Close the endpoints of all cases."""
    for pool in {id(case.pool): case.pool for case in cases}.values():
        pool.gather([pool.start(process, "leave") for process in pool.names])


def attempt(case: Case, cases: Iterable[Case], run: Callable[[], None]) -> None:
    """Call `run`, unless the case has failed before. An error is recorded as the failure of this case, and the other
    cases continue."""
    if case.failure:
        return
    try:
        run()
    except Exception as error:
        case.failure = f"{type(error).__name__}: {error}".splitlines()[0]
        _logger.warning("%s failed: %s", case.label, case.failure)
        if isinstance(error, ProcessLost) or not _settled(case.pool):
            # A process may be stuck in the failed contender's call forever, so the others get new processes.
            case.pool.restart()
            for other in cases:
                if other.pool is case.pool:
                    attempt(other, (), lambda other=other: _join(other))


def _settled(pool: ProcessPool) -> bool:
    """Return whether every process has finished its calls. If not, the next case would have to wait for them."""
    try:
        pool.gather([pool.start(process, "idle") for process in pool.names], SETTLE_TIMEOUT_S)
    except ProcessLost:
        return False
    return True


def _join(case: Case) -> None:
    pool = case.pool
    factory = case.contender.factory(case.spec)
    processes = [process for process in pool.names if process == PRODUCER or process.startswith("consumer")]
    pool.gather([pool.start(process, "join", case.label, case.spec, factory) for process in processes])


def _warm_up(case: Case, pattern: Pattern) -> None:
    """Run once and verify every read. Then run once more, and derive the iterations per turn from its time."""
    _iterate(case, pattern.ops, pattern.readers, True)
    case.seconds = {}
    started = time.monotonic()
    _iterate(case, pattern.ops - {"claim"}, pattern.readers, False)
    case.iterations = int(np.clip(ROUND_BUDGET_S / (time.monotonic() - started), 1, MAX_ITERATIONS))
    case.seconds = {}


def _iterate(case: Case, ops: frozenset[Op], readers: tuple[int, ...], verify: bool) -> None:
    """Run one iteration and record its times. It is a put, the chosen operations on the rows, and the clear. verify:
    whether to check every read."""
    pool = case.pool
    ops = ops & case.contender.ops
    label, whole = case.label, shares(case.size.num_rows, 1)[0]
    claiming = None
    if "claim" in ops:
        claiming = pool.start(consumer(1), "claim", label, case.size.num_rows, CLAIM_TIMEOUT_S)
        time.sleep(pool.lead_s)  # This wait lets the claim begin before the put.
    before = call(pool, PRODUCER, "counters", label) if verify else {}
    token, span = call(pool, PRODUCER, "put", label, f"r{next(_runs)}")
    if verify:
        after = call(pool, PRODUCER, "counters", label)
        case.wire_bytes = after.get("wire_bytes_put", 0) - before.get("wire_bytes_put", 0)
    if "put" in ops:
        case.note("put", span.seconds)
    if claiming is not None:
        claimed: Span = pool.gather([claiming])[0]
        case.note("claim", max(0.0, claimed.end - span.end))
    if "get" in ops:
        case.note("get", _read(case, token, [whole], None, verify))
    for count in readers if "gets" in ops else ():
        case.note(f"get{count}", _read(case, token, shares(case.size.num_rows, count), None, verify))
    if "field" in ops and len(case.size.first) > 1:
        case.note("field", _read(case, token, [whole], case.size.first[:1], verify))
    if "write_back" in ops and isinstance(case.contender, RowContender):
        keys = case.contender.keys(token)
        written, span = call(pool, consumer(0), "write", label, keys, (WRITE_BACK,), None)
        case.note("write_back", span.seconds)
        if verify:
            _read(case, written, [whole], (WRITE_BACK,), True)
    if isinstance(case.contender, RowContender):
        span = call(pool, PRODUCER, "clear", label, token)
        if "clear" in ops:
            case.note("clear", span.seconds)


def _read(case: Case, token: object, dealt: Sequence[Share], fields: tuple[str, ...] | None, verify: bool) -> float:
    """Read with all readers at once. Returns the seconds from the first start to the last end.

    Several readers start at a common time; a single reader starts immediately.
    """
    pool = case.pool
    expected = [call(pool, PRODUCER, "expected", case.label, share, fields) if verify else None for share in dealt]
    parts = [case.contender.part(token, share) for share in dealt]
    start_at = time.monotonic() + pool.lead_s if len(dealt) > 1 else 0.0
    calls = [
        pool.start(consumer(number), "get", case.label, part, share, fields, start_at, digests)
        for number, (part, share, digests) in enumerate(zip(parts, dealt, expected, strict=True))
    ]
    spans: list[Span] = pool.gather(calls, CALL_TIMEOUT_S)
    return max(span.end for span in spans) - min(span.start for span in spans)
