"""Tracks one task's progress in its partition: which rows it has leased or finished, and which it can claim next."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...codecs.integers import distinct, distinct_counts
from ..errors import SamplerError
from ..status import LeaseStatus, TaskReset, TaskStatus
from .ready import ReadyView
from .rows import GroupTable, Notes, RowTable, grown
from .samplers import ClaimRequest, FirstInOrder, StreamProgress, TaskConfig, build_sampler, chosen

DONE = -1
"""Value in a cursor's column for a row that the task has finished. The value 0 means that the row is free, and a
positive value is the id of the lease that holds it."""
MAX_VIEWS = 8
"""Maximum number of indexes of claimable rows (one for each set of claimed fields) that a task keeps up to date. Above
this number, the least recently used index is dropped, and rebuilt when it is needed."""


class TaskCursor:
    """Records for each row whether one task (consumer) has finished it, leased it or can claim it. Indexes of the rows
    that the task can claim are kept up to date."""

    def __init__(
        self, config: TaskConfig, partition: str, rows: RowTable, groups: GroupTable, samplers: Collection[str]
    ) -> None:
        """samplers: import paths of the samplers that are not built in. Raises ValueError for an unknown sampler, for
        options that the sampler does not take, and for an invalid `max_hold_s`."""
        if config.max_hold_s is not None and not 0 < config.max_hold_s < math.inf:
            raise ValueError(
                f"task {config.name!r}: got max_hold_s={config.max_hold_s:g}, expected seconds > 0, or None"
            )
        self.config = config
        self.sampler = build_sampler(config, samplers)
        self.progress = StreamProgress(config.first_prompt, config.settled) if self.sampler.order == "prompt" else None
        """Progress in the prompt stream; None for samplers that do not follow the prompts."""
        self.column = np.empty(0, dtype=np.int64)
        self.num_leased = 0
        self.num_done = 0
        self._partition = partition
        self._rows = rows
        self._groups = groups
        self.notes = Notes()
        """Numbers that the sampler noted for rows that the task has not finished."""
        self._views: OrderedDict[tuple[tuple[str, ...], bool], ReadyView] = OrderedDict()

    def view(self, fields: tuple[str, ...], whole_groups: bool) -> ReadyView:
        """Return the index of the rows, or whole groups, that the task can claim with all of `fields`. It is kept up to
        date from now on.

        Raises ValueError when single rows are asked for although the task's sampler follows the prompts and takes only
        whole groups.
        """
        if self.progress is not None and self._groups.group_size > 1 and not whole_groups:
            raise ValueError(
                f"claim: sampler {self.config.sampler!r} of task {self.config.name!r} follows the prompts and takes "
                f"whole groups of {self._groups.group_size}, expected whole_groups=True"
            )
        key = (tuple(sorted(fields)), whole_groups)
        view = self._views.get(key)
        if view is None:
            view = ReadyView(key[0], whole_groups, self._rows, self._groups, self.sampler.order, self.progress)
            self._views[key] = view
            view.refresh(self._rows.live(), self.column)
            if len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)
        self._views.move_to_end(key)
        return view

    @property
    def num_stale(self) -> int:
        """Number of rows that the task's latest claim skipped because their version was too old."""
        return next(reversed(self._views.values())).num_stale if self._views else 0

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError unless a claim gives the sampler exactly the arguments that it takes."""
        expected = sorted(self.sampler.arguments)
        if sorted(arguments) != expected:
            raise ValueError(
                f"claim: got the arguments {sorted(arguments)}, but sampler {self.config.sampler!r} of task "
                f"{self.config.name!r} takes {expected or 'none'}"
            )

    def choose(
        self, view: ReadyView, most_rows: int, least_rows: int, arguments: Mapping[str, Any]
    ) -> np.ndarray | None:
        """Return the rows that a claim takes now, int64 `[least_rows to most_rows]`. Returns None when too few are
        ready or the sampler waits for more.

        Raises SamplerError when the sampler fails or makes an invalid choice.
        """
        request = ClaimRequest(most_rows // view.rows_per_item, least_rows // view.rows_per_item, arguments)
        if view.num_items < request.least:
            return None
        if isinstance(self.sampler, FirstInOrder):
            return view.rows_of(view.first(request.most))
        ahead = self.sampler.looks_ahead
        items = view.first(view.num_items if ahead is None else request.most + ahead)
        try:
            positions = chosen(self.sampler, view.candidates(items, self.notes), request)
        except SamplerError as error:
            message = f"task {self.config.name!r}, sampler {self.config.sampler!r}: {error.message}"
            raise SamplerError(message, op="claim", partition=self._partition) from error
        return view.rows_of(items[positions]) if len(positions) >= request.least else None

    def lease(self, rows: np.ndarray, lease_id: int) -> None:
        """Mark free rows as held by a lease, and their positions in the prompt stream as settled."""
        self.set(rows, lease_id)
        self._settle(rows)

    def set(self, rows: np.ndarray, value: int) -> None:
        """Set the state of `rows` to DONE, to 0 for free, or to a lease id, and update the views. `rows` has no
        repeats."""
        before = self._assign(rows, value)
        if not value or not before.all():  # The views hold no row that was leased or finished and still is.
            self.refresh(rows)

    def refresh(self, rows: np.ndarray, *, requeue: bool = False) -> None:
        """Update the views for rows that were written or have changed state. requeue: whether the rows' versions may
        have changed, too."""
        for view in self._views.values():
            view.refresh(rows, self.column, requeue=requeue)

    def grow(self) -> None:
        """Extend the cursor's column to cover rows that were just added to the row table."""
        self.column = grown(self.column, self._rows.capacity, 0)

    def forget(self, rows: np.ndarray) -> np.ndarray:
        """Forget rows that are being cleared and are already marked as unwritten. Returns the ids of the leases that
        held them; an id occurs once for each row."""
        if not self.column[rows].all():  # The views hold only rows that are free.
            self.refresh(rows)
        held = self._assign(rows, 0)
        self.notes.forget(rows)
        self._settle(rows)
        return held[held > 0]

    def _assign(self, rows: np.ndarray, value: int) -> np.ndarray:
        """Set the state of `rows`, and update the numbers of leased and finished rows. Returns the rows' previous
        states."""
        before = self.column[rows]
        self.num_leased -= int(np.count_nonzero(before > 0))
        self.num_done -= int(np.count_nonzero(before == DONE))
        self.num_leased += len(rows) * (value > 0)
        self.num_done += len(rows) * (value == DONE)
        self.column[rows] = value
        if value == DONE:
            self.notes.forget(rows)
        return before

    def notes_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the number that the sampler has noted for each of `rows`, int64 `[N]`; empty without notes."""
        notes = self.notes.of(rows)
        return notes if notes.any() else notes[:0]

    def restore_notes(self, rows: np.ndarray, notes: np.ndarray) -> None:
        """Give rows the numbers that `notes_of` returned for them. Raises ValueError for numbers of another dtype or
        length."""
        if notes.dtype != np.int64 or notes.shape not in ((0,), rows.shape):
            raise ValueError(
                f"load: task {self.config.name!r} has notes {notes.dtype} {list(notes.shape)}, expected int64 for each "
                f"of {len(rows)} rows, or none"
            )
        if len(notes):
            self.notes.set(rows, notes)

    def skip(self, positions: np.ndarray) -> None:
        """Settle positions of the prompt stream, int64 `[N]`. Raises ValueError for a negative position, and if the
        task's sampler does not follow the prompts."""
        if self.progress is None:
            raise ValueError(
                f"skip: sampler {self.config.sampler!r} of task {self.config.name!r} does not follow the prompts, "
                "expected a task that does, such as one with the sampler 'in_order'"
            )
        if len(positions) and positions.min() < 0:
            raise ValueError(f"skip: got position {positions.min()}, expected positions from 0")
        self.progress.settle(positions.tolist())

    def reset(self, rows: np.ndarray) -> TaskReset:
        """Mark the finished rows among `rows` as free. `rows` has no repeats."""
        states = self.column[rows]
        finished = rows[states == DONE]
        self.set(finished, 0)
        return TaskReset(len(finished), int((states > 0).sum()))

    def status(self, fields: Iterable[str]) -> TaskStatus:
        """Return the task's progress, counting rows as ready if all of `fields` are written."""
        ready = self.column[: self._rows.capacity] == 0
        for name in fields:
            ready &= self._rows.slots[name] >= 0  # Row numbers without a row are marked as unwritten, too.
        num_rows, num_ready = len(self._rows), int(ready.sum())
        not_ready = num_rows - num_ready - self.num_leased - self.num_done
        first, ahead = (None, 0) if self.progress is None else (self.progress.first, len(self.progress.ahead))
        return TaskStatus(num_rows, num_ready, self.num_leased, self.num_done, not_ready, first, ahead)

    def waits_for(self, *, enough: bool) -> str:
        """Return the end of a ClaimTimeout's message that says what the sampler waits for; "" if it does not wait.
        enough: whether enough rows are ready for the claim."""
        if self.progress is not None:
            return f", {self.config.sampler!r} waits for the prompt at position {self.progress.first}"
        waits = enough and not isinstance(self.sampler, FirstInOrder)
        return f", and sampler {self.config.sampler!r} waits for others" if waits else ""

    def _settle(self, rows: np.ndarray) -> None:
        if self.progress is not None:
            self.progress.settle(distinct(self._rows.positions(rows)).tolist())


