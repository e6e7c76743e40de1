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


class _Rows:
    """Wanted rows of one source. Where their runs lie is computed once for all of its fields."""

    def __init__(self, source: RowSource, lengths: np.ndarray, used: np.ndarray) -> None:
        """lengths: number of tokens of each row, int64 `[N]`. used: positions in the receipt of the blocks that the
        request names, ascending."""
        self.source = source
        self.lengths = lengths
        self.runs = find_runs(source.block, source.row)
        blocks = distinct(source.block)
        self.blocks: list[int] = blocks.tolist()
        """Positions in the receipt of the blocks that hold these rows, ascending."""
        self.places = _Places(np.searchsorted(blocks, self.runs.source), np.searchsorted(used, self.runs.source))
        self._extents: dict[bool, tuple[np.ndarray, np.ndarray]] = {}

    def extents(self, *, per_token: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return (the first item of each run within its block, the number of its items), int64 `[R]`. Items are tokens
        or rows."""
        found = self._extents.get(per_token)
        if found is None:
            if per_token:
                found = self.source.start[self.runs.first], self.runs.totals(self.lengths)
            else:
                counts = np.diff(self.runs.first, append=self.runs.num_rows)
                found = self.source.row[self.runs.first].astype(np.int64), counts
            self._extents[per_token] = found
        return found


@dataclass(frozen=True, slots=True)
class _Places:
    """Blocks in which ranges lie."""

    part: np.ndarray
    """Index of each range's block among those that have a part of the field, `[R]`."""
    block: np.ndarray
    """Index of each range's block among those that the request names, `[R]`."""


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
        self._offsets = {number: self._layouts[number].offsets for number in self._used.tolist()}
        self._lengths = np.ascontiguousarray(meta.lengths, dtype=np.int64)

    def read(self, timeout_s: float) -> Batch:
        """Read the rows. Raises the errors of `ReadsRanges.read_ranges`, IntegrityError, and ValueError for bytes
        that do not fit."""
        deadline = time.monotonic() + timeout_s
        first, second = _Reads(), _Reads()
        finish = [
            (wanted.name, self._plan(rows, wanted, first, second))
            for source in self._sources
            for rows in [_Rows(source, self._lengths, self._used)]
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
        return Batch(self._schema, len(self._lengths), columns)

    def _plan(self, rows: _Rows, wanted: Field, first: _Reads, second: _Reads) -> Callable[[], Callable[[], Column]]:
        """Plan the read of one field. Returns what is to be done after the first request, which returns what is to be
        done after the second."""
        if wanted.kind in (Kind.PER_TOKEN, Kind.PER_SAMPLE):
            return self._plan_dense(rows, wanted, first)
        values, index = self._parts(rows, wanted, 0), self._parts(rows, wanted, 1)
        first.whole.update(dict.fromkeys(index.items()))
        if self._check or self._wants_most(rows):
            first.whole.update(dict.fromkeys(values.items()))
            gather = self._gather_indexed(rows, wanted, values, index, first)
            return lambda: gather
        return lambda: self._plan_indexed(rows, wanted, values, self._views(first, index), second)

    def _plan_dense(self, rows: _Rows, wanted: Field, first: _Reads) -> Callable[[], Callable[[], Column]]:
        assert wanted.dtype is not None
        parts = self._parts(rows, wanted, 0)
        source, runs, lengths = rows.source, rows.runs, rows.lengths
        per_token = wanted.kind is Kind.PER_TOKEN
        shared = {number: self._layouts[number].shared_of(wanted) for number in parts}
        if any(shared.values()):
            return self._plan_shared(source, wanted, parts, shared, first)
        begin, counts = rows.extents(per_token=per_token)
        nbytes = counts * wanted.item_bytes
        if self._reads_whole(runs, nbytes, parts):
            first.whole.update(dict.fromkeys(parts.items()))

            def gather() -> Column:
                values = self._views(first, parts)
                if per_token:
                    return gather_jagged(wanted, lengths, source.start, runs, values)
                return gather_dense(wanted, source.block, source.row, runs, values)

            return lambda: gather
        out = fresh(wanted.dtype, (int(counts.sum()), *wanted.trailing))
        into = as_bytes(out)
        first.ranges.append(self._ranges(into, rows.places, parts, begin * wanted.item_bytes, nbytes))
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
        lengths = self._lengths
        pieces = stored_pieces(source.block, source.row, source.start, lengths, shared)
        block, begin, count = pieces
        sizes = sum(self._layouts[number].part_bytes[part] for number, part in parts.items())
        if self._check or sizes <= count.sum() * wanted.item_bytes + SMALL_BYTES * len(count):
            first.whole.update(dict.fromkeys(parts.items()))
            return lambda: lambda: gather_shared(wanted, lengths, pieces, self._views(first, parts))
        out = fresh(wanted.dtype, (int(lengths.sum()), *wanted.trailing))
        size = wanted.item_bytes
        places = _Places(np.searchsorted(np.array(list(parts)), block), np.searchsorted(self._used, block))
        first.ranges.append(self._ranges(as_bytes(out), places, parts, begin * size, count * size))
        return lambda: lambda: Jagged(out, lengths)

    def _gather_indexed(
        self,
        rows: _Rows,
        wanted: Field,
        values: dict[int, int],
        index: dict[int, int],
        reads: _Reads,
    ) -> Callable[[], Column]:
        """Return the function that takes the rows of a RAGGED or OBJECT field out of parts that were read whole."""

        def gather() -> Column:
            source, found, places = rows.source, self._views(reads, values), self._views(reads, index)
            if wanted.kind is Kind.RAGGED:
                return gather_ragged(wanted, source.block, source.row, rows.runs, found, places)
            return gather_objects(source.block, source.row, found, places)

        return gather

    def _plan_indexed(
        self,
        rows: _Rows,
        wanted: Field,
        values: dict[int, int],
        index: dict[int, np.ndarray],
        second: _Reads,
    ) -> Callable[[], Column]:
        """Plan the second request for a RAGGED or OBJECT field, whose index has been read. Returns the function that
        makes the column of what the request has read."""
        source, runs = rows.source, rows.runs
        if wanted.kind is Kind.OBJECT:
            start, nbytes = locate_objects(source.block, source.row, index)
            memory = as_bytes(fresh(torch.uint8, (int(nbytes.sum()),)))
            second.ranges.append(self._ranges(memory, rows.places, values, start[runs.first], runs.totals(nbytes)))
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
        second.ranges.append(self._ranges(as_bytes(out), rows.places, values, begin, nbytes))
        return lambda: Ragged(out, shapes)

    # -------------------------------------------------------------- inside

    def _parts(self, rows: _Rows, wanted: Field, which: int) -> dict[int, int]:
        """Return the number of a field's values part (which=0) or index part (which=1) in each block."""
        return {number: self._layouts[number].field_parts(wanted)[which] for number in rows.blocks}

    def _views(self, reads: _Reads, parts: dict[int, int]) -> dict[int, np.ndarray]:
        return {number: reads.views[number][part] for number, part in parts.items()}

    def _wants_most(self, rows: _Rows) -> bool:
        """Return whether at least half of the rows of the blocks are wanted."""
        return 2 * rows.runs.num_rows >= sum(self._layouts[number].num_rows for number in rows.blocks)

    def _reads_whole(self, runs: Runs, nbytes: np.ndarray, parts: dict[int, int]) -> bool:
        """Return whether a field's values parts are read whole and its rows taken out of them."""
        sizes = {number: self._layouts[number].part_bytes[part] for number, part in parts.items()}
        if self._check:  # unless each block is wanted as it is, once
            wanted = list(zip(runs.source.tolist(), nbytes.tolist(), strict=True))
            return len(wanted) != len(sizes) or any(sizes[number] != size for number, size in wanted)
        many = len(nbytes) > len(parts)
        return many and max(nbytes.sum(), sum(sizes.values()) // 4) < SMALL_BYTES * len(nbytes)

    def _ranges(
        self, into: np.ndarray, places: _Places, parts: dict[int, int], begin: np.ndarray, nbytes: np.ndarray
    ) -> ByteRanges:
        """Return the request to read ranges of one part of each block. begin: first byte of each range within its part.
        Raises ValueError for a range that reaches beyond its part."""
        offsets = np.array([self._offsets[number][part] for number, part in parts.items()], dtype=np.int64)
        sizes = np.array([self._layouts[number].part_bytes[part] for number, part in parts.items()], dtype=np.int64)
        behind = sizes[places.part] - begin  # bytes from a range's first byte to the end of its part
        wrong = (begin < 0) | (nbytes < 0) | (nbytes > behind)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            end, number = begin[i] + nbytes[i], self._used[places.block[i]]
            raise ValueError(f"rows reach to byte {end} of {begin[i] + behind[i]} in block {number}")
        return ByteRanges(into, places.block, offsets[places.part] + begin, nbytes)

    def _carry_out(self, reads: _Reads, deadline: float) -> None:
        """Read what was planned for one request."""
        sizes = [self._layouts[number].part_bytes[part] for number, part in reads.whole]
        starts = np.cumsum([0, *(round_up(size, ALIGN) for size in sizes)]).tolist()
        memory = as_bytes(fresh(torch.uint8, (starts[-1],)))
        ranges = list(reads.ranges)
        for (number, part), size, start in zip(reads.whole, sizes, starts, strict=False):
            view = memory[start : start + size]
            reads.views.setdefault(number, {})[part] = view
            offset = self._offsets[number][part]
            block = np.searchsorted(self._used, [number])
            ranges.append(ByteRanges(view, block, np.array([offset]), np.array([size])))
        blocks = [self._meta.blocks[number] for number in self._used.tolist()]
        self._store.read_ranges(blocks, ranges, max(0.0, deadline - time.monotonic()))
