"""Reads the rows of a receipt from a store that can read any ranges of bytes, so that only the rows' bytes move.

Rows of PER_TOKEN and PER_SAMPLE fields are received straight into the columns of the batch, as are RAGGED fields of
which all rows of each block are wanted, such as blobs. Other rows of RAGGED and OBJECT fields take two requests: the
first reads their index, the second the rows. A part of a block is read whole where that is cheaper than many small
ranges, and where its checksums are to be verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...codecs import objects
from ...codecs.batch import Batch, Column, Jagged, Ragged
from ...codecs.gather import FieldRows, Pieces, ReadPlan, locate_objects, locate_ragged, new_values, verify
from ...codecs.integers import ALIGN, round_up
from ...codecs.memory import as_bytes, fresh
from ...codecs.schema import Kind
from ..block_store import ByteRanges, ReadsRanges
from ..meta import BlockRef

SMALL_BYTES = 512
"""Mean number of bytes per range below which whole parts are read instead. A range costs the reader and the storage
unit about as much time as this number of bytes."""

DIRECT_BYTES = 1 << 20
"""Number of bytes of a RAGGED or OBJECT field in each block from which its rows are read in a second request even if
most are wanted. They are then received where they stay, and a copy of so many bytes takes longer than a request."""


@dataclass(slots=True)
class _Reads:
    """Ranges that one request reads, and parts of blocks that it reads whole."""

    ranges: list[ByteRanges] = field(default_factory=list)
    whole: dict[tuple[int, int], None] = field(default_factory=dict)
    """Parts that are read whole, as (block number, part number)."""
    views: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """For each block number, a dict from part number to the part's bytes, once they have been read."""

    def take(self, wanted: FieldRows, which: int) -> None:
        """Read the field's values parts (which=0) or index parts (which=1) whole."""
        self.whole.update(dict.fromkeys((number, parts[which]) for number, parts in wanted.parts.items()))


