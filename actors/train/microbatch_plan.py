"""Plans in the driver, from the rows' lengths alone, which train rank takes which rows in which microbatch."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...codecs.integers import ceil_div, cut_up, round_up
from .picture_plan import PatchBudget, fill_by_group, picture_costs
from .topology import Topology

Packing = Literal["none", "packed", "dynamic"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Token limit of a microbatch, and the cost of a row that is used to balance ranks.

    For the token limit, a row's tokens are first rounded up to the topology's `pad_multiple`.
    """

    tokens_per_microbatch: int
    """Largest number of tokens that one forward pass computes on one replica; `packing` says how they are counted."""
    linear_cost: float = 1.0
    """Factor a in the cost a·L + b·L² of a row of L tokens; it stands for the matrix products' share of the FLOPs."""
    quadratic_cost: float = 0.0
    """Factor b in the cost a·L + b·L² of a row of L tokens; it stands for attention's share of the FLOPs."""
    group_tolerance: float = 1.05
    """Largest allowed ratio of the highest to the mean cost of the ranks when all rows of a group go to one rank. Above
    it, rows of a group are split over several ranks."""
    packing: Packing = "none"
    """Layout of a microbatch in the backend, which decides how its tokens are counted.

    none      rows are padded to the longest, so tokens = rows x longest; rows stay in the order in which they came
    dynamic   as `none`, but rows are sorted by length, so that neighbours need little padding
    packed    rows lie one behind the other, so tokens = the sum of the rows' tokens; microbatches are balanced by it

    Rows with pictures are put into microbatches group after group instead, see `fill_by_group`.
    """
    pictures: PatchBudget = PatchBudget()
    """Limit and cost of the patches of pictures."""

    def __post_init__(self) -> None:
        if self.packing not in ("none", "packed", "dynamic"):
            raise ValueError(f"trainer.packing: got {self.packing!r}, expected 'none', 'packed' or 'dynamic'")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Assignment of the rows of a receipt (their keys and locations) to train ranks and microbatches."""

    rows: np.ndarray
    """Positions of the rows in the receipt, int64 `[N]`, ordered by rank, then by microbatch. Each of 0..N-1 occurs
    once."""
    sizes: np.ndarray
    """Number of rows of each microbatch, int64 `[dp, M]`. M is the same on every rank (unequal counts deadlock at
    the first collective), so a rank that is short of rows has empty microbatches."""
    digest: str
    """Hash of the plan; a worker that holds a different plan from its leader refuses to start the step."""

    @property
    def num_microbatches(self) -> int:
        return self.sizes.shape[1]

    def shard(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of the rows of `rank`, int64 `[n]`, and the rows per microbatch, int64 `[M]`. Positions
        are those in the receipt."""
        ends = np.cumsum(self.sizes.sum(axis=1))
        start = 0 if rank == 0 else int(ends[rank - 1])
        return self.rows[start : int(ends[rank])], self.sizes[rank]


@dataclass(frozen=True, slots=True)
class RowHosts:
    """The hosts on which rows are stored, and those of the ranks that read them."""

    rows: np.ndarray
    """Number of the host that stores each row, int64 `[N]`; -1 if it is unknown."""
    ranks: np.ndarray
    """Number of the host of each data-parallel rank's leader, int64 `[dp]`."""


NEAR_TOLERANCE = 1.01
"""Ratio of the highest to the mean cost of the ranks up to which a plan that reads more rows from their own host counts
as equal to a plan that is better balanced."""


