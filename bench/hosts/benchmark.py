"""Runs `headrace bench hosts`, which measures the data plane between hosts that are made of namespaces of this machine.

Each subject has a file of its own, which makes the hosts that it needs; the first subject is reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ...trainers.errors import UserError
from ..records import conditions, markdown, table, write_page, write_records, write_summary
from .directory_cost import GROUP, PLAYERS, CostOptions, CostResult, measure_cost, measure_rate, summarise_cost
from .encryption import measure_encryption
from .namespaces import why_no_hosts
from .reads import RAW, SHM, ReadOptions, ReadResult, measure_reads, summarise
from .recovery import RECOVERY, ROWS, measure_recovery

BARS = {SHM: 0.9, RAW: 0.85}
"""Baseline of a read -> smallest ratio that is expected on a quiet machine."""
RECOVERY_BAR_S = 5.0
HEADER = (
    "read",
    "batch",
    "baseline",
    "tcp, ms",
    "baseline, ms",
    "tcp, Gbit/s",
    "baseline, Gbit/s",
    "tcp : baseline",
    "bar",
)
COST_HEADER = ("directory", "measured", "bar")


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of the benchmark `headrace bench hosts`."""

    out: Path
    reads: ReadOptions = ReadOptions()
    kills: int = 5
    """Number of times that the directory's process is killed."""
    directory: CostOptions = CostOptions()

    @staticmethod
    def quick(out: Path) -> HostOptions:
        """Return options for a run of less than a minute."""
        few = CostOptions(connections=100, groups=64, repeats=3)
        return HostOptions(out, replace(ReadOptions(), repeats=9), kills=2, directory=few)


@dataclass(frozen=True, slots=True)
class HostReport:
    """Results of the benchmark."""

    results: list[ReadResult]
    conditions: dict[str, Any]
    costs: dict[str, float]
    """Factors by which authentication and TLS lengthen a step; see `measure_encryption`."""
    recoveries_s: list[float]
    """Seconds that a call took after each kill of the directory's process."""
    directory: list[CostResult]
    """CPU time of the directory, one for each run."""
    rates: list[float]
    """Rows that the directory served per second, one for each run."""


def run_hosts(options: HostOptions, tell: Callable[[str], None]) -> HostReport:
    """Measure everything, and write results.jsonl and summary.json. Raises UserError where hosts cannot be made."""
    reason = why_no_hosts()
    if reason:
        raise UserError(f"headrace bench hosts {reason}: it makes its hosts out of Linux namespaces of this machine")
    options.out.mkdir(parents=True, exist_ok=True)
    facts = conditions(
        workloads=[spec.name for spec in options.reads.workloads], repeats=options.reads.repeats, threads_per_process=1
    )
    results = measure_reads(options.reads, tell)
    tell(f"directory: {options.directory.repeats} runs with {options.directory.connections} connections")
    directory = measure_cost(options.directory)
    rates = [measure_rate() for _ in range(options.directory.repeats)]
    records = [result.record() for result in (*results, *directory)]
    write_records(options.out / "results.jsonl", records, facts)
    costs = measure_encryption(options.reads.repeats, tell)
    tell("killing the directory")
    recoveries_s = measure_recovery(options.kills)
    recovery = {RECOVERY: max(recoveries_s)}
    summary = {**summarise(results), **costs, **recovery, **summarise_cost(directory, rates)}
    write_summary(options.out / "summary.json", summary, facts)
    return HostReport(results, facts, costs, recoveries_s, directory, rates)


def hosts_table(report: HostReport) -> Table:
    """Return a table with one row per read."""
    return table("headrace bench hosts", HEADER, _rows(report.results), left=HEADER[:3])


def directory_table(report: HostReport, options: HostOptions) -> Table:
    """Return a table with the directory's figures."""
    return table("The directory", COST_HEADER, _cost_rows(report, options), left=COST_HEADER[:1])


def write_report(report: HostReport, options: HostOptions, command: str) -> Path:
    """Write report.md into `options.out`; returns its path."""
    text = (
        f"Each time is a median of {options.reads.repeats} reads of a batch, in turn with the baseline; every read was "
        "compared with the rows. A read plans which bytes it needs before it asks for them, which takes the same time "
        "for any link. The hosts are namespaces of one machine, so that both ends share its cores. A link that is "
        "faster than this machine moves bytes is not filled: the baseline's Gbit/s then lie below the link's. tcp : "
        "baseline: 1 is as fast as the baseline, less is slower."
    )
    costs = ", ".join(f"{name}: {cost:.2f}" for name, cost in report.costs.items())
    deaths = (
        f"The directory's process was killed {len(report.recoveries_s)} times, with {ROWS} rows: the next call "
        f"took at most {max(report.recoveries_s):.2f} s (bar: {RECOVERY_BAR_S:g})."
    )
    step = f"The time of a step over sockets, divided by that over open connections without TLS, is {costs}."
    lines = [text, "", *markdown(HEADER, _rows(report.results)), "", step, "", deaths]
    cost_text = (
        f"The directory: put, claim, get, release and clear of rows in groups of {GROUP}, medians of "
        f"{options.directory.repeats} runs. The CPU time is that of the directory's process alone; rows per second are "
        f"those that {PLAYERS} client processes beside it put and consumed on this machine."
    )
    lines += ["", cost_text, "", *markdown(COST_HEADER, _cost_rows(report, options))]
    return write_page(options.out / "report.md", "headrace bench hosts", command, lines, report.conditions)


def _rows(results: Sequence[ReadResult]) -> list[tuple[str, ...]]:
    return [
        (
            result.place.replace("_", " ").replace(".", ", "),
            f"{result.workload}, {result.num_bytes / 1e6:.1f} MB",
            result.baseline,
            f"{statistics.median(result.seconds) * 1e3:.2f}",
            f"{statistics.median(result.baseline_seconds) * 1e3:.2f}",
            f"{result.gbit_per_s(result.seconds):.2f}",
            f"{result.gbit_per_s(result.baseline_seconds):.2f}",
            f"{result.ratio:.2f}",
            f"{BARS[result.baseline]:g}",
        )
        for result in results
    ]


def _cost_rows(report: HostReport, options: HostOptions) -> list[tuple[str, ...]]:
    us_per_row, rows_per_s = summarise_cost(report.directory, report.rates).values()
    return [
        (f"CPU time a row, us, {options.directory.connections} connections", f"{us_per_row:.0f}", "at most 120"),
        (f"rows per second, {PLAYERS} client processes", f"{rows_per_s:.0f}", "3500 on two cores"),
    ]
