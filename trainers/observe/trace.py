"""Records a timeline of some steps for Perfetto and chrome://tracing, with spans of the driver and its actors."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...actors.protocols import Span

_log = logging.getLogger(__name__)

DRIVER = "driver"
STEP = "step"
JITTER_S = 2e-5
"""Largest overlap of neighbouring spans that counts as a difference between clocks, in seconds."""

LANES = {
    STEP: "steps",
    "generate": "generation",
    "first": "generation",
    "tail": "generation",
    "reward": "reward",
    "journal": "journal",
    "put": "put",
    "read": "get",
    "broadcast": "get",
    "receive": "get",
    "wait": "wait for rows",
    "forward": "compute",
    "logprobs": "compute",
    "optimizer": "compute",
    "send": "sync",
    "pause": "sync",
    "load": "sync",
}
"""Lane (group of rows in the drawing) for each kind of span, which is the first word of the span's name. All other
spans are stages of the driver and are drawn in the lane `stages`. The lanes of a process are drawn in this order."""
STAGES = "stages"
PARTS = ("first", "tail")
"""Kinds of spans that are parts of a generation span. In a report, the parts follow their generation span."""
COLOURS = {
    "generation": "thread_state_running",
    "reward": "olive",
    "put": "thread_state_runnable",
    "get": "thread_state_runnable",
    "wait for rows": "terrible",
    "compute": "good",
    "sync": "yellow",
}
"""Lane -> colour of its spans in chrome://tracing. Perfetto chooses colours itself, by the span's name without
digits."""


class OpenSpan:
    """Context manager that times a span; `dur_s` holds its seconds afterwards. It costs about a microsecond."""

    __slots__ = ("name", "start_s", "dur_s", "_clock", "_tracer")

    def __init__(self, name: str, tracer: Tracer) -> None:
        self.name = name
        self.start_s = 0.0
        """Unix time at which the span started."""
        self.dur_s = 0.0
        self._clock = 0.0
        self._tracer = tracer

    def __enter__(self) -> OpenSpan:
        self.start_s = time.time()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.dur_s = time.perf_counter() - self._clock
        if self._tracer.begun:
            self._tracer.add(DRIVER, (Span(self.name, self.start_s, self.dur_s),))


class Tracer:
    """Times the driver's spans. Keeps the spans of all processes that overlap the traced window, a range of steps.
    Rollouts cross the boundaries of steps, so a span is also kept if it began before the window and ends in it, or if
    it began in the window and is reported long after.
    """

    def __init__(self, step: int, num_steps: int = 1, path: str | os.PathLike[str] | None = None) -> None:
        """Trace a window of `num_steps` steps that begins with `step`, and write it to `path` when it ends. With `step`
        0 nothing is traced."""
        self.step = step
        self.num_steps = num_steps
        self._path = path
        self._begun: list[tuple[int, float]] = []
        """Steps of the window that have begun, as (step, Unix time at which it began)."""
        self._current = 0
        self._end_s = math.inf
        """Unix time at which the window ended; infinite until then."""
        self._reports: dict[str, list[tuple[Span, ...]]] = {}
        """Spans kept so far: name of a process -> one tuple of spans for each of its reports."""

    def begin_step(self, step: int) -> None:
        """Record that step `step` begins. The first step after the window writes the trace file."""
        self._current = step
        if not self.step:
            return
        now = time.time()
        if self.step <= step < self.step + self.num_steps:
            if not self._begun or self._end_s < now:  # The run can have returned to an earlier checkpoint.
                self._begun, self._end_s, self._reports = [], math.inf, {DRIVER: []}
            self._begun.append((step, now))
        elif self._begun and self._end_s > now:
            self._end_s = now
            try:
                self.write()
            except OSError as error:  # The run goes on without its timeline.
                _log.warning("the timeline is not written: %s", error)

    @property
    def begun(self) -> bool:
        """Whether the window has begun, so that spans are kept."""
        return bool(self._begun)

    @property
    def recording(self) -> bool:
        """Whether processes should report spans, which is true in the window and in one more step. A worker reports its
        work at the end of a step only with the next step."""
        return self.begun and self.step <= self._current <= self.step + self.num_steps

    @property
    def awaited(self) -> bool:
        """Whether the window is in progress or still to come, so that a span that starts now may overlap it."""
        return 0 < self.step and self._current < self.step + self.num_steps

    def span(self, name: str) -> OpenSpan:
        """Return a context manager that times a piece of the driver's work. Use `with tracer.span("rollout") as span:
        ...`, then `span.dur_s`."""
        return OpenSpan(name, self)

    def add(self, process: str, spans: Iterable[Span]) -> None:
        """Add the spans of one report of a process; spans outside the window are dropped."""
        if not self._begun:
            return
        start_s = self._begun[0][1]
        kept = tuple(span for span in spans if span.start_s + span.dur_s >= start_s and span.start_s < self._end_s)
        if kept:
            self._reports.setdefault(process, []).append(kept)

    def write(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Write the kept spans as Chrome trace JSON to `path`, by default the tracer's own path.

        Returns whether the file was written; False if the window was never reached or there is no path.
        """
        path = path or self._path
        if not self._begun or path is None:
            return False
        reports = dict(self._reports)
        reports[DRIVER] = [tuple(self._step_spans()), *reports[DRIVER]]
        document = {
            "traceEvents": trace_events(reports),
            "displayTimeUnit": "ms",
            "metadata": {"step": self.step, "num_steps": len(self._begun)},
        }
        new = Path(f"{os.fspath(path)}.new")
        new.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        new.replace(path)
        return True

    def _step_spans(self) -> list[Span]:
        """Return one span for each step of the window, as far as the steps have begun. If the run ended within the
        window, the last step ends with the driver's last stage."""
        last_s = max((span.start_s + span.dur_s for report in self._reports[DRIVER] for span in report), default=0.0)
        ends = [start for _, start in self._begun[1:]]
        ends.append(self._end_s if self._end_s < math.inf else max(last_s, self._begun[-1][1]))
        return [
            Span(f"{STEP} {step}", start, end - start) for (step, start), end in zip(self._begun, ends, strict=True)
        ]


# ---------------- These functions make the events of the trace.


def trace_events(reports: Mapping[str, Sequence[Sequence[Span]]]) -> list[dict[str, object]]:
    """Convert spans to Chrome trace events, in whole microseconds from the first span. Spans of the same kind are drawn
    in the same lane.

    reports: name of a process -> its spans, report by report. The generation spans of one report belong to one rollout
    call and are drawn in the same row.
    """
    every = [span for of_process in reports.values() for report in of_process for span in report]
    origin = min((span.start_s for span in every), default=0.0)
    events: list[dict[str, object]] = []
    for pid, (process, of_process) in enumerate(reports.items(), start=1):
        events += _named("process", pid, 0, process, pid)
        first = 1
        for lane, units in _by_lane(of_process):
            placed = _in_lanes(units, nesting=lane != LANES["generate"])
            rows = max(row for _, row, _, _ in placed)
            for row in range(rows):
                name = lane if rows == 1 else f"{lane} {row + 1}"
                events += _named("thread", pid, first + row, name, first + row)
            events += [
                _drawn(name, lane, pid, first + row - 1, start_s - origin, end_s - origin)
                for name, row, start_s, end_s in placed
            ]
            first += rows
    return events


def _named(what: str, pid: int, tid: int, name: str, place: int) -> list[dict[str, object]]:
    facts: tuple[tuple[str, object], ...] = (("name", name), ("sort_index", place))
    return [{"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": {key: fact}} for key, fact in facts]


def _drawn(name: str, lane: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, object]:
    # Rounding ends instead of durations keeps adjacent and nested spans exact.
    start, end = round(start_s * 1e6), round(end_s * 1e6)
    event = {"ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid, "ts": start, "dur": end - start}
    return {**event, **({"cname": COLOURS[lane]} if lane in COLOURS else {})}


def _by_lane(reports: Sequence[Sequence[Span]]) -> list[tuple[str, list[list[Span]]]]:
    """Group spans by lane, in the order of LANES. Returns (lane, units), where each unit is a list of spans for the
    same row: a single span, or the generation span of a rollout call with its parts."""
    order = [*dict.fromkeys(LANES.values()), STAGES]
    units: dict[str, list[list[Span]]] = {}
    for span in (span for report in reports for span in report):
        kind = span.name.partition(" ")[0]
        of_lane = units.setdefault(LANES.get(kind, STAGES), [])
        if kind in PARTS and of_lane:
            of_lane[-1].append(span)
        else:
            of_lane.append([span])
    return sorted(units.items(), key=lambda item: order.index(item[0]))


class _Lane:
    """One row of the drawing, with the open spans that have not ended yet. Spans must be placed in the order of their
    starts."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        """Ends of the open spans in seconds, that of the outermost span first."""

    def fits(self, start_s: float, end_s: float, *, nesting: bool) -> bool:
        """Return whether a span fits in this row. No other span is open at its start, or with `nesting` the innermost
        open span contains it."""
        ends = [end for end in self._ends if end > start_s + JITTER_S]
        return not ends or (nesting and end_s <= ends[-1] + JITTER_S)

    def place(self, span: Span) -> tuple[float, float]:
        """Place a span in this row and return its start and end. Both are trimmed if the span overlaps another one
        because of differences between clocks."""
        start, end, closed = span.start_s, span.start_s + span.dur_s, 0.0
        while self._ends and self._ends[-1] <= start + JITTER_S:
            closed = self._ends.pop()
        start = max(start, closed)
        end = max(start, min([end, *self._ends[-1:]]))
        self._ends.append(end)
        return start, end


def _in_lanes(units: Sequence[Sequence[Span]], *, nesting: bool) -> list[tuple[str, int, float, float]]:
    """Assign each of `units` to the first row (counted from 1) in which it fits. A unit is a list of spans for the same
    row. `nesting` allows a unit inside another.

    Returns (name, row, start, end) of every span, outer spans first. Viewers draw a row wrongly if its spans overlap
    without nesting. Starts and durations come from two clocks, so neighbouring spans can overlap by microseconds and
    are trimmed.
    """
    rows: list[_Lane] = []
    placed: list[tuple[str, int, float, float]] = []
    for unit in sorted(units, key=lambda unit: (unit[0].start_s, -unit[0].dur_s)):
        first = unit[0]
        for row in range(len(rows) + 1):
            if row == len(rows):
                rows.append(_Lane())
            if rows[row].fits(first.start_s, first.start_s + first.dur_s, nesting=nesting):
                placed += [(span.name, row + 1, *rows[row].place(span)) for span in unit]
                break
    return placed
