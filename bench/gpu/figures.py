"""Keeps, writes and shows the figures of a work of `headrace bench gpu`, also when it is interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ...dataplane.imports import MissingExtra
from ...trainers.errors import UserError
from ..transfer.results import write_records, write_summary
from .progress import Progress


@dataclass(slots=True)
class Figures:
    """Results of a work, which are filled in while it is measured."""

    work: str
    """Name of the work, such as `switch-2g`."""
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
    """Sentences about figures that are left out, and why."""
    complaints: list[str] = field(default_factory=list)
    """Sentences about what was wrong; with any of them the command fails."""
    interrupted: str = ""
    """Sentence about where the work was interrupted or failed, and what was not measured; "" if it came to its end."""

    @contextmanager
    def kept(self, judge: Callable[[], None]) -> Iterator[None]:
        """Context manager in whose body the work is measured. However the body ends, the figures are written.

        judge: function that computes `summary`, `records` and `complaints` from what was measured so far. A user's
        mistake that the body finds leaves nothing, as nothing was measured then.
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
        table = Table(title=f"headrace bench gpu: {self.work}", title_justify="left", title_style="bold")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in self.summary.items():
            short = name.removeprefix(f"gpu.{self.work}.")
            is_share = short == "mfu" or short.startswith("share.")
            table.add_row(short, f"{value:.1%}" if is_share else f"{value:,.4g}")
        return table
