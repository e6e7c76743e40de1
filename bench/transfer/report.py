"""Presents the transfer benchmark's results as tables for the terminal and as a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ..records import markdown, one_line, table, write_page
from .benchmark import TransferOptions, TransferReport
from .pictures import ABOUT, VLM
from .plots import draw
from .results import Result
from .workloads import WORKLOADS

STEP_NOTE = (
    "Bytes put are the values of the columns written; those on the wire include block headers and lengths. "
    "Times are sums over the stages, from the first start to the last end; times with calls include the benchmark's "
    "own calls between its processes."
)
MAIN_OPS = (
    "put",
    "get",
    "get2",
    "get4",
    "get8",
    "field",
    "write_back",
    "clear",
    "claim",
    "step",
    "from_padded",
    "to_padded",
)


def tables(report: TransferReport) -> list[Table]:
    """Return one table per workload, with times in milliseconds, and one table for the workload `step`."""
    drawn = []
    for workload in dict.fromkeys(result.workload for result in report.results):
        found = [result for result in report.results if result.workload == workload]
        drawn.append(table(f"{workload}: milliseconds, median (p99)", *_grid(found)))
    return [*drawn, table("step: a GRPO step's traffic", *_step_grid(report))] if report.steps else drawn


def failures(report: TransferReport) -> list[str]:
    """Return one line for each failure of a store or baseline on a workload, with the reason."""
    failed = [(result.workload, result.contender, result.failure) for result in report.results if result.failure]
    failed += [("step", step.contender, step.failure) for step in report.steps if step.failure]
    return [f"{workload}, {contender}: {failure}" for workload, contender, failure in failed]


def write_report(report: TransferReport, options: TransferOptions, command: str) -> Path:
    """Write report.md and its plots into `options.out`, and return the path of report.md."""
    plots = draw(report.results, options.stores, one_line(report.conditions), options.out)
    lines = [f"- not measured: {name}: {why}" for name, why in report.absent.items()]
    lines += ["", *(f"![{plot.stem}]({plot.name})" for plot in plots)]
    for workload in dict.fromkeys(result.workload for result in report.results):
        found = [result for result in report.results if result.workload == workload]
        size = max(result.nbytes for result in found) / 2**20
        text = ABOUT if workload == VLM else WORKLOADS[workload].text
        about = f"{text}; {size:.2f} MiB per run" if size else text
        lines += ["", f"## {workload}", "", f"{about}. Milliseconds, median (p99).", "", *markdown(*_grid(found))]
    if report.steps:
        lines += ["", "## step", "", f"{WORKLOADS['step'].text}. {STEP_NOTE}"]
        lines += ["", *markdown(*_step_grid(report))]
    reasons = failures(report)
    if reasons:
        lines += ["", "## Failed", "", *[f"- {reason}" for reason in reasons]]
    lines += ["", "## Ratios", "", "A ratio above 1 means that the store is faster than the baseline.", ""]
    lines += markdown(("what", "ratio"), [(name, f"{value:.4g}") for name, value in report.summary.items()])
    return write_page(options.out / "report.md", "headrace bench transfer", command, lines, report.conditions)


def _grid(results: Sequence[Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    cell = {(result.contender, result.op): result for result in results}
    ops = [op for op in MAIN_OPS if any(name == op for _, name in cell)]
    rows = []
    for contender in dict.fromkeys(result.contender for result in results):
        failed = cell.get((contender, "all"))
        if failed is not None:
            rows.append((contender, "failed", *[""] * (max(len(ops), 1) - 1)))
            continue
        shown = [_time(cell[contender, op]) if (contender, op) in cell else "" for op in ops]
        rows.append((contender, *shown))
    return ("", *(ops or ["result"])), rows


def _step_grid(report: TransferReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (
        "",
        "ms",
        "with calls ms",
        "put B/token",
        "on the wire",
        "got B/token",
        "directory calls",
        "blocks read / needed",
    )
    rows = []
    for step in report.steps:
        if step.failure:
            rows.append((step.contender, "failed", *[""] * (len(header) - 2)))
            continue
        figures = [f"{value:.4g}" if value == value else "" for value in step.counts().values()]
        rows.append((step.contender, f"{step.median_s * 1e3:.1f}", f"{step.called_s * 1e3:.1f}", *figures))
    return header, rows


def _time(result: Result) -> str:
    return f"{result.median_s * 1e3:.3g} ({result.p99_s * 1e3:.3g})"
