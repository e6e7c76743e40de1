"""Streams the rows of a partition into torch's DataLoader, or into any loop, by claiming them for a task."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from ..codecs.batch import Batch, Column
from ..codecs.jagged import pack, unpack
from ..codecs.schema import Schema
from .client.arguments import checked_call
from .client.client import DataPlaneClient
from .directory.samplers import TaskConfig
from .errors import ClaimTimeout, DataPlaneError, InvalidArgument
from .factory import connect
from .handle import DataPlaneHandle
from .meta import KVBatchMeta


class _Row(dict[str, Any]):
    """One row, as a dict from field to value, with the schema of its fields."""

    schema: Schema

    def __reduce__(self):
        return dict, (dict(self),)  # A process that receives a row needs no schema.


def _collate_rows(rows: list[_Row], **_: Any) -> dict[str, Column]:
    """Return rows as a dict of the columns that a batch of them has."""
    return dict(pack(rows[0].schema, {name: [row[name] for row in rows] for name in rows[0]}, len(rows)))


def _collate_batches(batches: list[Batch], **_: Any) -> dict[str, Column]:
    """Return the columns of one batch of a dataset as a dict.

    A DataLoader without `batch_size=None` would give them a further dimension. Raises ValueError for several batches.
    """
    if len(batches) > 1:
        raise ValueError(
            f"DataLoader: got batch_size={len(batches)} for a dataset that yields batches, expected batch_size=None"
        )
    return dict(batches[0])


def _collate_receipts(receipts: list[KVBatchMeta], **_: Any) -> KVBatchMeta:
    return receipts[0].concat(*receipts[1:])


default_collate_fn_map.update({_Row: _collate_rows, Batch: _collate_batches, KVBatchMeta: _collate_receipts})

_logger = logging.getLogger(__name__)

ROWS_A_CLAIM = 64
"""Largest number of rows that are claimed at once when the dataset yields single rows."""


class StreamingDataset(IterableDataset):
    """Iterates over a partition's rows as they become ready. Each row goes to only one iteration.

    It yields a `Batch` for each claim or, with `batch_size=None`, each row as a dict from field to value. Give it to a
    `DataLoader` with `batch_size=None`, which makes each `Batch` a dict of the same columns. A `DataLoader` that makes
    batches of single rows makes them such dicts, too, with a `Jagged` column for each PER_TOKEN field (`collate_fn`).
    Each worker of the loader connects for itself, and the workers share the rows among them.

    The ranks of a distributed job that step together need equally many batches. With `rank` and `world`, each rank gets
    the same number of batches of the same size, because the dataset adds `task` with the sampler `rank_aware`.

    Rows are released as done when the next item is requested. When an iteration is abandoned (`break`, an error, the
    end of a worker), the rows that it yielded last are given back. So without workers, every row of a `Batch` is
    trained on at least once: rows that were not finished when the trainer died are claimed again, `lease_s` later.

    With `batch_size=None`, a row is done as soon as the next row is requested. A loader that joins rows to batches
    requests them one after another, so all rows of a batch but the last are done, and with `clear` removed, before the
    batch is trained on. If it then fails, they are lost. Let the dataset make the batches (`batch_size=N`) instead.

    A worker asks for rows ahead of the trainer. When the loader ends or the trainer dies, up to `prefetch_factor`
    batches of each worker are loaded but not trained on, and their rows may count as done. So with workers, each row is
    trained on at most once unless a worker dies.
    """

    @checked_call
    def __init__(
        self,
        handle: DataPlaneHandle | str,
        partition: str,
        task: str,
        fields: Sequence[str],
        *,
        batch_size: int | None,
        at_least: int | None = None,
        whole_groups: bool = False,
        arguments: Mapping[str, Any] | None = None,
        stop_after: int | None = None,
        timeout_s: float | None = None,
        on_timeout: Literal["raise", "stop"] = "raise",
        clear: bool = False,
        with_receipts: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """Nothing is claimed before the first item is requested. handle: a handle, or its text.

        batch_size, at_least, whole_groups, arguments, timeout_s: as `n` and the arguments of the same names of
        `DataPlaneClient.claim`; with `batch_size=None` only `arguments` and `timeout_s` can be given. stop_after:
        number of rows after which an iteration ends, over all workers and ranks, a multiple of batch_size times world;
        None sets no end.
        on_timeout: with `stop`, an iteration ends when too few rows become ready within `timeout_s`; with `raise`, it
        raises ClaimTimeout. clear: whether rows are removed from the partition when they are done. with_receipts:
        whether to yield pairs of a batch or row and its receipt, with which `DataPlaneClient.write` writes results.
        Receipts of a loader's worker have no lease, because it releases rows before the trainer has used them. rank,
        world: this process's rank and the number of ranks; both or neither. The partition must not have `task` with
        another sampler than `rank_aware`. Rows that do not make a whole batch for every rank stay in the partition.

        An iteration raises the errors of `connect`, `add_tasks`, `claim`, `get` and `release`. Raises InvalidArgument,
        a ValueError, for wrong arguments and for arguments that exclude each other.
        """
        wrong = _excluded(batch_size, at_least, whole_groups, arguments, stop_after, on_timeout, rank, world)
        if wrong:
            raise InvalidArgument(wrong, op="StreamingDataset")
        self._handle = handle
        self._partition = partition
        self._task = task
        self._fields = tuple(fields)
        self._batch_size = batch_size
        self._at_least = 1 if batch_size is None else batch_size if at_least is None else at_least
        self._whole_groups = whole_groups
        self._arguments = arguments if rank is None else {"rank": rank}
        self._world = world
        self._stop_after = stop_after
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._clear = clear
        self._with_receipts = with_receipts

    def __iter__(self) -> Iterator[Any]:
        left = self._rows_of_worker()
        with connect(self._handle, name=f"dataset of {self._partition}") as client:
            if self._world is not None:
                client.add_tasks(self._partition, [TaskConfig(self._task, "rank_aware", {"num_ranks": self._world})])
            while left is None or left > 0:
                try:
                    meta = self._claim(client, left)
                except ClaimTimeout:
                    if self._on_timeout == "raise":
                        raise
                    return
                yield from self._items(client, meta)
                left = None if left is None else left - len(meta)

    def __len__(self) -> int:
        """Return the number of batches or rows that this rank gets at most. Raises TypeError without `stop_after`, as
        `len` does for what has no length."""
        if self._stop_after is None:
            raise TypeError("the length of the dataset is not known: it was made without stop_after")
        return self._stop_after // (self._batch_size or 1) // (self._world or 1)

    def _rows_of_worker(self) -> int | None:
        """Return the number of rows after which the iteration of this worker ends; None for no end. The numbers of all
        workers and ranks add up to `stop_after`."""
        worker = get_worker_info()
        if self._stop_after is None:
            return None
        unit = self._batch_size or 1
        each, more = divmod(len(self), 1 if worker is None else worker.num_workers)
        return (each + (worker is not None and worker.id < more)) * unit

    @staticmethod
    def collate_fn(rows: list[Any]) -> Any:
        """Return rows that a dataset with `batch_size=None` yielded as one dict of columns.

        They are the columns that a batch of these rows has. Pairs of rows and receipts become a pair of it and one
        receipt. A DataLoader finds this function by itself.
        """
        return default_collate(rows)

    def _claim(self, client: DataPlaneClient, left: int | None) -> KVBatchMeta:
        most = self._batch_size or ROWS_A_CLAIM
        most, least = (most, self._at_least) if left is None else (min(most, left), min(self._at_least, left))
        return client.claim(
            self._partition,
            self._task,
            self._fields,
            most,
            at_least=least,
            whole_groups=self._whole_groups,
            arguments=self._arguments,
            timeout_s=self._timeout_s,
        )

    def _items(self, client: DataPlaneClient, meta: KVBatchMeta) -> Iterator[Any]:
        """Yield the batch or the rows of one claim, and release them. Rows that were yielded are done once the next
        item is requested. The other rows are given back when the iteration is abandoned."""
        num_done = 0
        shown = meta if get_worker_info() is None else replace(meta, lease_id=0, holds=())
        try:
            batch = client.get(meta, timeout_s=self._timeout_s)
            if self._batch_size is None:
                columns = unpack(batch)
                for number in range(len(meta)):
                    row = _Row({name: values[number] for name, values in columns.items()})
                    row.schema = batch.schema
                    yield (row, shown.select([number])) if self._with_receipts else row
                    num_done += 1
            else:
                yield (batch, shown) if self._with_receipts else batch
                num_done = len(meta)
        except BaseException:  # This is GeneratorExit when the iteration is abandoned.
            self._give_back(client, meta, num_done)
            raise
        self._finish(client, meta)

    def _finish(self, client: DataPlaneClient, meta: KVBatchMeta) -> None:
        client.release(meta, self._task, "done")
        if self._clear:
            client.clear(self._partition, meta.keys)

    def _give_back(self, client: DataPlaneClient, meta: KVBatchMeta, num_done: int) -> None:
        """Release the first `num_done` rows as done and the others for retry. A failure is only logged: the rows can be
        claimed again when their lease expires."""
        try:
            if num_done:
                self._finish(client, meta.select(np.arange(num_done)))
            client.release(meta.select(np.arange(num_done, len(meta))), self._task, "retry")
        except DataPlaneError as error:
            _logger.warning("rows of an abandoned iteration return only when their lease runs out: %s", error)


def _excluded(
    batch_size: int | None,
    at_least: int | None,
    whole_groups: bool,
    arguments: Mapping[str, Any] | None,
    stop_after: int | None,
    on_timeout: str,
    rank: int | None,
    world: int | None,
) -> str:
    """Return what is wrong with the arguments of a dataset together, or ""."""
    if batch_size is None and (at_least is not None or whole_groups):
        return "batch_size: got None with at_least or whole_groups, expected a number of rows"
    unit = (batch_size or 1) * (world or 1)
    if stop_after is not None and stop_after % unit:
        return f"stop_after: got {stop_after}, expected a multiple of batch_size={batch_size} times world={world or 1}"
    if on_timeout not in ("raise", "stop"):
        return f"on_timeout: got {on_timeout!r}, expected 'raise' or 'stop'"
    if (rank is None) != (world is None) or rank is not None and world is not None and not 0 <= rank < world:
        return f"rank: got {rank} with world={world}, expected both or neither, and a rank from 0 to below world"
    if rank is not None and (arguments is not None or at_least is not None):
        return "rank: got it with arguments or at_least, expected neither, so that the ranks get equal batches"
    return ""
