"""Reports a work of `headrace bench gpu`: it writes the figures, even if the work is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ...dataplane.imports import MissingExtra
from ...trainers.errors import UserError
from ..progress import Progress
from ..records import table, write_records, write_summary


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
