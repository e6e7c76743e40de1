"""Defines and builds samplers, which choose the rows that a claim takes. A task names its sampler.

A sampler is a function of numpy columns. It runs in the directory's process, within the claim, so it must be quick. It
must not keep the arrays that it is shown; to remember something about a row, it notes a number. It chooses among
*items*: single rows, or groups when the claim asks for whole groups.
"""

from __future__ import annotations

import heapq
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from ...codecs.objects import MAX_DEPTH
from ..errors import SamplerError
from ..imports import import_object
from ..meta import POSITION
from .rows import NO_POSITION, GroupTable, Notes, RowTable

Order = Literal["version", "ready", "prompt"]
ORDERS: tuple[Order, ...] = ("version", "ready", "prompt")


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Declares a consumer of a partition, and how its claims choose rows."""

    name: str
    sampler: str = "oldest_version_first"
    """Sampler of the task: `oldest_version_first`, `ready_first`, `in_order`, `windowed`, `rank_aware`,
    `length_balanced`, or your own factory as `package.module:function`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the sampler, as plain values. `windowed` takes `window`, a number of groups; `rank_aware`
    and `length_balanced` take `num_ranks`."""
    first_prompt: int = 0
    """Position in the prompt stream from which `in_order` and `windowed` start. A resumed run gives the position at
    which it stopped."""
    settled: tuple[int, ...] = ()
    """Positions after `first_prompt` for which the task does not wait, because their prompts have been trained on or
    dropped."""
    max_hold_s: float | None = None
    """Longest time in seconds for which a claim of the task can hold its rows, even if its client lives. The rows can
    then be claimed again. None sets no limit."""

    def __post_init__(self) -> None:
        for name in ("name", "sampler"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"task: got {name}={getattr(self, name)!r}, expected a non-empty string")
        if not isinstance(self.options, dict):
            raise ValueError(f"task {self.name!r}: got options {self.options!r}, expected a dict")
        if type(self.first_prompt) is not int or self.first_prompt < 0:
            raise ValueError(f"task {self.name!r}: got first_prompt={self.first_prompt!r}, expected an integer >= 0")


class StreamProgress:
    """Records which positions in the prompt stream are settled. A task does not wait for a settled position.

    A position is settled once its prompt was claimed, was passed over because of its version, was cleared before that,
    or was skipped by a call.
    """

    def __init__(self, first: int = 0, ahead: Iterable[int] = ()) -> None:
        self.first = first
        """Lowest position in the prompt stream that is not settled."""
        self.ahead = set(ahead)
        """Settled positions after `first`."""

    def settle(self, positions: Iterable[int]) -> None:
        """Mark positions as settled. Positions that are settled already, and NO_POSITION, are ignored."""
        self.ahead.update(position for position in positions if position >= self.first)
        while self.first in self.ahead:
            self.ahead.discard(self.first)
            self.first += 1

    def copy(self) -> StreamProgress:
        return StreamProgress(self.first, self.ahead)


class Candidates:
    """Shows N claimable items to a sampler, as columns `[N]` in the sampler's order. Each column is computed when it is
    accessed."""

    def __init__(
        self, items: np.ndarray, tickets: np.ndarray, rows: RowTable, groups: GroupTable, whole: bool,
        progress: StreamProgress | None, notes: Notes,
    ) -> None:  # fmt: skip
        self._rows = rows
        self._groups = groups
        self._members = groups.rows[items] if whole else items[:, None]
        """Row numbers of each item, int64 `[N, rows per item]`."""
        self.ready = tickets
        """Sequence number of the time at which each item last became ready, int64 `[N]`; a higher number is later.
        Items that were ready before the task's first claim of these fields are numbered in order of arrival."""
        self._progress = progress
        self._notes = notes

    def __len__(self) -> int:
        return len(self._members)

    @property
    def groups(self) -> np.ndarray:
        """Id of each item's group, int64 `[N]`, equal to `groups` in a receipt (`KVBatchMeta`)."""
        return self._groups.numbers[self._group_index]

    @property
    def prompts(self) -> np.ndarray:
        """Position of each item in the prompt stream, int64 `[N]`, from its first row; NO_POSITION without the tag."""
        return self._rows.positions(self._members[:, 0])

    @property
    def versions(self) -> np.ndarray:
        """Lowest policy version among each item's rows, int64 `[N]`."""
        return self._rows.versions[self._members].min(axis=1)

    @property
    def arrivals(self) -> np.ndarray:
        """Sequence number of the first write to any row of each item, int64 `[N]`; a higher number is later."""
        return self._rows.arrivals[self._members].min(axis=1)

    @property
    def tokens(self) -> np.ndarray:
        """Number of tokens in all rows of each item together, int64 `[N]`."""
        return np.maximum(self._rows.lengths[self._members], 0).sum(axis=1)

    @property
    def tags(self) -> Mapping[str, np.ndarray]:
        """Tags that all rows of the items were given, as tag name -> array `[N, rows per item]`. Tags are named numbers
        or texts; texts have dtype object."""
        return _Tags(self._rows, self._members)

    @property
    def notes(self) -> np.ndarray:
        """Number that the sampler has noted for each item, int64 `[N]`; 0 for none. The array is a copy."""
        # A row that replaces a cleared row has no note, so its item has none.
        return self._notes.of(self._members).min(axis=1)

    def note(self, positions: np.ndarray, numbers: np.ndarray) -> None:
        """Note a number for each item at `positions` (int `[M]`), so that later claims of the task see it in `notes`.
        However this claim ends, a note stays until the task has finished the item or one of its rows is cleared.
        numbers: int `[M]`."""
        self._notes.set(self._members[positions], np.asarray(numbers)[:, None])

    @property
    def progress(self) -> StreamProgress:
        """Copy of the task's progress in the prompt stream. Available only to samplers whose `order` is "prompt"."""
        assert self._progress is not None, "kept for samplers of the prompts' order only"
        return self._progress.copy()

    @property
    def _group_index(self) -> np.ndarray:
        return self._rows.groups[self._members[:, 0]]