class RangedReader:
    """One read of the rows of a receipt."""

    def __init__(self, store: ReadsRanges, blocks: Sequence[BlockRef], plan: ReadPlan, *, seed: int | None) -> None:
        """blocks: blocks of the receipt. plan: the wanted fields, and the locations of their rows. seed: number with
        which the blocks were written, to verify checksums; None verifies nothing."""
        self._store = store
        self._blocks = blocks
        self._plan = plan
        self._seed = seed
        self._used = sorted({number for rows in plan.sources for number in rows.blocks})
        """Positions in the receipt of the blocks that hold wanted rows. The other blocks may have been freed."""
        self._place = np.zeros(len(blocks), dtype=np.int64)
        """Index of each block of the receipt in the list of blocks that hold wanted rows."""
        self._place[self._used] = np.arange(len(self._used))
        self._offsets = {number: plan.layouts[number].offsets for number in self._used}

    def read(self, timeout_s: float) -> Batch:
        """Read the rows. Raises the errors of `ReadsRanges.read_ranges`, ChecksumMismatch, and ValueError for bytes
        that do not fit."""
        deadline = time.monotonic() + timeout_s
        first, second = _Reads(), _Reads()
        finish = [
            (wanted.field.name, self._begin(wanted, first, second))
            for rows in self._plan.sources
            for wanted in rows.fields
        ]
        if self._seed is not None:
            first.whole.update(dict.fromkeys((number, 0) for number in self._used))
        self._carry_out(first, deadline)
        if self._seed is not None:
            self._verify(first, self._seed)
        later = [(name, step()) for name, step in finish]  # The steps plan the second request.
        if second.ranges:
            self._carry_out(second, deadline)
        columns: dict[str, Column] = {name: column() for name, column in later}
        return Batch(self._plan.schema, len(self._plan.lengths), columns)

    def _begin(self, wanted: FieldRows, first: _Reads, second: _Reads) -> Callable[[], Callable[[], Column]]:
        """Plan the first request for one field. Returns a function to call after the first request. It returns the
        function to call after the second request, which makes the column."""
        if wanted.field.kind in (Kind.RAGGED, Kind.OBJECT):
            first.take(wanted, 1)
            if wanted.field.kind is Kind.RAGGED and self._wants_blocks(wanted):
                return self._begin_blocks(wanted, first)
            is_large = min(wanted.part_bytes.values(), default=0) >= DIRECT_BYTES
            if self._seed is None and (is_large or not self._wants_most(wanted)):
                return lambda: self._begin_again(wanted, first, second)
            first.take(wanted, 0)
            return lambda: lambda: wanted.column(first.views)
        pieces = wanted.pieces()
        if self._reads_whole(wanted, pieces):
            first.take(wanted, 0)
            return lambda: lambda: wanted.column(first.views)
        out, lengths = self._straight(wanted, pieces, first), wanted.rows.lengths
        return lambda: lambda: Jagged(out, lengths) if wanted.field.kind is Kind.PER_TOKEN else out

    def _straight(self, wanted: FieldRows, pieces: Pieces, first: _Reads) -> torch.Tensor:
        """Plan to receive pieces straight into new memory in the first request, and return this memory."""
        out = new_values(wanted.field, pieces.num_items)
        into = as_bytes(out)
        first.ranges.append(self._ranges(into, wanted, pieces))
        if self._seed is not None:  # Each piece is a whole part of a block.
            nbytes = pieces.count * wanted.field.item_bytes
            stops = np.cumsum(nbytes)
            starts = (stops - nbytes).tolist()
            for number, start, stop in zip(pieces.block.tolist(), starts, stops.tolist(), strict=True):
                first.views.setdefault(number, {})[wanted.parts[number][0]] = into[start:stop]
        return out

    def _begin_blocks(self, wanted: FieldRows, first: _Reads) -> Callable[[], Callable[[], Column]]:
        """Plan to receive a RAGGED field of whole blocks in the first request, since their layouts give its bytes. Only
        the shapes of the rows are to be taken from the index."""
        source, runs = wanted.rows.source, wanted.rows.runs
        count = np.array([wanted.part_bytes[number] for number in runs.source.tolist()]) // wanted.field.item_bytes
        out = self._straight(wanted, Pieces(runs.source, np.zeros_like(count), count), first)

        def column() -> Column:
            index = wanted.part(first.views, 1)
            return Ragged(out, locate_ragged(wanted.field, source.block, source.row, runs, wanted.part_bytes, index)[0])

        return lambda: column

    def _begin_again(self, wanted: FieldRows, first: _Reads, second: _Reads) -> Callable[[], Column]:
        """Plan the second request for a RAGGED or OBJECT field, after its index has been read. Returns the function
        that makes the column from the bytes that the request has read."""
        source, runs, index = wanted.rows.source, wanted.rows.runs, wanted.part(first.views, 1)
        if wanted.field.kind is Kind.OBJECT:
            start, nbytes = locate_objects(source.block, source.row, index)
            memory = as_bytes(fresh(torch.uint8, (int(nbytes.sum()),)))
            second.ranges.append(self._ranges(memory, wanted, runs.pieces(start, nbytes)))
            ends = np.cumsum(nbytes)
            pairs = list(zip((ends - nbytes).tolist(), ends.tolist(), strict=True))
            view = memory.data
            return lambda: [objects.decode(view[begin:end]) for begin, end in pairs]
        shapes, pieces = locate_ragged(wanted.field, source.block, source.row, runs, wanted.part_bytes, index)
        out = new_values(wanted.field, pieces.num_items)
        second.ranges.append(self._ranges(as_bytes(out), wanted, pieces))
        return lambda: Ragged(out, shapes)

    # ---------------- These methods are private.

    def _verify(self, reads: _Reads, seed: int) -> None:
        for rows in self._plan.sources:
            schema = self._plan.schema.subset([wanted.field.name for wanted in rows.fields])
            for number in rows.blocks:
                verify(schema, rows.source, number, self._plan.layouts[number], reads.views[number], seed=seed)

    def _wants_blocks(self, wanted: FieldRows) -> bool:
        """Return whether all rows of each block are wanted, once and one after another."""
        runs, layouts = wanted.rows.runs, self._plan.layouts
        sizes = np.array([layouts[number].num_rows for number in runs.source.tolist()])
        counts = np.diff(runs.first, append=runs.num_rows)
        return 0 < len(sizes) == len(wanted.rows.blocks) and np.array_equal(counts, sizes)

    def _wants_most(self, wanted: FieldRows) -> bool:
        """Return whether at least half of the rows of the blocks are wanted."""
        rows = wanted.rows
        return 2 * rows.runs.num_rows >= sum(self._plan.layouts[number].num_rows for number in rows.blocks)

    def _reads_whole(self, wanted: FieldRows, pieces: Pieces) -> bool:
        """Return whether to read a PER_TOKEN or PER_SAMPLE field's values parts whole, and to select its rows. This is
        so where checksums need it, and where it is cheaper than many small ranges."""
        sizes, num_pieces = wanted.part_bytes, len(pieces.block)
        nbytes = pieces.count * wanted.field.item_bytes
        if wanted.shared is not None:
            return self._seed is not None or sum(sizes.values()) <= nbytes.sum() + SMALL_BYTES * num_pieces
        if self._seed is not None:  # Ranges are used only if they cover each block's part once and whole.
            blocks = list(zip(pieces.block.tolist(), nbytes.tolist(), strict=True))
            return len(blocks) != len(sizes) or any(sizes[number] != size for number, size in blocks)
        many = num_pieces > len(sizes)
        return many and max(nbytes.sum(), sum(sizes.values()) // 4) < SMALL_BYTES * num_pieces

    def _ranges(self, into: np.ndarray, wanted: FieldRows, pieces: Pieces) -> ByteRanges:
        """Return the request to read the pieces of one field. Raises ValueError for a piece that is not within its
        values part."""
        item_bytes = 1 if wanted.field.kind is Kind.OBJECT else wanted.field.item_bytes
        begin, nbytes = pieces.first * item_bytes, pieces.count * item_bytes
        sizes, offsets = np.zeros((2, len(self._blocks)), dtype=np.int64)
        for number, parts in wanted.parts.items():
            sizes[number], offsets[number] = wanted.part_bytes[number], self._offsets[number][parts[0]]
        # `behind` counts the bytes from a piece's first byte to the end of its part.
        behind = sizes[pieces.block] - begin
        wrong = (begin < 0) | (nbytes < 0) | (nbytes > behind)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            end, number = begin[i] + nbytes[i], pieces.block[i]
            raise ValueError(f"block {number}: rows end at byte {end}, but the part has {begin[i] + behind[i]} bytes")
        return ByteRanges(into, self._place[pieces.block], offsets[pieces.block] + begin, nbytes)

    def _carry_out(self, reads: _Reads, deadline: float) -> None:
        sizes = [self._plan.layouts[number].part_bytes[part] for number, part in reads.whole]
        starts = np.cumsum([0, *(round_up(size, ALIGN) for size in sizes)]).tolist()
        memory = as_bytes(fresh(torch.uint8, (starts[-1],)))
        ranges = list(reads.ranges)
        for (number, part), size, start in zip(reads.whole, sizes, starts, strict=False):
            view = memory[start : start + size]
            reads.views.setdefault(number, {})[part] = view
            offset = self._offsets[number][part]
            ranges.append(ByteRanges(view, self._place[[number]], np.array([offset]), np.array([size])))
        blocks = [self._blocks[number] for number in self._used]
        self._store.read_ranges(blocks, ranges, max(0.0, deadline - time.monotonic()))
