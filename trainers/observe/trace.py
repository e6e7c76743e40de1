"""The timeline of some steps: spans of the driver and its actors, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...actors.protocols import Span

DRIVER = "driver"
STEP = "step"
JITTER_S = 2e-5
"""Overlap of neighbouring spans that is put down to the clocks."""

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
"""Kind of a span, the first word of its name -> the lane it is drawn in; all others, the driver's stages, in `stages`.
Lanes of a process stand in this order."""
STAGES = "stages"
PARTS = ("first", "tail")
"""Kinds that are parts of the generation before them in a report."""
COLOURS = {
    "generation": "thread_state_running",
    "reward": "olive",
    "put": "thread_state_runnable",
    "get": "thread_state_runnable",
    "wait for rows": "terrible",
    "compute": "good",
    "sync": "yellow",
}
"""Lane -> colour of its spans in chrome://tracing. Perfetto chooses one itself, by the span's name without digits."""


class OpenSpan:
    """A span under way, as a context manager; `dur_s` is filled when it ends. About a microsecond of overhead."""

    __slots__ = ("name", "start_s", "dur_s", "_clock", "_tracer")

    def __init__(self, name: str, tracer: Tracer) -> None:
        self.name = name
        self.start_s = 0.0
        """Unix time."""
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
    """Times every span; keeps those that reach into a window of steps, whenever they are told of.

    Rollouts run over the edges of steps: what began before the window and ends in it is kept, and so is what began in
    it and is reported long after.
    """

    def __init__(self, step: int, num_steps: int = 1, path: str | os.PathLike[str] | None = None) -> None:
        """The window: `num_steps` steps from `step` on; step 0: none. path: where it is written once it is over."""
        self.step = step
        self.num_steps = num_steps
        self._path = path
        self._begun: list[tuple[int, float]] = []
        """(step, Unix time) of the window's steps so far."""
        self._current = 0
        self._end_s = math.inf
        """Unix time at which the window was over."""
        self._reports: dict[str, list[tuple[Span, ...]]] = {}
        """By process, what it has told, report by report."""

    def begin_step(self, step: int) -> None:
        """What follows belongs to `step`; the first step behind the window writes the file."""
        self._current = step
        if not self.step:
            return
        now = time.time()
        if self.step <= step < self.step + self.num_steps:
            if not self._begun or self._end_s < now:  # the latter: a run that went back to a checkpoint before it
                self._begun, self._end_s, self._reports = [], math.inf, {DRIVER: []}
            self._begun.append((step, now))
        elif self._begun and self._end_s > now:
            self._end_s = now
            if self._path is not None:
                self.write(self._path)

    @property
    def begun(self) -> bool:
        """Whether there is a window to keep spans of."""
        return bool(self._begun)

    @property
    def recording(self) -> bool:
        """Whether processes should tell what they do: in the window, and one step longer, as a worker tells of what it
        did at the end of a step in the next."""
        return self.begun and self.step <= self._current <= self.step + self.num_steps

    @property
    def awaited(self) -> bool:
        """Whether what starts now may reach into the window: it is under way or still to come."""
        return 0 < self.step and self._current < self.step + self.num_steps

    def span(self, name: str) -> OpenSpan:
        """Time a piece of the driver's work: `with tracer.span("rollout") as span: ...`, then `span.dur_s`."""
        return OpenSpan(name, self)

    def add(self, process: str, spans: Iterable[Span]) -> None:
        """Spans of one report of another process; those outside the window are dropped."""
        if not self._begun:
            return
        start_s = self._begun[0][1]
        kept = tuple(span for span in spans if span.start_s + span.dur_s >= start_s and span.start_s < self._end_s)
        if kept:
            self._reports.setdefault(process, []).append(kept)

    def write(self, path: str | os.PathLike[str] | None = None) -> bool:
        """Write what was kept as Chrome trace JSON, to `path` or where the tracer was told to. False, and no file, when
        the window was never reached or there is no path."""
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
        """The window's steps; the last one of the run ends with the driver's last stage."""
        last_s = max((span.start_s + span.dur_s for report in self._reports[DRIVER] for span in report), default=0.0)
        ends = [start for _, start in self._begun[1:]]
        ends.append(self._end_s if self._end_s < math.inf else max(last_s, self._begun[-1][1]))
        return [
            Span(f"{STEP} {step}", start, end - start) for (step, start), end in zip(self._begun, ends, strict=True)
        ]


