"""Reads the rows of a receipt from a store that can read any ranges of bytes, so that only the rows' bytes move.

Rows of PER_TOKEN and PER_SAMPLE fields are received straight into the columns of the batch. RAGGED and OBJECT fields
take two requests: the first reads the index of their rows, the second the rows. A part of a block is read whole where
that is cheaper than many small ranges, and where its checksums are to be verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...codecs import objects
from ...codecs.batch import Batch, Column, Jagged, Ragged
from ...codecs.blocks import RowSource
from ...codecs.gather import (
    Runs,
    as_bytes,
    find_runs,
    gather_dense,
    gather_jagged,
    gather_objects,
    gather_ragged,
    locate_objects,
    locate_ragged,
)
from ...codecs.integers import ALIGN, distinct, round_up
from ...codecs.memory import fresh
from ...codecs.schema import Field, Kind, Schema
from ...codecs.shared_rows import SharedRows, gather_shared, stored_pieces
from ..block_store import ByteRanges, ReadsRanges
from ..meta import KVBatchMeta
from .verification import verify_rows

SMALL_BYTES = 512
"""Mean number of bytes of a range below which whole parts are read instead, because a range costs about as much as
this many bytes, here and at the unit."""


@dataclass(slots=True)
class _Reads:
    """Ranges that one request reads, and parts of blocks that it reads whole."""

    ranges: list[ByteRanges] = field(default_factory=list)
    whole: dict[tuple[int, int], None] = field(default_factory=dict)
    """Parts that are read whole, as (block number, part number)."""
    views: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """For each block number, a dict from part number to the part's bytes, once they have been read."""


