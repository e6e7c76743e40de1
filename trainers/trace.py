"""The timeline of one step: spans of the driver and its actors, as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..actors.protocols import Span

DRIVER = "driver"
JITTER_S = 2e-5
"""Overlap of neighbouring spans that is put down to the clocks."""


class OpenSpan:
    """A span under way, as a context manager; `dur_s` is filled when it ends. About a microsecond of overhead."""

    __slots__ = ("name", "start_s", "dur_s", "_clock", "_into")

    def __init__(self, name: str, into: list[Span] | None) -> None:
        self.name = name
        self.start_s = 0.0
        """Unix time."""
        self.dur_s = 0.0
        self._clock = 0.0
        self._into = into

    def __enter__(self) -> OpenSpan:
        self.start_s = time.time()
        self._clock = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.dur_s = time.perf_counter() - self._clock
        if self._into is not None:
            self._into.append(Span(self.name, self.start_s, self.dur_s))


class Tracer:
    """Times every span, keeps only those of one step."""

    def __init__(self, step: int) -> None:
        """`step`: the one to keep, 0 for none."""
        self.step = step
        self._recording = False
        self._start_s = 0.0
        self._spans: dict[str, list[Span]] = {}

    def begin_step(self, step: int) -> None:
        """What follows belongs to `step`."""
        self._recording = step == self.step and step > 0
        if self._recording:
            self._start_s = time.time()
            self._spans = {DRIVER: []}

    @property
    def recording(self) -> bool:
        """Whether the step under way is the one to keep."""
        return self._recording

    def span(self, name: str) -> OpenSpan:
        """Time a piece of the driver's work: `with tracer.span("rollout") as span: ...`, then `span.dur_s`."""
        return OpenSpan(name, self._spans[DRIVER] if self._recording else None)

    def add(self, process: str, spans: Iterable[Span]) -> None:
        """Spans that another process reports; those that ended before the kept step began are dropped."""
        if self._recording:
            kept = self._spans.setdefault(process, [])
            kept.extend(span for span in spans if span.start_s + span.dur_s >= self._start_s)

    def write(self, path: str | os.PathLike[str]) -> bool:
        """Write the kept step as Chrome trace JSON. False, and no file, when the step has not been reached."""
        if not self._spans:
            return False
        document = {"traceEvents": trace_events(self._spans), "displayTimeUnit": "ms", "metadata": {"step": self.step}}
        Path(path).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        return True


def trace_events(spans: Mapping[str, Sequence[Span]]) -> list[dict[str, object]]:
    """Chrome trace events, microseconds from the first span: one process a name, lanes so that spans nest in each."""
    origin = min((span.start_s for of_process in spans.values() for span in of_process), default=0.0)
    events: list[dict[str, object]] = []
    for pid, (process, of_process) in enumerate(spans.items(), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        for name, lane, start_s, end_s in _in_lanes(of_process):
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": name.partition(" ")[0],
                    "pid": pid,
                    "tid": lane,
                    "ts": round((start_s - origin) * 1e6, 1),
                    "dur": round((end_s - start_s) * 1e6, 1),
                }
            )
    return events


def _in_lanes(spans: Iterable[Span]) -> list[tuple[str, int, float, float]]:
    """(name, lane, start, end): the first lane, from 1, where the span lies within the open ones.

    Viewers misdraw spans of a lane that cross. Starts and durations come from two clocks, so neighbours may overlap by
    microseconds: they are trimmed to fit.
    """
    open_ends: list[list[float]] = []  # per lane: ends of the spans that are open, outermost first
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.dur_s)):
        start, end = span.start_s, span.start_s + span.dur_s
        for lane in range(len(open_ends) + 1):
            if lane == len(open_ends):
                open_ends.append([])
            ends, closed = open_ends[lane], 0.0
            while ends and ends[-1] <= start + JITTER_S:
                closed = ends.pop()
            if not ends or end <= ends[-1] + JITTER_S:
                start, end = max(start, closed), min([end, *ends[-1:]])
                ends.append(end)
                placed.append((span.name, lane + 1, start, max(start, end)))
                break
    return placed
