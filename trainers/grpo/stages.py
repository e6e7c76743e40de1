"""The stages of a step: each is timed for the metrics, drawn in the trace and bounded by the watchdog."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..observe.trace import Tracer
from ..supervision.heartbeat import Heartbeat


class Stages:
    """The stages of the driver's current step."""

    def __init__(self, tracer: Tracer, heartbeat: Heartbeat) -> None:
        self.tracer = tracer
        self.heartbeat = heartbeat
        """Tells the watchdog where the run stands."""
        self.seconds: dict[str, float] = {}
        """Wall seconds of each stage of the current step."""

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.heartbeat.step(step)
        self.tracer.begin_step(step)

    @contextmanager
    def timed(self, name: str, bound_s: float | None = None) -> Iterator[None]:
        """Time a stage. bound_s: seconds after which the watchdog takes it for stuck; None: the bound of any stage."""
        self.heartbeat.enter(name, bound_s)
        with self.tracer.span(name) as span:
            yield
        self.heartbeat.leave()
        self.seconds[name] = self.seconds.get(name, 0.0) + span.dur_s