def plan_shards(
    lengths: np.ndarray,
    topology: Topology,
    budget: Budget,
    groups: np.ndarray | None = None,
    hosts: RowHosts | None = None,
    picture_tokens: np.ndarray | None = None,
) -> ShardPlan:
    """Assign rows to the `topology.dp` data-parallel ranks, and the rows of each rank to microbatches.

    lengths: number of tokens of each row, int `[N]`. groups: group number of each row, int `[N]`, shared by the rows of
    one prompt; None makes each row a group. Ranks are balanced by the cost a·L + b·L² of their rows (greedily, longest
    first). All rows of a group go to one rank, unless max/mean of the ranks' cost would exceed
    `budget.group_tolerance`. Microbatches never exceed the budget; `Budget.packing` says how rows are put into them.
    hosts: among plans that are equally good, one is preferred whose ranks read rows of their own hosts; a plan is equal
    if it has no more microbatches and its highest cost is not above that of the best plan, or within NEAR_TOLERANCE of
    the mean. None prefers none. picture_tokens: number of tokens of each row that are of its pictures, `[N]`; None
    without pictures. Deterministic. Raises ValueError when a single row exceeds the budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    padded = round_up(lengths, topology.pad_multiple)
    if len(padded) and int(padded.max()) > budget.tokens_per_microbatch:
        raise ValueError(
            f"tokens_per_microbatch: got {budget.tokens_per_microbatch}, but row {int(padded.argmax())} alone "
            f"takes {int(padded.max())} tokens; expected at least that"
        )
    cost = budget.linear_cost * lengths + budget.quadratic_cost * lengths.astype(np.float64) ** 2
    patches = None if picture_tokens is None else budget.pictures.patches_per_token * picture_tokens
    if patches is not None:
        cost = cost + picture_costs(patches, groups, budget.pictures)
    rank_of = _deal_ranks(cost, topology.dp, groups, budget.group_tolerance)
    shown = None if patches is None else (patches, np.arange(len(padded)) if groups is None else groups)
    plan = _into_microbatches(rank_of, padded, topology, budget, shown)
    nearer = None if hosts is None else _deal_near(cost, rank_of, groups, hosts)
    if nearer is not None:
        other = _into_microbatches(nearer, padded, topology, budget, shown)
        if other.num_microbatches <= plan.num_microbatches:
            return other
    return plan


def _into_microbatches(
    rank_of: np.ndarray,
    padded: np.ndarray,
    topology: Topology,
    budget: Budget,
    shown: tuple[np.ndarray, np.ndarray] | None,
) -> ShardPlan:
    """Assign the rows of each rank to microbatches. rank_of, padded: rank and padded number of tokens of each row,
    int64 `[N]`. shown: patches and group of each row, `[N]`; None without pictures."""
    order = np.argsort(rank_of, kind="stable")
    counts = np.bincount(rank_of, minlength=topology.dp)
    per_rank = cut_up(order, counts)
    tokens_of = [padded[rows] for rows in per_rank]
    packed = budget.packing == "packed"
    if shown is not None:
        patches, groups = shown
        filled = [
            fill_by_group(
                tokens, patches[rows], groups[rows], budget.tokens_per_microbatch, budget.pictures, packed=packed
            )
            for tokens, rows in zip(tokens_of, per_rank, strict=True)
        ]
        bins = _equal_counts(tokens_of, filled)
    elif packed:
        bins = _equal_sums(tokens_of, budget.tokens_per_microbatch)
    else:
        bins = _equal_rectangles(tokens_of, budget.tokens_per_microbatch, by_length=budget.packing == "dynamic")
    num_bins = max((int(bin_of.max()) + 1 for bin_of in bins if len(bin_of)), default=1)
    rows = [part[np.argsort(bin_of, kind="stable")] for part, bin_of in zip(per_rank, bins, strict=True)]
    sizes = np.stack([np.bincount(bin_of, minlength=num_bins) for bin_of in bins]).astype(np.int64)
    flat = np.concatenate(rows).astype(np.int64)
    digest = hashlib.blake2b(flat.tobytes() + sizes.tobytes(), digest_size=8).hexdigest()
    return ShardPlan(flat, sizes, digest)


def _deal_ranks(cost: np.ndarray, dp: int, groups: np.ndarray | None, tolerance: float) -> np.ndarray:
    """Assign each row to one of `dp` ranks so that the costs of the ranks are balanced. All rows of a group go to one
    rank if max/mean of the cost then stays within `tolerance`. Returns the rank of each row, int64 `[N]`."""
    if dp == 1:
        return np.zeros(len(cost), dtype=np.int64)
    if groups is None:
        return _longest_first(cost, dp)
    _, unit = np.unique(groups, return_inverse=True)
    rank_of = _longest_first(np.bincount(unit, weights=cost), dp)[unit]
    loads = np.bincount(rank_of, weights=cost, minlength=dp)
    if loads.max() <= tolerance * loads.mean():
        return rank_of
    return _split_groups(cost, rank_of, dp, tolerance)


def _deal_near(cost: np.ndarray, rank_of: np.ndarray, groups: np.ndarray | None, hosts: RowHosts) -> np.ndarray | None:
    """Assign each group as a whole, heaviest first, to a rank on the host of its first row where possible.

    The balance must stay as good as in `rank_of`; a group that would harm it goes to any rank. Returns the rank of each
    row, int64 `[N]`, or None if no such assignment is found, or if it has not more rows (by their cost) on their own
    host."""
    labels = np.arange(len(cost)) if groups is None else groups
    _, first, unit = np.unique(labels, return_index=True, return_inverse=True)
    loads = np.bincount(rank_of, weights=cost, minlength=len(hosts.ranks))
    if (rank_of != rank_of[first][unit]).any():  # Groups had to be split for the balance.
        return None
    limit = max(loads.max(), NEAR_TOLERANCE * loads.mean())
    weights, home, dealt = np.bincount(unit, weights=cost), hosts.rows[first], np.zeros(len(first), np.int64)
    ranks = [(0.0, rank) for rank in range(len(hosts.ranks))]
    near = {int(host): [(0.0, rank) for rank in np.flatnonzero(hosts.ranks == host).tolist()] for host in hosts.ranks}
    now = [0.0] * len(ranks)
    for item in np.argsort(-weights, kind="stable").tolist():
        for heap in (near.get(int(home[item]), []), ranks):
            while heap and heap[0][0] != now[heap[0][1]]:
                heapq.heapreplace(heap, (now[heap[0][1]], heap[0][1]))  # The entry is older than the rank's last row.
            if heap and heap[0][0] + weights[item] <= limit:
                break
        else:
            return None
        rank = heap[0][1]
        now[rank] += float(weights[item])
        dealt[item] = rank
    found = dealt[unit]
    gain = cost[hosts.ranks[found] == hosts.rows].sum() - cost[hosts.ranks[rank_of] == hosts.rows].sum()
    return found if gain > 0 else None


def _longest_first(cost: np.ndarray, num_bins: int) -> np.ndarray:
    """Assign each item, heaviest first, to the lightest bin (longest processing time first, Graham 1969)."""
    bin_of = np.empty(len(cost), dtype=np.int64)
    heap = [(0.0, index) for index in range(num_bins)]
    for item, weight in zip(order := np.argsort(-cost, kind="stable"), cost[order].tolist(), strict=True):
        load, index = heap[0]
        bin_of[item] = index
        heapq.heapreplace(heap, (load + weight, index))
    return bin_of


def _split_groups(cost: np.ndarray, rank_of: np.ndarray, dp: int, tolerance: float) -> np.ndarray:
    """Improve the balance of ranks by reassigning single rows, without regard to groups. Reassigns the rows of the
    heaviest and of the lightest rank, or of more light ranks if that does not help, until max/mean of the cost is
    within `tolerance` or all ranks have been tried."""
    rank_of, lightest = rank_of.copy(), 1
    while True:
        loads = np.bincount(rank_of, weights=cost, minlength=dp)
        if loads.max() <= tolerance * loads.mean() or lightest >= 2 * dp:
            return rank_of
        by_load = np.argsort(loads, kind="stable")
        ranks = np.unique(np.append(by_load[:lightest], by_load[-1]))
        rows = np.flatnonzero(np.isin(rank_of, ranks))
        rank_of[rows] = ranks[_longest_first(cost[rows], len(ranks))]
        if np.bincount(rank_of, weights=cost, minlength=dp).max() > 0.999 * loads.max():
            lightest *= 2


def _equal_rectangles(tokens_of: list[np.ndarray], budget: int, *, by_length: bool) -> list[np.ndarray]:
    """Assign each rank's rows to microbatches of at most `budget` tokens when padded, equally many on every rank.
    Returns for each rank the microbatch of each row. by_length: whether to sort the rows by length first."""
    orders = [np.argsort(-tokens, kind="stable") if by_length else np.arange(len(tokens)) for tokens in tokens_of]
    cuts = [(order, _fill(tokens[order], budget)) for tokens, order in zip(tokens_of, orders, strict=True)]
    return _equal_counts(tokens_of, cuts)


def _equal_counts(tokens_of: list[np.ndarray], cuts: list[tuple[np.ndarray, list[int]]]) -> list[np.ndarray]:
    """Split microbatches until all ranks have equally many. Returns for each rank the microbatch of each row.

    cuts: order of each rank's rows, and index in it of the first row of each microbatch.
    """
    num_bins = max(len(starts) for _, starts in cuts)
    bins = []
    for tokens, (order, starts) in zip(tokens_of, cuts, strict=True):
        starts = _split_heaviest(tokens[order], starts, num_bins)
        bin_of = np.empty(len(tokens), dtype=np.int64)
        bin_of[order] = np.searchsorted(starts, np.arange(len(tokens)), side="right") - 1
        bins.append(bin_of)
    return bins


def _fill(tokens: np.ndarray, budget: int) -> list[int]:
    """Fill microbatches with rows in order, each until it would exceed `budget` tokens. The size of a microbatch is its
    padded size: the number of rows times the length of the longest row. Returns the index of the first row of each
    microbatch."""
    starts, end = [0], 0
    while True:
        reach = len(tokens) if not len(tokens) or not tokens[end] else end + int(budget // tokens[end])
        area = np.maximum.accumulate(tokens[end:reach])
        area *= np.arange(1, len(area) + 1)
        end += int(np.searchsorted(area, budget, side="right"))
        if end >= len(tokens):
            return starts
        starts.append(end)


def _split_heaviest(tokens: np.ndarray, starts: list[int], num_bins: int) -> list[int]:
    """Halve the largest microbatches until there are `num_bins` of them, or only microbatches of one row are left.

    starts: index of the first row of each microbatch. Returns the same for the new microbatches. If a microbatch fits
    the budget, so do its halves.
    """
    if len(starts) == num_bins:
        return starts
    heap = []
    for first, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        if stop - first > 1:
            heap.append((-int(tokens[first:stop].max()) * (stop - first), first, stop))
    heapq.heapify(heap)
    starts = list(starts)
    while heap and len(starts) < num_bins:
        _, first, stop = heapq.heappop(heap)
        middle = (first + stop) // 2
        starts.append(middle)
        for a, b in ((first, middle), (middle, stop)):
            if b - a > 1:
                heapq.heappush(heap, (-int(tokens[a:b].max()) * (b - a), a, b))
    return sorted(starts)


def _equal_sums(tokens_of: list[np.ndarray], budget: int) -> list[np.ndarray]:
    """Assign each rank's rows to microbatches whose tokens sum to at most `budget`, equally many on every rank. Returns
    for each rank the microbatch of each row."""
    num_bins = max([1, *(ceil_div(int(tokens.sum()), budget) for tokens in tokens_of)])
    while True:
        dealt = [_fit(tokens, num_bins, budget) for tokens in tokens_of]
        if all(bin_of is not None for bin_of in dealt):
            return [bin_of for bin_of in dealt if bin_of is not None]
        num_bins += max(1, num_bins // 16)


def _fit(tokens: np.ndarray, num_bins: int, budget: int) -> np.ndarray | None:
    """Assign rows to `num_bins` microbatches of at most `budget` tokens, in snake order by length or else greedily.
    Returns the microbatch of each row, or None when neither way fits."""
    if num_bins == 1:
        return np.zeros(len(tokens), dtype=np.int64)
    order = np.argsort(-tokens, kind="stable")
    lap, place = np.divmod(np.arange(len(tokens)), num_bins)
    snake = np.empty(len(tokens), dtype=np.int64)
    snake[order] = np.where(lap % 2 == 0, place, num_bins - 1 - place)
    if not len(tokens) or np.bincount(snake, weights=tokens).max() <= budget:
        return snake
    greedy = _longest_first(tokens.astype(np.float64), num_bins)
    return greedy if np.bincount(greedy, weights=tokens).max() <= budget else None
