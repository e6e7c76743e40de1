"""A step's rows as one rank reads them from the store: each column of each microbatch once, whatever the passes ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...codecs.batch import Batch, Jagged
from ...codecs.jagged import slice_rows
from ...codecs.schema import Schema
from ...dataplane.client import DataPlaneClient
from ...dataplane.meta import KVBatchMeta
from .wire import RowFacts

GROWTH = 4
MOST_AT_ONCE = 64
"""Microbatches in one load."""


def load_of(index: int, count: int) -> range:
    """Of `count` microbatches, those that are read and sent together with microbatch `index`: 1, 4, 16, 64, 64, ...

    The first comes soon, the others while it computes. A plan spreads the rows of a block over many microbatches: a
    block that is asked for once costs a store less than one that each of them asks for, and a broadcast costs the same
    few wake-ups whatever its size.
    """
    assert 0 <= index < count, (index, count)
    start, size = 0, 1
    while index >= start + size:
        start, size = start + size, min(GROWTH * size, MOST_AT_ONCE)
    return range(start, min(start + size, count))


def cut(batch: Batch, sizes: Sequence[int]) -> Iterator[Batch]:
    """Consecutive rows of `batch`, as views."""
    begin = 0
    for size in sizes:
        yield slice_rows(batch, begin, begin + size)
        begin += size


@dataclass(frozen=True, slots=True)
class TrainShard:
    """One rank's share of a step's plan; shipped once, then every pass of the step works on it."""

    step: int
    meta: bytes | None
    """`KVBatchMeta.to_bytes()` of the replica's rows in the order of its microbatches; tags `advantage` float32 and,
    with `loss.aggregation=prompt`, `group_tokens` float32. None for a rank that neither reads nor writes rows."""
    sizes: np.ndarray
    """int64 `[M]`: rows of each microbatch."""
    digest: str
    """The whole plan's hash, the same on every rank."""
    traced: bool
    """Whether reports of the step carry spans."""

    def ranges(self) -> list[np.ndarray]:
        """Rows of the receipt, by microbatch."""
        ends = np.cumsum(self.sizes)
        return [np.arange(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]


class ColumnCache:
    """Columns of a step's microbatches, as they come in."""

    def __init__(self) -> None:
        self._columns: dict[int, Batch] = {}

    def missing(self, index: int, fields: Sequence[str]) -> list[str]:
        """Those of `fields` that are not here yet."""
        have = self._columns.get(index)
        return [name for name in fields if have is None or name not in have]

    def add(self, index: int, new: Batch) -> None:
        """No column may come twice."""
        have = self._columns.get(index)
        self._columns[index] = new if have is None else have.merge(new)

    def batch(self, index: int, fields: Sequence[str], num_rows: int) -> Batch:
        """`fields` of microbatch `index`, all of them here; nothing is copied."""
        have = self._columns.get(index)
        return Batch(Schema(()), num_rows, {}) if have is None else have.subset(fields)


class StepRows:
    """Reads whole rows and keeps what it has read. For one thread at a time."""

    def __init__(self, client: DataPlaneClient, shard: TrainShard, meta: KVBatchMeta) -> None:
        self._client = client
        self._meta = meta
        self._ranges = shard.ranges()
        self._cache = ColumnCache()

    def facts(self, numbers: range) -> RowFacts:
        """What these microbatches say of their rows."""
        rows, tags = np.concatenate([self._ranges[number] for number in numbers]), self._meta.tags
        tokens = tags["group_tokens"][rows].astype(np.int64) if "group_tokens" in tags else None
        advantages = tags["advantage"][rows].astype(np.float32)
        return RowFacts(self._meta.lengths[rows], advantages, self._meta.groups[rows], tokens)

    def missing(self, index: int, fields: Sequence[str]) -> list[str]:
        """Those of `fields` that this step has neither read nor written yet."""
        return self._cache.missing(index, fields)

    def columns(self, index: int, fields: Sequence[str]) -> Batch:
        """Columns of one microbatch; reads those of its whole load. Raises what `get` and `lookup` raise."""
        missing = self.missing(index, fields)
        if missing:
            self._look_up([name for name in missing if name not in self._meta.fields])
            load = load_of(index, len(self._ranges))
            numbers = [number for number in load if self.missing(number, missing) == missing]
            rows = np.concatenate([self._ranges[number] for number in numbers])
            batch = self._client.get(self._meta.select(rows), missing)
            for number, part in zip(numbers, cut(batch, [len(self._ranges[n]) for n in numbers]), strict=True):
                self._cache.add(number, part)
        return self._cache.batch(index, fields, len(self._ranges[index]))

    def keep(self, index: int, field: str, column: Jagged) -> None:
        """A column that this process has written: it need not be read."""
        self._cache.add(index, Batch(self._meta.schema.subset([field]), len(self._ranges[index]), {field: column}))

    def _look_up(self, fields: list[str]) -> None:
        """Extend the receipt by columns that another rank has written since it was made."""
        if fields:
            found = self._client.lookup(self._meta.partition, self._meta.keys, fields)
            self._meta = self._meta.merge_fields(found)
