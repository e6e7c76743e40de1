"""One field's wanted rows, copied out of the parts of the blocks that hold them into fresh memory.

Common arguments: block and row `[N]`: which block each wanted row is in, and where; `runs` are those of the two.
values, index: block -> that field's uint8 part. All raise ValueError when a row reaches beyond its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from . import objects
from .batch import Jagged, Ragged
from .memory import fresh
from .runs import Runs, as_bytes, by_source, copy_rows, copy_runs, exclusive_cumsum
from .schema import Field

Parts = Mapping[int, np.ndarray]


def gather_jagged(field: Field, lengths: np.ndarray, start: np.ndarray, runs: Runs, values: Parts) -> Jagged:
    """PER_TOKEN. lengths: int64 `[N]`; start: int64 `[N]`, first token of each row within its block."""
    tokens = runs.totals(lengths)
    assert field.dtype is not None
    out = fresh(field.dtype, (int(tokens.sum()), *field.trailing))
    copy_runs(as_bytes(out), values, runs.source, start[runs.first] * field.item_bytes, tokens * field.item_bytes)
    return Jagged(out, lengths)


def gather_dense(field: Field, block: np.ndarray, row: np.ndarray, runs: Runs, values: Parts) -> torch.Tensor:
    """PER_SAMPLE."""
    assert field.dtype is not None
    out = fresh(field.dtype, (len(row), *field.trailing))
    copy_rows(as_bytes(out), values, block, row, field.item_bytes, runs)
    return out


def gather_ragged(field: Field, block: np.ndarray, row: np.ndarray, runs: Runs, values: Parts, index: Parts) -> Ragged:
    """RAGGED. index: int64 shapes `[rows of the block, ndim]`."""
    shapes = np.empty((len(row), field.ndim), dtype=np.int64)
    start = np.empty(len(row), dtype=np.int64)
    for number, positions in by_source(block):
        of_block = index[number].view("<i8").reshape(-1, field.ndim)
        rows = row[positions]
        shapes[positions] = of_block[rows]
        start[positions] = exclusive_cumsum(of_block.prod(axis=1))[rows]
    elements = runs.totals(shapes.prod(axis=1))
    assert field.dtype is not None
    out = fresh(field.dtype, (int(elements.sum()),))
    copy_runs(as_bytes(out), values, runs.source, start[runs.first] * field.item_bytes, elements * field.item_bytes)
    return Ragged(out, shapes)


def gather_objects(block: np.ndarray, row: np.ndarray, values: Parts, index: Parts) -> list[Any]:
    """OBJECT. index: int64 end offsets `[rows of the block]`. A row wanted twice is decoded twice."""
    ends = {number: index[number].view("<i8").tolist() for number in values}
    memory = {number: part.data for number, part in values.items()}
    out = []
    for number, at in zip(block.tolist(), row.tolist(), strict=True):
        begin = ends[number][at - 1] if at else 0
        out.append(objects.decode(memory[number][begin : ends[number][at]]))
    return out