class _Tags(Mapping[str, np.ndarray]):
    """Mapping from the names of tags (named numbers or texts of rows) to arrays. Each array is looked up only when it
    is accessed."""

    def __init__(self, rows: RowTable, members: np.ndarray) -> None:
        self._rows = rows
        self._members = members

    def __getitem__(self, name: str) -> np.ndarray:
        if not self._rows.tag_given[name][self._members].all():
            raise KeyError(name)
        return self._rows.tags[name][self._members]

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, given in self._rows.tag_given.items() if given[self._members].all()])

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Tells a sampler what a claim asks for. Items are single rows, or groups when the claim asks for whole groups."""

    most: int
    """Largest number of items that the claim takes."""
    least: int
    """Smallest number of items that the claim accepts, at most `most`."""
    arguments: Mapping[str, Any]
    """Arguments that the claim gives the sampler, as plain values: one for each name in `Sampler.arguments`."""


class Sampler(Protocol):
    """Interface of samplers, which choose items (rows or whole groups) for one task. A sampler factory returns one."""

    order: Order
    """Order in which items are shown to the sampler: "version" sorts them by `versions` and then `arrivals`, "ready" by
    `ready`, and "prompt" by `prompts` and then `arrivals`."""
    looks_ahead: int | None
    """Maximum number of items shown to the sampler beyond the most that a claim takes. None shows all claimable items,
    which costs each claim about 1 ms per 10,000 items."""
    arguments: tuple[str, ...]
    """Names of the arguments that every claim gives the sampler. A claim with missing or other arguments is refused
    with a ValueError."""

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        """Return the items to take, as integer positions in `candidates` without repeats. The claim returns them in
        this order.

        candidates: at least `request.least` items, all claimable now. If fewer positions than `request.least` are
        returned, the claim waits, and calls `select` again when rows become ready, are given back or are cleared. If
        more than `request.most` are returned, the first `request.most` are taken.
        """
        ...


class FirstInOrder:
    """Implements `oldest_version_first` and `ready_first`, which take the first items in their order."""

    looks_ahead: int | None = 0
    arguments: tuple[str, ...] = ()

    def __init__(self, order: Order) -> None:
        self.order: Order = order

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        return np.arange(min(request.most, len(candidates)))


class Windowed:
    """Implements `in_order` and `windowed`, which follow the prompt stream. They take prompts from a window of `window`
    positions, which begins at the first unsettled position.

    `in_order` has a window of 1, so it takes a prompt only after all prompts before it. Both wait at a prompt that is
    not put. They continue once it is put, even if it is then cleared instead of claimed, or once it is skipped.
    """

    order: Order = "prompt"
    looks_ahead: int | None = 0
    arguments: tuple[str, ...] = ()

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError(f"window: got {window}, expected at least 1")
        self.window = window

    def select(self, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
        prompts = candidates.prompts.tolist()
        if prompts and prompts[0] == NO_POSITION:
            raise ValueError(
                f"the rows of group {int(candidates.groups[0])} have no tag {POSITION!r}, expected their position in "
                "the prompt stream, which `in_order` and `windowed` follow"
            )
        progress, count = candidates.progress, 0
        for number in prompts[: request.most]:
            if number >= progress.first + self.window:
                break
            progress.settle((number,))
            count += 1
        return np.arange(count)


def chosen(sampler: Sampler, candidates: Candidates, request: ClaimRequest) -> np.ndarray:
    """Let a sampler choose, and check its choice. Returns the positions of the items to take, int64, at most
    `request.most`.

    Raises SamplerError when the sampler raises an error, or when its choice is not a 1-D array of integers, is out of
    range or has repeats.
    """
    try:
        positions = np.asarray(sampler.select(candidates, request))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A user's sampler can raise any error, and the claim must report it.
        raise SamplerError(f"{_name(sampler)} raised {type(error).__name__}: {error}") from error
    if positions.ndim != 1 or (positions.dtype.kind not in "iu" and len(positions)):
        shape = list(positions.shape)
        raise SamplerError(
            f"{_name(sampler)} returned {positions.dtype} {shape}, expected one dimension of integer positions"
        )
    positions = positions.astype(np.int64)
    outside = positions[(positions < 0) | (positions >= len(candidates))]
    if len(outside):
        raise SamplerError(f"{_name(sampler)} chose item {outside[0]}, expected one of {len(candidates)} items")
    if len(np.unique(positions)) < len(positions):
        raise SamplerError(f"{_name(sampler)} chose an item twice")
    return positions[: request.most]


def check_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a claim as a dict. Raises ValueError naming the first one that is not a plain value,
    which is None, bool, int of 64 bits, float, str, bytes, or a list, tuple or dict (with str as keys) of such values,
    nested at most MAX_DEPTH deep."""
    for name, value in arguments.items():
        if not (isinstance(name, str) and _is_plain(value, 0)):
            got = f"{reprlib.repr(name)}: {reprlib.repr(value)}"
            raise ValueError(f"arguments: got {got}, expected names and plain values, at most {MAX_DEPTH} deep")
    return dict(arguments)


