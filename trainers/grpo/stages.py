"""Times each stage of a step for the metrics, draws it in the trace, and has the watchdog bound it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..observe.trace import Tracer
from ..supervision.heartbeat import Heartbeat


class Stages:
    """The stages of the driver's current step, such as claim, train and sync."""

    def __init__(self, tracer: Tracer, heartbeat: Heartbeat) -> None:
        self.tracer = tracer
        self.heartbeat = heartbeat
        """Tells the watchdog which step and stage the run is in."""
        self.seconds: dict[str, float] = {}
        """Name of each stage of the current step -> the wall-clock seconds it took."""
        self._current: tuple[str, float | None] | None = None
        """Name and bound in seconds of the stage that is in progress; None between stages."""

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.heartbeat.step(step)
        self.tracer.begin_step(step)

    @contextmanager
    def timed(self, name: str, bound_s: float | None = None) -> Iterator[None]:
        """Context manager that times a stage; stages may be nested. bound_s: seconds after which the watchdog considers
        the stage stuck, unless `gets_on` is called meanwhile; None: the watchdog's default bound."""
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
        """Report progress in the current stage: its bound for the watchdog starts anew."""
        if self._current is not None:
            self.heartbeat.enter(*self._current)