# ---------------- Leases record which rows of a task are held, and until when.


@dataclass(slots=True)
class Lease:
    """A claim's right to its rows, which lasts until the rows are released or the deadline passes."""

    lease_id: int
    partition: str
    task: str
    rows: np.ndarray
    """Numbers of the rows that were claimed, int64 `[N]`. The lease still holds the rows with its id in the cursor's
    column."""
    held: int
    """Number of rows that the lease still holds."""
    granted: float
    deadline: float
    """Time in seconds at which the lease expires unless it is renewed, by the monotonic clock of the directory's
    argument `now`."""
    last_deadline: float
    """Latest time to which the lease can be renewed, by the same clock; infinite without `max_hold_s`."""
    holder: str

    def status(self, keys: Sequence[str], now: float) -> LeaseStatus:
        """Return the state of the lease, which holds the rows of `keys`."""
        held_s, expires_s = now - self.granted, self.deadline - now
        return LeaseStatus(self.lease_id, self.task, self.holder, tuple(keys), held_s, expires_s)


class LeaseBook:
    """Holds all leases of a run. Lease ids are never reused."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        self.next_id = 1

    def grant(
        self, partition: str, task: TaskConfig, rows: np.ndarray, now: float, lease_s: float, holder: str
    ) -> Lease:
        last = math.inf if task.max_hold_s is None else now + task.max_hold_s
        deadline = min(now + lease_s, last)
        lease = Lease(self.next_id, partition, task.name, rows, len(rows), now, deadline, last, holder)
        self.next_id += 1
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.lease_id))
        return lease

    def get(self, lease_id: int) -> Lease | None:
        """Return a lease, or None if it has ended."""
        return self._leases.get(lease_id)

    def drop_rows(self, lease_ids: np.ndarray) -> None:
        """Reduce the number of rows that a lease holds by one for each time that its id occurs in `lease_ids`."""
        for lease_id, count in zip(*distinct_counts(lease_ids), strict=True):
            self.drop(int(lease_id), int(count))

    def drop(self, lease_id: int, num_rows: int) -> None:
        """Reduce the number of rows that a lease holds. A lease that holds no more rows ends."""
        if num_rows:
            lease = self._leases[lease_id]
            lease.held -= num_rows
            if lease.held == 0:
                del self._leases[lease_id]

    def renew(self, lease_ids: Iterable[int], deadline: float) -> list[int]:
        """Extend leases to `deadline`, and return the ids of the leases that still exist. A task's `max_hold_s` limits
        the extension."""
        live = [lease_id for lease_id in lease_ids if lease_id in self._leases]
        for lease in map(self._leases.__getitem__, live):
            lease.deadline = min(deadline, lease.last_deadline)
        return live

    def forgive(self, away_s: float) -> None:
        """Extend the last deadline of all leases by the seconds for which the directory's process did not run."""
        for lease in self._leases.values():
            lease.last_deadline += away_s

    def take_expired(self, now: float) -> list[Lease]:
        """Return the leases whose deadline is not after `now`. They still count as held until `drop_rows` has dropped
        their rows."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            expired.append(self._leases[heapq.heappop(self._deadlines)[1]])
        return expired

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the live leases, by the same clock as `now`; None when there are none."""
        while self._deadlines:
            deadline, lease_id = self._deadlines[0]
            lease = self._leases.get(lease_id)
            if lease is None:
                heapq.heappop(self._deadlines)
            elif lease.deadline > deadline:  # The lease was renewed after this entry was made.
                heapq.heapreplace(self._deadlines, (lease.deadline, lease_id))
            else:
                return deadline
        return None

    def of(self, partition: str | None = None) -> list[Lease]:
        """Return the live leases of a partition (None: of all partitions), oldest first."""
        return [lease for lease in self._leases.values() if partition in (None, lease.partition)]