class RangedReader:
    """One read of the rows of a receipt."""

    def __init__(
        self, store: ReadsRanges, meta: KVBatchMeta, schema: Schema, sources: Sequence[RowSource], *, check: bool
    ) -> None:
        """schema, sources: the wanted fields, and the locations of their rows. check: whether to verify checksums."""
        self._store = store
        self._meta = meta
        self._schema = schema
        self._sources = sources
        self._check = check
        self._layouts = [ref.layout for ref in meta.blocks]
        blocks = [source.block for source in sources]
        self._used = distinct(np.concatenate(blocks)) if blocks else np.empty(0, np.int64)
        """Positions in the receipt of the blocks that hold wanted rows. The others may have been freed."""

    def read(self, timeout_s: float) -> Batch:
        """Read the rows. Raises the errors of `ReadsRanges.read_ranges`, IntegrityError, and ValueError for bytes
        that do not fit."""
        deadline = time.monotonic() + timeout_s
        first, second = _Reads(), _Reads()
        finish = [
            (wanted.name, self._plan(source, runs, wanted, first, second))
            for source in self._sources
            for runs in [find_runs(source.block, source.row)]
            for wanted in [self._schema[name] for name in source.fields if name in self._schema]
        ]
        if self._check:
            for source in self._sources:
                first.whole.update(dict.fromkeys((number, 0) for number in distinct(source.block).tolist()))
        self._carry_out(first, deadline)
        if self._check:
            verify_rows(self._meta, self._sources, first.views)
        later = [(name, step()) for name, step in finish]  # this plans the second request
        if second.ranges:
            self._carry_out(second, deadline)
        columns: dict[str, Column] = {name: column() for name, column in later}
        lengths = np.ascontiguousarray(self._meta.lengths, dtype=np.int64)
        return Batch(self._schema, len(lengths), columns)

    def _plan(
        self, source: RowSource, runs: Runs, wanted: Field, first: _Reads, second: _Reads
    ) -> Callable[[], Callable[[], Column]]:
        """Plan the read of one field. Returns what is to be done after the first request, which returns what is to be
        done after the second."""
        if wanted.kind in (Kind.PER_TOKEN, Kind.PER_SAMPLE):
            return self._plan_dense(source, runs, wanted, first)
        values, index = self._parts(source, wanted, 0), self._parts(source, wanted, 1)
        first.whole.update(dict.fromkeys(index.items()))
        if self._check or self._wants_most(source):
            first.whole.update(dict.fromkeys(values.items()))
            gather = self._gather_indexed(source, runs, wanted, values, index, first)
            return lambda: gather
        return lambda: self._plan_indexed(source, runs, wanted, values, self._views(first, index), second)

    def _plan_dense(
        self, source: RowSource, runs: Runs, wanted: Field, first: _Reads
    ) -> Callable[[], Callable[[], Column]]:
        assert wanted.dtype is not None
        parts = self._parts(source, wanted, 0)
        per_token = wanted.kind is Kind.PER_TOKEN
        shared = {number: self._layouts[number].shared_of(wanted) for number in parts}
        if any(shared.values()):
            return self._plan_shared(source, wanted, parts, shared, first)
        lengths = np.ascontiguousarray(self._meta.lengths, dtype=np.int64)
        items = lengths if per_token else np.ones(len(source.row), np.int64)
        counts = runs.totals(items)
        begin = (source.start if per_token else source.row.astype(np.int64))[runs.first] * wanted.item_bytes
        nbytes = counts * wanted.item_bytes
        if self._reads_whole(source, runs, nbytes, parts):
            first.whole.update(dict.fromkeys(parts.items()))

            def gather() -> Column:
                values = self._views(first, parts)
                if per_token:
                    return gather_jagged(wanted, lengths, source.start, runs, values)
                return gather_dense(wanted, source.block, source.row, runs, values)

            return lambda: gather
        out = fresh(wanted.dtype, (int(counts.sum()), *wanted.trailing))
        into = as_bytes(out)
        first.ranges.append(self._ranges(into, runs.source, parts, begin, nbytes))
        if self._check:  # every run is a whole part of a block
            stops = np.cumsum(nbytes)
            for number, start, stop in zip(
                runs.source.tolist(), (stops - nbytes).tolist(), stops.tolist(), strict=True
            ):
                first.views.setdefault(number, {})[parts[number]] = into[start:stop]
        return lambda: lambda: Jagged(out, lengths) if per_token else out

    def _plan_shared(
        self,
        source: RowSource,
        wanted: Field,
        parts: dict[int, int],
        shared: dict[int, SharedRows | None],
        first: _Reads,
    ) -> Callable[[], Callable[[], Column]]:
        """Plan the read of a PER_TOKEN field whose blocks store common tokens of rows once. Parts are read whole unless
        that takes more bytes than the rows' own pieces."""
        assert wanted.dtype is not None
        lengths = np.ascontiguousarray(self._meta.lengths, dtype=np.int64)
        pieces = stored_pieces(source.block, source.row, source.start, lengths, shared)
        block, begin, count = pieces
        sizes = sum(self._layouts[number].part_bytes[part] for number, part in parts.items())
        if self._check or sizes <= count.sum() * wanted.item_bytes + SMALL_BYTES * len(count):
            first.whole.update(dict.fromkeys(parts.items()))
            return lambda: lambda: gather_shared(wanted, lengths, pieces, self._views(first, parts))
        out = fresh(wanted.dtype, (int(lengths.sum()), *wanted.trailing))
        size = wanted.item_bytes
        first.ranges.append(self._ranges(as_bytes(out), block, parts, begin * size, count * size))
        return lambda: lambda: Jagged(out, lengths)

    def _gather_indexed(
        self,
        source: RowSource,
        runs: Runs,
        wanted: Field,
        values: dict[int, int],
        index: dict[int, int],
        reads: _Reads,
    ) -> Callable[[], Column]:
        """Return the function that takes the rows of a RAGGED or OBJECT field out of parts that were read whole."""

        def gather() -> Column:
            found, places = self._views(reads, values), self._views(reads, index)
            if wanted.kind is Kind.RAGGED:
                return gather_ragged(wanted, source.block, source.row, runs, found, places)
            return gather_objects(source.block, source.row, found, places)

        return gather

    def _plan_indexed(
        self,
        source: RowSource,
        runs: Runs,
        wanted: Field,
        values: dict[int, int],
        index: dict[int, np.ndarray],
        second: _Reads,
    ) -> Callable[[], Column]:
        """Plan the second request for a RAGGED or OBJECT field, whose index has been read. Returns the function that
        makes the column of what the request has read."""
        if wanted.kind is Kind.OBJECT:
            start, nbytes = locate_objects(source.block, source.row, index)
            memory = as_bytes(fresh(torch.uint8, (int(nbytes.sum()),)))
            second.ranges.append(self._ranges(memory, runs.source, values, start[runs.first], runs.totals(nbytes)))
            ends = np.cumsum(nbytes)
            pairs = list(zip((ends - nbytes).tolist(), ends.tolist(), strict=True))
            view = memory.data
            return lambda: [objects.decode(view[begin:end]) for begin, end in pairs]
        assert wanted.dtype is not None
        sizes = {number: self._layouts[number].part_bytes[part] for number, part in values.items()}
        shapes, start, counts = locate_ragged(wanted, source.block, source.row, sizes, index)
        elements = runs.totals(counts)
        out = fresh(wanted.dtype, (int(elements.sum()),))
        begin, nbytes = start[runs.first] * wanted.item_bytes, elements * wanted.item_bytes
        second.ranges.append(self._ranges(as_bytes(out), runs.source, values, begin, nbytes))
        return lambda: Ragged(out, shapes)

    # -------------------------------------------------------------- inside

    def _parts(self, source: RowSource, wanted: Field, which: int) -> dict[int, int]:
        """Return the number of a field's values part (which=0) or index part (which=1) in each block."""
        return {number: self._layouts[number].field_parts(wanted)[which] for number in distinct(source.block).tolist()}

    def _views(self, reads: _Reads, parts: dict[int, int]) -> dict[int, np.ndarray]:
        return {number: reads.views[number][part] for number, part in parts.items()}

    def _wants_most(self, source: RowSource) -> bool:
        """Return whether at least half of the rows of the blocks are wanted."""
        rows = sum(self._layouts[number].num_rows for number in distinct(source.block).tolist())
        return 2 * len(source.row) >= rows

    def _reads_whole(self, source: RowSource, runs: Runs, nbytes: np.ndarray, parts: dict[int, int]) -> bool:
        """Return whether a field's values parts are read whole and its rows taken out of them."""
        sizes = {number: self._layouts[number].part_bytes[part] for number, part in parts.items()}
        if self._check:  # unless each block is wanted as it is, once
            wanted = list(zip(runs.source.tolist(), nbytes.tolist(), strict=True))
            return len(wanted) != len(sizes) or any(sizes[number] != size for number, size in wanted)
        many = len(nbytes) > len(parts)
        return many and max(nbytes.sum(), sum(sizes.values()) // 4) < SMALL_BYTES * len(nbytes)

    def _ranges(
        self, into: np.ndarray, block: np.ndarray, parts: dict[int, int], begin: np.ndarray, nbytes: np.ndarray
    ) -> ByteRanges:
        """Return the request to read ranges of one part of each block. begin: first byte of each range within its part.
        Raises ValueError for a range that reaches beyond its part."""
        numbers = np.array(list(parts), dtype=np.int64)
        offsets = np.array([self._layouts[number].offsets[part] for number, part in parts.items()], dtype=np.int64)
        sizes = np.array([self._layouts[number].part_bytes[part] for number, part in parts.items()], dtype=np.int64)
        at = np.searchsorted(numbers, block)
        wrong = (begin < 0) | (nbytes < 0) | (begin > sizes[at]) | (nbytes > sizes[at] - begin)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise ValueError(f"rows reach to byte {begin[i] + nbytes[i]} of {sizes[at[i]]} in block {block[i]}")
        return ByteRanges(into, np.searchsorted(self._used, block), offsets[at] + begin, nbytes)

    def _carry_out(self, reads: _Reads, deadline: float) -> None:
        """Read what was planned for one request."""
        sizes = [self._layouts[number].part_bytes[part] for number, part in reads.whole]
        starts = np.cumsum([0, *(round_up(size, ALIGN) for size in sizes)]).tolist()
        memory = as_bytes(fresh(torch.uint8, (starts[-1],)))
        ranges = list(reads.ranges)
        for (number, part), size, start in zip(reads.whole, sizes, starts, strict=False):
            view = memory[start : start + size]
            reads.views.setdefault(number, {})[part] = view
            offset = self._layouts[number].offsets[part]
            block = np.searchsorted(self._used, [number])
            ranges.append(ByteRanges(view, block, np.array([offset]), np.array([size])))
        blocks = [self._meta.blocks[number] for number in self._used.tolist()]
        self._store.read_ranges(blocks, ranges, max(0.0, deadline - time.monotonic()))
