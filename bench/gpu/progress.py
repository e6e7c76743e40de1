"""Tells the phases of `headrace bench gpu` with the seconds since its start, and knows which parts are left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Progress:
    """Function that is called with the name of a phase, as often as one likes, and shows one line for each new name.

    It also knows the parts of which figures are expected: a round, a run, a check. What is left of them when a
    benchmark ends early was not measured.
    """

    def __init__(self, show: Callable[[str], None] = lambda line: None, started: float | None = None) -> None:
        """show: function that shows a line at once. started: value of time.monotonic() from which seconds count; None
        means now."""
        self.unfinished: list[str] = []
        """Parts that are not finished, in the order in which they are measured."""
        self._show = show
        self._started = time.monotonic() if started is None else started
        self._phase, self._since = "start", 0.0

    def __call__(self, phase: str) -> None:
        """Show a phase that begins, with the seconds since the start; do nothing if it is the present one."""
        if phase != self._phase:
            self._phase, self._since = phase, self._seconds()
            self._show(f"{self._since:7.1f} s  {phase}")

    def plan(self, *parts: str) -> None:
        """Expect parts, each of them once."""
        self.unfinished += parts

    def finish(self, part: str) -> None:
        """Take a part as measured."""
        self.unfinished.remove(part)

    def stopped(self, error: BaseException) -> str:
        """Return words about the error that ends the benchmark now, with the phase that it is in."""
        how = "interrupted"
        if not isinstance(error, KeyboardInterrupt):
            how = f"failed with {type(error).__name__} ({(str(error).splitlines() or [''])[0]})"
        return f"{how} {self._seconds():.0f} s after the start, in the phase {self._phase!r} that began at " \
               f"{self._since:.0f} s"  # fmt: skip

    def missing(self) -> str:
        """Return words about the parts that are not finished; "" if all are."""
        return f"not measured or not to the end: {', '.join(_ranges(self.unfinished))}" if self.unfinished else ""

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def _ranges(parts: Sequence[str]) -> list[str]:
    """Return names of parts in which neighbours whose numbers follow each other are one: `round 2 to 5`."""
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