# ---------------------------------------------------------------- events


def trace_events(reports: Mapping[str, Sequence[Sequence[Span]]]) -> list[dict[str, object]]:
    """Chrome trace events, whole microseconds from the first span: one process a name, its lanes named by kind.

    reports: by process, its spans, report by report. What a report has of generation is one call's: it stays together.
    """
    every = [span for of_process in reports.values() for report in of_process for span in report]
    origin = min((span.start_s for span in every), default=0.0)
    events: list[dict[str, object]] = []
    for pid, (process, of_process) in enumerate(reports.items(), start=1):
        events.append(_named("process", pid, 0, process))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        first = 1
        for lane, units in _by_lane(of_process):
            placed = _in_lanes(units, nesting=lane != LANES["generate"])
            rows = max(row for _, row, _, _ in placed)
            for row in range(rows):
                events.append(_named("thread", pid, first + row, lane if rows == 1 else f"{lane} {row + 1}"))
                events.append(
                    {
                        "ph": "M",
                        "name": "thread_sort_index",
                        "pid": pid,
                        "tid": first + row,
                        "args": {"sort_index": first + row},
                    }
                )
            events += [
                _drawn(name, lane, pid, first + row - 1, start_s - origin, end_s - origin)
                for name, row, start_s, end_s in placed
            ]
            first += rows
    return events


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _drawn(name: str, lane: str, pid: int, tid: int, start_s: float, end_s: float) -> dict[str, object]:
    # Rounded ends, not durations: spans that meet or nest still do so afterwards, to the last digit.
    start, end = round(start_s * 1e6), round(end_s * 1e6)
    event = {"ph": "X", "name": name, "cat": lane, "pid": pid, "tid": tid, "ts": start, "dur": end - start}
    return {**event, **({"cname": COLOURS[lane]} if lane in COLOURS else {})}


def _by_lane(reports: Sequence[Sequence[Span]]) -> list[tuple[str, list[list[Span]]]]:
    """(lane, its spans, in units that stay together), in the order of LANES. A unit is one span, or a rollout call's
    generation and the parts of it."""
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
    """One row of the drawing: which spans are open in it. Spans come in the order of their starts."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        """Of the open spans, outermost first."""

    def fits(self, start_s: float, end_s: float, *, nesting: bool) -> bool:
        """Whether a span can go here: nothing is open then, or (`nesting`) the innermost open one holds it."""
        ends = [end for end in self._ends if end > start_s + JITTER_S]
        return not ends or (nesting and end_s <= ends[-1] + JITTER_S)

    def place(self, span: Span) -> tuple[float, float]:
        """Its start and end, trimmed by what the clocks are apart."""
        start, end, closed = span.start_s, span.start_s + span.dur_s, 0.0
        while self._ends and self._ends[-1] <= start + JITTER_S:
            closed = self._ends.pop()
        start = max(start, closed)
        end = max(start, min([end, *self._ends[-1:]]))
        self._ends.append(end)
        return start, end


def _in_lanes(units: Sequence[Sequence[Span]], *, nesting: bool) -> list[tuple[str, int, float, float]]:
    """(name, row, start, end) of every span, parents before what nests in them: a unit goes into the first row, from 1,
    where it fits. nesting: whether a unit may lie within another.

    Viewers misdraw spans of a row that cross. Starts and durations come from two clocks, so neighbours may overlap by
    microseconds: they are trimmed to fit.
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