def _is_plain(value: Any, depth: int) -> bool:
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, list | tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item, depth + 1) for key, item in value.items())
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 64
    return value is None or type(value) in (bool, float, str, bytes)


def _name(sampler: Sampler) -> str:
    return f"sampler {type(sampler).__name__}"


class RankShares:
    """Deals items (rows or whole groups) to ranks in rounds, and gives each claim a share of its rank.

    A round is dealt when a rank claims items, has too few, and enough items that belong to no rank are ready. It has
    `num_ranks` shares of equally many items: the most that the claim takes, or fewer if fewer are ready, but at least
    as many as the claim takes at least. An item belongs to its rank until the task has finished it or it is cleared.
    An item that is given back (by `retry`, or because its lease ran out) stays with its rank, which gets it before its
    later shares.

    A claim takes the rest of its rank's oldest share. It continues to the next share only if the rest is less than the
    claim takes at least. So ranks that ask for equally many items get shares of the same rounds in any order of their
    claims. The items of a round depend only on the items that are ready when it is dealt.
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
        # A loaded partition already has rounds from before it was saved; new rounds get higher numbers.
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
        """Return the rank of each item of a round, int64 `[N]`. tokens: number of tokens of each item, int64 `[N]`."""
        if not self._balanced:
            return np.arange(len(tokens)) % self.num_ranks
        # The longest items are dealt first, each to the rank with the fewest tokens so far whose share is not full.
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


FOR_RANKS = ("rank_aware", "length_balanced")
"""Names of the samplers that serve each rank separately."""
BUILT_IN = ("oldest_version_first", "ready_first", "in_order", "windowed", *FOR_RANKS)


def build_sampler(task: TaskConfig, own: Collection[str]) -> Sampler:
    """Build the task's sampler.

    own: import paths that a task can name, from the configuration key `dataplane.samplers`. No other module is
    imported, because tasks come from clients. Raises ValueError for an unknown name or another import path, for options
    that the sampler does not take, and for a factory that raises an error or does not return a Sampler.
    """
    where = f"task {task.name!r}: sampler {task.sampler!r}"
    try:
        if task.sampler == "oldest_version_first":
            return FirstInOrder("version", **task.options)
        if task.sampler == "ready_first":
            return FirstInOrder("ready", **task.options)
        if task.sampler == "in_order":
            return Windowed(1, **task.options)
        if task.sampler == "windowed":
            return Windowed(**task.options)
        if task.sampler == "rank_aware":
            return RankShares(**task.options, balanced=False)
        if task.sampler == "length_balanced":
            return RankShares(**task.options, balanced=True)
        if task.sampler not in own:
            raise ValueError(
                f"expected {', '.join(BUILT_IN)}, or one of the import paths that the configuration key "
                f"dataplane.samplers lists, {list(own)}"
            )
        built = import_object(task.sampler, "factory")(**task.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    except Exception as error:  # A user's factory can raise any error.
        raise ValueError(f"{where}: its factory raised {type(error).__name__}: {error}") from error
    parts = ("order", "looks_ahead", "arguments", "select")
    if not all(hasattr(built, part) for part in parts) or built.order not in ORDERS or not callable(built.select):
        raise ValueError(f"{where}: its factory returned {built!r}, expected a Sampler ({', '.join(parts)})")
    return built
