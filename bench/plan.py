"""`headrace bench plan` measures the planner's time, memory and balance, from a thousand rows to a million.

Each plan is made in a fresh process, so that its peak memory is its own.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from .conditions import conditions
from .plan_case import GROUP_SIZE, LENGTHS, MAX_TOKENS, TOKENS_PER_MICROBATCH, PlanCase, PlanResult, plan_here
from .transfer.results import write_records, write_summary

SIZES = ((512, 8), (1024, 8), (1024, 64), (2048, 64), (16_384, 8), (16_384, 64), (16_384, 1024))
LARGE_SIZES = ((131_072, 8), (131_072, 64), (131_072, 1024), (1 << 20, 8), (1 << 20, 64), (1 << 20, 1024))
"""Sizes that a quick run leaves out. Like SIZES, they are pairs (number of rows, number of data-parallel ranks)."""
PLAN_TIMEOUT_S = 300.0


def run_plan(out: Path, *, quick: bool, tell: Callable[[str], None]) -> list[PlanResult]:
    """Make a plan for every size and distribution of lengths, and return the results. Writes results.jsonl and
    summary.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    facts = conditions(
        repeats=1, group_size=GROUP_SIZE, max_tokens=MAX_TOKENS, tokens_per_microbatch=TOKENS_PER_MICROBATCH
    )
    results = []
    for rows, dp in SIZES if quick else SIZES + LARGE_SIZES:
        for lengths in LENGTHS:
            for squares in (False, True) if rows <= SIZES[-1][0] else (False,):
                tell(f"{rows} rows, dp {dp}, {lengths}")
                results.append(measure_plan(PlanCase(rows, dp, lengths, squares)))
    records = [asdict(result.case) | {k: v for k, v in asdict(result).items() if k != "case"} for result in results]
    write_records(out / "results.jsonl", records, facts)
    write_summary(out / "summary.json", summarise_plans(results), facts)
    return results


def measure_plan(case: PlanCase) -> PlanResult:
    """Make one plan in a fresh process, and return its cost and quality."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(plan_here, case).result(PLAN_TIMEOUT_S)


def summarise_plans(results: Sequence[PlanResult]) -> dict[str, float | bool]:
    """Return the summary by key, `plan.{rows}x{dp}.*`, each value being the worst over the distributions of lengths.
    The keys that end in `squares_max_over_mean` exist only for plans that balance sum(L²), one for each
    distribution."""
    summary: dict[str, float | bool] = {}
    for rows, dp in dict.fromkeys((result.case.rows, result.case.dp) for result in results):
        found = [result for result in results if (result.case.rows, result.case.dp) == (rows, dp)]
        model, name = [result for result in found if not result.case.squares], f"plan.{rows}x{dp}"
        summary[f"{name}.seconds"] = max(result.seconds for result in found)
        summary[f"{name}.peak_mib"] = max(result.peak_mib for result in found)
        summary[f"{name}.flops_max_over_mean"] = max(result.flops_max_over_mean for result in model)
        summary[f"{name}.tokens_max_over_mean"] = max(result.tokens_max_over_mean for result in model)
        summary[f"{name}.bound_max_over_mean"] = max(result.bound_max_over_mean for result in found)
        summary[f"{name}.blocks_read_over_needed"] = max(result.blocks_read_over_needed for result in found)
        summary[f"{name}.microbatches_equal"] = all(result.microbatches_equal for result in found)
        for result in found:
            if result.case.squares:
                summary[f"{name}.{result.case.lengths}.squares_max_over_mean"] = result.squares_max_over_mean
    return summary


def plan_table(results: Sequence[PlanResult]) -> Table:
    """Return a table with one row per plan."""
    table = Table(title="headrace bench plan", title_justify="left", title_style="bold")
    header = ("rows", "dp", "lengths", "balanced", "s", "MiB", "cost max/mean", "at best", "sum(L) max/mean")
    for name in (*header, "microbatches", "blocks read / needed"):
        table.add_column(name, justify="left" if name in ("lengths", "balanced") else "right")
    for result in results:
        case = result.case
        table.add_row(
            str(case.rows),
            str(case.dp),
            case.lengths,
            "sum(L²)" if case.squares else "a·L + b·L²",
            f"{result.seconds:.3f}",
            f"{result.peak_mib:.1f}",
            f"{result.flops_max_over_mean:.4f}",
            f"{result.bound_max_over_mean:.4f}",
            f"{result.tokens_max_over_mean:.4f}",
            f"{result.microbatches}" + ("" if result.microbatches_equal else " (invalid)"),
            f"{result.blocks_read_over_needed:.3f}",
        )
    return table
