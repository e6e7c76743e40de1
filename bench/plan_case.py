"""Makes, times and judges one plan of the planner's benchmark, in a process of its own.

The module imports little, because every plan starts a new process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from ..actors.train.shard_plans import Budget, ShardPlan, plan_shards
from ..actors.train.topology import Topology

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
