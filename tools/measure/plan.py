"""`python tools/measure/plan.py` measures the planner's time, memory and balance, from a thousand rows to a million.

Each plan is made in a fresh process, so that its peak memory is its own.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.table import Table

from headrace.actors.train.microbatch_plan import Budget, ShardPlan, plan_shards
from headrace.actors.train.topology import Topology
from headrace.bench.records import conditions, table, write_records, write_summary
from headrace.cli.arguments import Parser, results_folder
from headrace.cli.command import ended
from headrace.cli.terminal import show_results, status_line

LENGTHS = ("lognormal", "uniform", "bimodal")
GROUP_SIZE = 8
MAX_TOKENS = 8192
TOKENS_PER_MICROBATCH = 32_768
# Costs of a dense 7B model: 2 FLOPs per parameter and token, and 4 * hidden * layers per token and attended token, half
# of which are masked.
LINEAR_COST = 2 * 7e9
QUADRATIC_COST = 2 * 4096 * 32


@dataclass(frozen=True, slots=True)
class PlanCase:
    """The input of one measured plan: numbers of rows and ranks, distribution of lengths, and cost to balance."""

    rows: int
    dp: int
    lengths: str
    """Name of the distribution of lengths, one of LENGTHS."""
    squares: bool
    """True to balance only sum(L²), the hardest case; False to balance a model's cost, a·L + b·L²."""


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The cost and quality of one plan. Each field `..._max_over_mean` is the largest value of a rank
    divided by the mean of the ranks."""

    case: PlanCase
    seconds: float
    peak_mib: float
    """MiB of memory that planning took in addition to what the process held before, which includes the lengths."""
    flops_max_over_mean: float
    """Imbalance between the ranks of the cost that the plan balances."""
    bound_max_over_mean: float
    """Lower bound of `flops_max_over_mean`, from `least_max_over_mean`: no assignment of rows to ranks can be
    better."""
    squares_max_over_mean: float
    """Imbalance between the ranks of sum(L²), L being the number of tokens of a row."""
    tokens_max_over_mean: float
    microbatches: int
    microbatches_equal: bool
    """True when every rank has `microbatches` microbatches, none exceeds the token budget, and each row occurs once."""
    blocks_read_over_needed: float
    """Mean number of ranks that read a block, which is a group of rows; 1.0 when each block is read once."""


def plan_here(case: PlanCase) -> PlanResult:
    """Make one plan in this process and return its result. The peak memory is right only if the process is new."""
    lengths = draw_lengths(case.lengths, case.rows)
    groups = np.arange(case.rows) // GROUP_SIZE
    a, b = (0.0, 1.0) if case.squares else (LINEAR_COST, QUADRATIC_COST)
    budget = Budget(TOKENS_PER_MICROBATCH, linear_cost=a, quadratic_cost=b, packing="packed")
    before = psutil.Process().memory_info().rss
    started = time.perf_counter()
    plan = plan_shards(lengths, Topology(dp=case.dp), budget, groups)
    seconds = time.perf_counter() - started
    peak = _most_resident_bytes() - before
    return judge(case, plan, lengths, groups, a * lengths + b * lengths.astype(np.float64) ** 2, seconds, peak)


def _most_resident_bytes() -> int:
    """Return the peak of this process's resident memory in bytes. It is not taken from getrusage, which would include
    the parent's memory at the time of the fork."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def draw_lengths(name: str, rows: int) -> np.ndarray:
    """Draw the numbers of tokens, int64 `[rows]`, 1 to MAX_TOKENS. Raises ValueError for an unknown distribution."""
    rng = np.random.default_rng(7)
    if name == "lognormal":
        drawn = rng.lognormal(6.5, 0.9, rows)
    elif name == "uniform":
        drawn = rng.integers(MAX_TOKENS // 8, MAX_TOKENS + 1, rows)
    elif name == "bimodal":  # short answers, a tenth of which reach the limit
        drawn = np.where(rng.random(rows) < 0.1, MAX_TOKENS, rng.normal(512, 128, rows))
    else:
        raise ValueError(f"lengths: got {name!r}, expected one of {', '.join(LENGTHS)}")
    return np.clip(drawn, 1, MAX_TOKENS).astype(np.int64)


def judge(
    case: PlanCase,
    plan: ShardPlan,
    lengths: np.ndarray,
    groups: np.ndarray,
    cost: np.ndarray,
    seconds: float,
    peak_bytes: float,
) -> PlanResult:
    """Compute the balance of a plan, check its validity, and return both as its result."""
    rank_of = np.empty(case.rows, dtype=np.int64)
    rank_of[plan.rows] = np.repeat(np.arange(case.dp), plan.sizes.sum(axis=1))
    ends = np.cumsum(plan.sizes.ravel())
    tokens = np.concatenate(([0], np.cumsum(lengths[plan.rows])))
    within = np.diff(tokens[np.concatenate(([0], ends))]).max() <= TOKENS_PER_MICROBATCH
    once = np.array_equal(np.sort(plan.rows), np.arange(case.rows)) and len(plan.sizes) == case.dp
    pairs = len(np.unique(groups * case.dp + rank_of))

    def spread(weights: np.ndarray) -> float:
        loads = np.bincount(rank_of, weights=weights, minlength=case.dp)
        return float(loads.max() / loads.mean())

    return PlanResult(
        case,
        seconds,
        peak_bytes / 2**20,
        spread(cost),
        least_max_over_mean(cost, case.dp),
        spread(lengths.astype(np.float64) ** 2),
        spread(lengths),
        plan.num_microbatches,
        bool(within and once),
        pairs / len(np.unique(groups)),
    )


def least_max_over_mean(cost: np.ndarray, dp: int) -> float:
    """Return a lower bound of max/mean over the ranks that holds for any plan.

    Of the k·dp + 1 costliest rows, some rank has at least k + 1, and these cost at least as much as the cheapest k + 1
    of them.
    """
    falling = np.sort(cost)[::-1]
    summed = np.concatenate(([0.0], np.cumsum(falling)))
    k = np.arange((len(cost) - 1) // dp + 1)
    last = k * dp + 1
    return max(1.0, float((summed[last] - summed[last - k - 1]).max() * dp / cost.sum()))


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
    header = ("rows", "dp", "lengths", "balanced", "s", "MiB", "cost max/mean", "at best", "sum(L) max/mean",
              "microbatches", "blocks read / needed")  # fmt: skip
    rows = [
        (
            str(result.case.rows),
            str(result.case.dp),
            result.case.lengths,
            "sum(L²)" if result.case.squares else "a·L + b·L²",
            f"{result.seconds:.3f}",
            f"{result.peak_mib:.1f}",
            f"{result.flops_max_over_mean:.4f}",
            f"{result.bound_max_over_mean:.4f}",
            f"{result.tokens_max_over_mean:.4f}",
            f"{result.microbatches}" + ("" if result.microbatches_equal else " (invalid)"),
            f"{result.blocks_read_over_needed:.3f}",
        )
        for result in results
    ]
    return table("plans", header, rows, left=("lengths", "balanced"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and return the exit code."""
    parser = Parser("tools/measure/plan.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="at most 16k rows")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results; default: runs/bench-...")
    arguments = parser.parse_args(argv)

    def run() -> int:
        out = results_folder(arguments, "plan")
        with status_line("planning") as (console, tell):
            results = run_plan(out, quick=arguments.quick, tell=tell)
        return show_results(console, plan_table(results), out)

    return ended(run)


if __name__ == "__main__":
    sys.exit(main())
