"""Writes the report of `headrace bench step`: a table for the terminal, Markdown, and a plot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rich.table import Table

from .conditions import one_line
from .modes import CASES, LAST, ModeResult, StepOptions, StepReport
from .transfer.plots import COLOURS, Figure

HEADER = (
    "run",
    "s a step",
    "median",
    "vs sync",
    "trainer idle",
    "staleness",
    "simulated s",
    "simulated vs sync",
    "simulated idle",
    "off by",
)
NOT_SHOWN = ("median", "simulated vs sync", "simulated idle")
"""Columns that are in report.md but not in the terminal's table."""


def steps_table(report: StepReport) -> Table:
    """Return a table with one row per mode and the columns that fit a narrow terminal."""
    table = Table(title="headrace bench step", title_justify="left", title_style="bold")
    shown = [number for number, name in enumerate(HEADER) if name not in NOT_SHOWN]
    for number in shown:
        table.add_column(HEADER[number], justify="left" if number == 0 else "right")
    for row in _rows(report):
        table.add_row(*[row[number] for number in shown])
    return table


def write_report(report: StepReport, options: StepOptions, command: str) -> Path:
    """Write report.md and steps.png into `options.out`; returns the path of report.md."""
    _draw(report, options.out / "steps.png")
    lines = ["# headrace bench step", "", f"`{command}`", "", meaning(options), "", "![steps](steps.png)", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "| --- |" + " ---: |" * (len(HEADER) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in _rows(report)]
    lines += ["", "## Conditions", ""]
    lines += [f"- {name}: {v if isinstance(v, str) else json.dumps(v)}" for name, v in report.conditions.items()]
    path = options.out / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


def meaning(options: StepOptions) -> str:
    """Return the paragraph of the report that explains what was measured, and how."""
    return (
        f"{options.prompts} groups of {options.group_size} rows per step, generated at once, a group in a log-normal "
        f"time of sigma {options.sigma:g}; the slowest of a step takes {options.train_s:g} s on average, and so does "
        f"its training. Seconds per step: wall time of {options.counted} steps over their number, without the first "
        f"{options.warm} and the last {LAST}. `streaming` trains on {options.chunk_groups} groups at a time, staleness "
        "0; `async` on those that are ready first, staleness 1, groups that grow too old dropped. `async_in_order` and "
        "`async_streaming` train half as long, in the order of the prompts; the latter also on "
        f"{options.chunk_groups} groups at a time or more. Simulated: the same groups, with what the sync run's steps "
        "took besides; off by: measured over simulated."
    )


def _rows(report: StepReport) -> list[tuple[str, ...]]:
    return [
        _row(report, measured, simulated) for measured, simulated in zip(report.measured, report.simulated, strict=True)
    ]


def _row(report: StepReport, measured: ModeResult, simulated: ModeResult) -> tuple[str, ...]:
    case, summary = measured.case, report.summary

    def ratio(prefix: str) -> str:
        versus_sync = summary.get(f"{prefix}step.{case}_vs_sync")
        return "" if versus_sync is None else f"{versus_sync:.2f}x"

    return (
        case,
        f"{measured.step_s:.3f}",
        f"{np.median(measured.seconds):.3f}",
        ratio(""),
        f"{measured.trainer_idle_share:.1%}",
        f"{measured.staleness_mean:.2f}, max {measured.staleness_max:.0f}",
        f"{simulated.step_s:.3f}",
        ratio("simulated."),
        f"{simulated.trainer_idle_share:.1%}",
        f"{summary[f'simulated.step.{case}.relative_difference']:+.1%}",
    )


def _draw(report: StepReport, path: Path) -> None:
    """Plot the seconds of each counted step, measured and simulated, and their means."""
    figure = Figure(figsize=(13, 4.2))
    figure.suptitle("seconds of each step; dashed: simulated", x=0.01, ha="left", fontsize=10)
    top = 1.05 * max(max(result.seconds) for result in (*report.measured, *report.simulated))
    for number, case in enumerate(CASES):
        axes = figure.add_subplot(1, len(CASES), number + 1)
        for results, line, label in ((report.measured, "-", "measured"), (report.simulated, "--", "simulated")):
            result = results[number]
            axes.plot(range(1, 1 + len(result.seconds)), result.seconds, line, color=COLOURS[number], linewidth=1.2)
            axes.axhline(
                result.step_s, linestyle=line, color="black", linewidth=0.8, label=f"{label} {result.step_s:.2f}"
            )
        axes.set_title(case.name, loc="left", fontsize=9)
        axes.set_ylim(0, top)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False, loc="upper right")
    figure.text(0.01, 0.01, one_line(dict(report.conditions)), fontsize=6, color="#57606a")
    figure.subplots_adjust(left=0.04, right=0.99, top=0.86, bottom=0.12, wspace=0.12)
    figure.savefig(path, dpi=130)
