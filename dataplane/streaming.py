"""Streams the rows of a partition into torch's DataLoader, or into any loop, by claiming them for a task."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from ..codecs.jagged import unpack
from .client.client import DataPlaneClient
from .errors import ClaimTimeout, DataPlaneError
from .factory import connect
from .handle import DataPlaneHandle
from .meta import KVBatchMeta

_logger = logging.getLogger(__name__)

ROWS_A_CLAIM = 64
"""Largest number of rows that are claimed at once when the dataset yields single rows."""


class StreamingDataset(IterableDataset):
    """Iterates over a partition's rows as they become ready. Each row goes to only one iteration.

    It yields a `Batch` for each claim or, with `batch_size=None`, each row as a dict from field to value. Give it to a
    `DataLoader` with `batch_size=None`, whose default `collate_fn` makes each `Batch` a dict of the same columns. Each
    worker of the loader connects for itself, and the workers share the rows among them.

    Rows are released as done when the next item is requested. When an iteration is abandoned (`break`, an error, the
    end of a worker), the rows that it yielded last are given back. So without workers every row is trained on at least
    once: rows that were not finished when the trainer died are claimed again, `lease_s` later. A worker asks for rows
    ahead of the trainer. When the loader ends or the trainer dies, up to `prefetch_factor` batches of each worker are
    loaded but not trained on, and their rows may count as done. So with workers, each row is trained on at most once
    unless a worker dies.
    """

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
    ) -> None:
        """Nothing is claimed before the first item is requested. handle: a handle, or its text.

        batch_size, at_least, whole_groups, arguments, timeout_s: as `n` and the arguments of the same names of
        `DataPlaneClient.claim`; with `batch_size=None` only `arguments` and `timeout_s` can be given. stop_after:
        number of rows after which an iteration ends, over all workers, a multiple of batch_size; None sets no end.
        on_timeout: with `stop`, an iteration ends when too few rows become ready within `timeout_s`; with `raise`, it
        raises ClaimTimeout. clear: whether rows are removed from the partition when they are done. with_receipts:
        whether to yield pairs of a batch or row and its receipt. Results can be written under the receipt's keys.

        An iteration raises the errors of `connect`, `claim`, `get` and `release`. Raises ValueError for arguments that
        exclude each other.
        """
        if batch_size is None and (at_least is not None or whole_groups):
            raise ValueError("batch_size: got None with at_least or whole_groups, expected a number of rows")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1, or None for single rows")
        if stop_after is not None and (stop_after < 1 or stop_after % (batch_size or 1)):
            raise ValueError(f"stop_after: got {stop_after}, expected a multiple of batch_size={batch_size}")
        if on_timeout not in ("raise", "stop"):
            raise ValueError(f"on_timeout: got {on_timeout!r}, expected 'raise' or 'stop'")
        self._handle = handle
        self._partition = partition
        self._task = task
        self._fields = tuple(fields)
        self._batch_size = batch_size
        self._at_least = 1 if batch_size is None else batch_size if at_least is None else at_least
        self._whole_groups = whole_groups
        self._arguments = arguments
        self._stop_after = stop_after
        self._timeout_s = timeout_s
        self._on_timeout = on_timeout
        self._clear = clear
        self._with_receipts = with_receipts

    def __iter__(self) -> Iterator[Any]:
        left = self._rows_of_worker()
        with connect(self._handle, name=f"dataset of {self._partition}") as client:
            while left is None or left > 0:
                try:
                    meta = self._claim(client, left)
                except ClaimTimeout:
                    if self._on_timeout == "raise":
                        raise
                    return
                yield from self._items(client, meta)
                left = None if left is None else left - len(meta)

    def _rows_of_worker(self) -> int | None:
        """Return the number of rows after which the iteration of this worker ends; None for no end. The numbers of all
        workers add up to `stop_after`."""
        worker = get_worker_info()
        if self._stop_after is None or worker is None:
            return self._stop_after
        unit = self._batch_size or 1
        each, more = divmod(self._stop_after // unit, worker.num_workers)
        return (each + (worker.id < more)) * unit

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
        try:
            batch = client.get(meta, timeout_s=self._timeout_s)
            if self._batch_size is None:
                columns = unpack(batch)
                for number in range(len(meta)):
                    row = {name: values[number] for name, values in columns.items()}
                    yield (row, meta.select([number])) if self._with_receipts else row
                    num_done += 1
            else:
                yield (batch, meta) if self._with_receipts else batch
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
