"""Reports a work of `headrace bench gpu`: its phases as it runs, and its figures, even if it is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ...dataplane.imports import MissingExtra
from ...trainers.errors import UserError
from ..records import table, write_records, write_summary


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


@dataclass(slots=True)
class WorkReport:
    """Results of a work. The benchmark fills them in as it measures."""

    work: str
    """Name of the work, such as `grpo-0.6b`."""
    out: Path
    """Folder for the results."""
    tell: Progress = field(default_factory=Progress)
    """Callback that reports the current phase and its parts."""
    summary: dict[str, float] = field(default_factory=dict)
    """Figures by name, `gpu.{work}.{figure}`."""
    conditions: dict[str, Any] = field(default_factory=dict)
    """Machine and settings with which the figures were measured."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    """Lines of results.jsonl."""
    notes: list[str] = field(default_factory=list)
    """Sentences that say which figures are left out, and why."""
    complaints: list[str] = field(default_factory=list)
    """Sentences about what was wrong. The command fails if there is one."""
    interrupted: str = ""
    """Sentence that says where the work was interrupted or failed, and what was not measured; "" if it ended
    normally."""

    @contextmanager
    def kept(self, judge: Callable[[], None]) -> Iterator[None]:
        """Context manager that writes the figures of the work that its body measures, however the body ends.

        judge: function that computes `summary`, `records` and `complaints` from what was measured so far. A UserError
        or MissingExtra leaves no files, because nothing was measured before it.
        """
        try:
            yield
        except (UserError, MissingExtra):
            raise
        except BaseException as error:
            stopped = self.tell.stopped(error)
            judge()
            self.interrupted = "; ".join(filter(None, (stopped, self.tell.missing())))
            self.write()
            raise
        judge()
        if missing := self.tell.missing():
            self.complaints.append(missing)
        self.write()

    def write(self) -> None:
        """Write `records` to results.jsonl and the figures to summary.json."""
        facts = {**self.conditions, "notes": self.notes, "complaints": self.complaints}
        if self.interrupted:
            facts["interrupted"] = self.interrupted
        self.out.mkdir(parents=True, exist_ok=True)
        write_records(self.out / "results.jsonl", self.records, facts)
        write_summary(self.out / "summary.json", self.summary, facts)

    def table(self) -> Table:
        """Return a table with a row for each figure."""
        rows = []
        for name, value in self.summary.items():
            short = name.removeprefix(f"gpu.{self.work}.")
            is_share = short == "mfu" or short.startswith("share.")
            rows.append((short, f"{value:.1%}" if is_share else f"{value:,.4g}"))
        return table(self.work, ("figure", "value"), rows)
