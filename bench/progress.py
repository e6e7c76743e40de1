"""Shows the phases of a benchmark as it runs, and knows which parts of it are still to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Progress:
    """Shows one line for each phase of a benchmark. A call with the name of the present phase shows nothing.

    It also knows the parts that are to be measured, such as a round, a run or a check. Parts that remain when a
    benchmark ends early were not measured.
    """

    def __init__(self, show: Callable[[str], None] = lambda line: None, started: float | None = None) -> None:
        """show: function that shows a line at once. started: value of time.monotonic() at the start of the benchmark;
        None means now."""
        self.unfinished: list[str] = []
        """Parts that are not finished, in the order in which they are measured."""
        self._show = show
        self._started = time.monotonic() if started is None else started
        self._phase, self._since = "start", 0.0

    def __call__(self, phase: str) -> None:
        """Show that a phase begins, with the seconds since the start; do nothing if it is the present one."""
        if phase != self._phase:
            self._phase, self._since = phase, self._seconds()
            self._show(f"{self._since:7.1f} s  {phase}")

    def plan(self, *parts: str) -> None:
        """Add parts that are to be measured. Each must be finished once."""
        self.unfinished += parts

    def finish(self, part: str) -> None:
        """Record that a part was measured."""
        self.unfinished.remove(part)

    def stopped(self, error: BaseException) -> str:
        """Describe the error that ends the benchmark now, and the phase in which it happened."""
        how = "interrupted"
        if not isinstance(error, KeyboardInterrupt):
            how = f"failed with {type(error).__name__} ({(str(error).splitlines() or [''])[0]})"
        return f"{how} {self._seconds():.0f} s after the start, in the phase {self._phase!r} that began at " \
               f"{self._since:.0f} s"  # fmt: skip

    def missing(self) -> str:
        """Name the parts that are not finished; "" if all are."""
        return f"not measured or not to the end: {', '.join(_ranges(self.unfinished))}" if self.unfinished else ""

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def _ranges(parts: Sequence[str]) -> list[str]:
    """Join neighbouring parts with consecutive numbers into one name, such as `round 2 to 5`."""
    found: list[str] = []
    name, last = "", -1
    for part in parts:
        start, _, number = part.rpartition(" ")
        follows = bool(found) and number.isdecimal() and start == name and int(number) == last + 1
        if follows:
            found[-1] = f"{found[-1].partition(' to ')[0]} to {number}"
        else:
            found.append(part)
        name, last = (start, int(number)) if number.isdecimal() else ("", -1)
    return found
