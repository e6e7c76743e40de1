"""Implements `rank_aware` and `length_balanced`, the samplers that deal rows to data-parallel ranks."""

from __future__ import annotations

import heapq

import numpy as np

from .samplers import Candidates, ClaimRequest, Order


class RankShares:
    """Deals items (rows or whole groups) to ranks in rounds, and gives each claim a share of its rank.

    A round is dealt when a rank asks that has too few items of its own and enough items are ready that belong to no
    rank: `num_ranks` shares of equally many items, the same number that the claim takes at most, or fewer if fewer are
    ready, but at least as many as the claim takes at least. An item belongs to its rank until the task has finished it
    or it is cleared. The rank that is given an item back (by `retry`, or because its lease ran out) gets it again, and
    before its later shares.

    A claim takes what is left of its rank's oldest share, and continues to the next share only if that is less than the
    claim takes at least. So ranks that ask for equally many items get shares of the same rounds, in whatever order they
    ask. Which items a round has depends only on the items that are ready when it is dealt.
    """

    order: Order = "version"
    looks_ahead: int | None = None
    arguments: tuple[str, ...] = ("rank",)

    def __init__(self, num_ranks: int, *, balanced: bool) -> None:
        """num_ranks: number of ranks, from 1. balanced: whether the shares of a round have about equally many tokens;
        if not, its items go to the ranks in turn."""
        if type(num_ranks) is not int or num_ranks < 1:
            raise ValueError(f"num_ranks: got {num_ranks!r}, expected a whole number from 1")
        self.num_ranks = num_ranks
        self._balanced = balanced
        self._num_rounds = 0

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        rank = request.arguments["rank"]
        if type(rank) is not int or not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank: got {rank!r}, expected 0 to {self.num_ranks - 1}")
        # An item's note is 1 + round * num_ranks + rank, or 0 if it belongs to no rank.
        notes = candidates.notes
        # A partition that was loaded has rounds that were dealt before it was saved: the next ones come after them.
        self._num_rounds = max(self._num_rounds, -(-int(notes.max(initial=0)) // self.num_ranks))
        while True:
            places = notes - 1
            mine = np.flatnonzero((notes > 0) & (places % self.num_ranks == rank))
            if len(mine) >= request.least:
                rounds = places[mine] // self.num_ranks
                mine, rounds = mine[np.argsort(rounds, kind="stable")], np.sort(rounds)
                return mine[rounds <= rounds[request.least - 1]]
            free = np.flatnonzero(notes == 0)
            share = min(request.most, len(free) // self.num_ranks)
            if share < request.least:
                return free[:0]
            dealt = free[: share * self.num_ranks]
            notes[dealt] = 1 + self._num_rounds * self.num_ranks + self._deal(candidates.tokens[dealt])
            candidates.note(dealt, notes[dealt])
            self._num_rounds += 1

    def _deal(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rank that gets each of the items of a round, int64 `[N]`. tokens: number of tokens of each item,
        int64 `[N]`."""
        if not self._balanced:
            return np.arange(len(tokens)) % self.num_ranks
        # The longest first, each to the rank with the fewest tokens so far among those whose share is not full.
        ranks = np.empty(len(tokens), dtype=np.int64)
        sums = [(0, rank) for rank in range(self.num_ranks)]
        left = [len(tokens) // self.num_ranks] * self.num_ranks
        for item in np.argsort(-tokens, kind="stable").tolist():
            total, rank = heapq.heappop(sums)
            ranks[item] = rank
            left[rank] -= 1
            if left[rank]:
                heapq.heappush(sums, (total + int(tokens[item]), rank))
        return ranks
