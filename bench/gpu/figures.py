"""Writes and shows the figures of the works of `headrace bench gpu` that are no whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..transfer.results import write_records, write_summary


@dataclass(slots=True)
class Figures:
    """Results of a work that measures a part of a run: an engine, train steps, or switches of roles."""

    work: str
    """Name of the work, such as `switch-2g`."""
    summary: dict[str, float]
    """Figures by name, `gpu.{work}.{figure}`."""
    conditions: Mapping[str, Any]
    """Machine and settings with which the figures were measured."""
    notes: list[str] = field(default_factory=list)
    """Sentences about figures that are left out, and why."""
    complaints: list[str] = field(default_factory=list)
    """Sentences about what was wrong; with any of them the command fails."""

    def write(self, out: Path, records: Sequence[Mapping[str, Any]]) -> None:
        """Write `records` to results.jsonl and the figures to summary.json in `out`."""
        write_records(out / "results.jsonl", records, self.conditions)
        write_summary(out / "summary.json", self.summary, {**self.conditions, "complaints": self.complaints})

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
