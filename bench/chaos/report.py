"""Writes the chaos benchmark's report: which faults struck, how the runs reacted, and what became of the rows."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from .benchmark import ChaosReport, summarise
from .pairs import FAULTS, NO_SENSE, PAIRS, PROCESSES, Outcome

_TITLES = ("process", *FAULTS)


def pairs_table(report: ChaosReport) -> Table:
    """Return a table of how often each kind of fault struck each kind of process. A "-" marks a fault that makes no
    sense."""
    table = Table(title="times that each fault struck")
    for name in _TITLES:
        table.add_column(name.replace("_", " "), justify="left" if name == "process" else "right")
    known = {(pair.process, pair.fault): pair for pair in PAIRS}
    for process in PROCESSES:
        cells = [str(report.count(known[process, fault])) if (process, fault) in known else "-" for fault in FAULTS]
        table.add_row(process, *cells)
    return table


def rows_table(report: ChaosReport) -> Table:
    """Return a table of each run's rows: put, trained on, lost, trained on or put twice, and with wrong bytes."""
    table = Table(title="rows of the history that survived")
    for name in ("store", "steps", "undone", "put", "trained", "reads checked", "lost", "twice", "wrong bytes"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for run in report.runs:
        found = run.balance
        figures = (found.steps, found.undone, found.rows_put, found.rows_trained, found.reads_checked)
        errors = (len(found.lost), len(found.twice), len(found.wrong))
        table.add_row(run.store, *(f"{figure:,}" for figure in (*figures, *errors)))
    return table


def lines(report: ChaosReport) -> list[str]:
    """Return sentences about the outcomes of faults, recovery times, the growth of memory, and each stop's reason."""
    figures = summarise(report)
    said = [
        f"{len(report.faults)} faults struck: the run went on after {figures.get('outcome/goes on', 0):.0f}, went back "
        f"to a checkpoint by itself after {figures.get('outcome/restarts', 0):.0f}, and stopped and was resumed after "
        f"{figures.get('outcome/stops', 0):.0f}"
    ]
    if "recovery_median_s" in figures:
        said.append(
            f"seconds from a fault's end to new steps: median {figures['recovery_median_s']:.1f}, at most "
            f"{figures['recovery_max_s']:.1f}"
        )
    said += [f"memory with {run.store}: {', '.join(map(str, run.growths))}" for run in report.runs if run.growths]
    stops = [fault for fault in report.faults if fault.outcome == "stops"]
    said += [f"stopped ({fault.kind} {fault.process}): {fault.sentences[-1]}" for fault in stops]
    return said


def write_report(report: ChaosReport, out: Path, command: str) -> Path:
    """Write report.md into `out`: the figures, the failures, the allowed outcome of each fault, and the conditions.
    Returns its path."""
    text = ["# headrace bench chaos", "", f"`{command}`", "", *_markdown(pairs_table(report))]
    text += ["", *_markdown(rows_table(report)), "", *(f"- {line}" for line in lines(report))]
    text += ["", "## Failed", "", *(f"- {line}" for line in report.complaints or ["nothing"])]
    text += ["", "## What each fault may lead to", "", *promises()]
    text += ["", "## Conditions", ""]
    text += [f"- {name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in report.conditions.items()]
    path = out / "report.md"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def promises() -> list[str]:
    """Return a Markdown table of the most severe outcome that is allowed after each fault in each kind of process. A
    fault that is not tried in a kind of process has the reason instead."""
    known: dict[tuple[str, str], Outcome] = {(pair.process, pair.fault): pair.worst for pair in PAIRS}
    rows = ["| process | fault | the run |", "| --- | --- | --- |"]
    for process in PROCESSES:
        for fault in FAULTS:
            worst = known.get((process, fault))
            said = f"not tried: {NO_SENSE[process, fault]}" if worst is None else _MEANING[worst]
            rows.append(f"| {process} | {fault.replace('_', ' ')} | {said} |")
    return rows


_MEANING: dict[Outcome, str] = {
    "goes on": "goes on; what was killed is replaced",
    "restarts": "goes back to its last checkpoint by itself",
    "stops": "may stop with a sentence; `--resume` goes on",
}


def _markdown(table: Table) -> list[str]:
    headers = [str(column.header) for column in table.columns]
    cells = [list(map(str, column.cells)) for column in table.columns]
    rows = [f"| {' | '.join(row)} |" for row in zip(*cells, strict=True)]
    return [f"| {' | '.join(headers)} |", "| --- |" + " ---: |" * (len(headers) - 1), *rows]
