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
        self._current: tuple[str, float | None] | None = None
        """Name and bound of the stage that is in progress; None between stages."""

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.heartbeat.step(step)
        self.tracer.begin_step(step)

    @contextmanager
    def timed(self, name: str, bound_s: float | None = None) -> Iterator[None]:
        """Time a stage, which may have others in it. bound_s: seconds after which the watchdog takes it for stuck,
        unless `gets_on` is called meanwhile; None: the bound of any stage."""
        outer, self._current = self._current, (name, bound_s)
        self.heartbeat.enter(name, bound_s)
        try:
            with self.tracer.span(name) as span:
                yield
        finally:
            self._current = outer
        if outer is None:
            self.heartbeat.leave()
        else:
            self.heartbeat.enter(*outer)
        self.seconds[name] = self.seconds.get(name, 0.0) + span.dur_s

    def gets_on(self) -> None:
        """Note that the stage in progress has made progress: the watchdog counts its bound from now on."""
        if self._current is not None:
            self.heartbeat.enter(*self._current)
