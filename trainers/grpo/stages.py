"""Times the stages of a step for metrics and trace, and reports them to the watchdog, which stops a run that hangs."""

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
        """Heartbeat that tells the watchdog which step and stage the run is in."""
        self.seconds: dict[str, float] = {}
        """Name of each stage of the current step -> the wall-clock seconds it took."""
        self._apart_s = 0.0
        """Seconds of all stages so far that count apart from those around them."""
        self._current: tuple[str, float | None] | None = None
        """Name of the stage in progress and the seconds that it may take (see `timed`); None between stages."""

    @property
    def current(self) -> str:
        """Name of the stage in progress; "" between stages. Any thread may read it."""
        current = self._current
        return "" if current is None else current[0]

    def begin_step(self, step: int) -> None:
        """Start timing and tracing `step`."""
        self.seconds = {}
        self.heartbeat.step(step)
        self.tracer.begin_step(step)

    @contextmanager
    def timed(self, name: str, bound_s: float | None = None, *, apart: bool = False) -> Iterator[None]:
        """Context manager that times a stage; stages can be nested. bound_s: seconds after which the watchdog considers
        the stage stuck, unless `report_progress` is called meanwhile; None: the watchdog's default bound. apart: True
        leaves the seconds of this stage out of the stages around it."""
        outer, self._current = self._current, (name, bound_s)
        apart_s = self._apart_s
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
        own_s = span.dur_s - (self._apart_s - apart_s)
        self._apart_s += own_s * apart
        self.seconds[name] = self.seconds.get(name, 0.0) + own_s

    def report_progress(self) -> None:
        """Report progress in the current stage, which restarts the time that the watchdog allows for it."""
        if self._current is not None:
            self.heartbeat.enter(*self._current)
