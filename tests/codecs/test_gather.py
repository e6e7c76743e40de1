"""Reading rows from parts that were overwritten or damaged: a ValueError, and no memory for what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.codecs.blocks import encode_block
from headrace.codecs.gather import RowSource, assemble
from headrace.codecs.jagged import pack
from headrace.codecs.schema import Field, Kind, Schema

SCHEMA = Schema([Field("image", Kind.RAGGED, torch.uint8, ndim=2)])
ROWS = 6


@pytest.mark.parametrize(
    "shapes",
    [
        np.full((ROWS, 2), -1),
        np.full((ROWS, 2), 1 << 33),
        np.full((ROWS, 2), 1 << 62),
        np.array([[-2, -3], *[[2, 3]] * (ROWS - 1)]),
        np.zeros((ROWS, 2)),
        np.full((ROWS, 2), 3),
    ],
    ids=["negative", "beyond memory", "overflowing", "negative twice", "zeros", "larger"],
)
def test_shapes_that_do_not_describe_the_values_are_refused(shapes: np.ndarray) -> None:
    batch = pack(SCHEMA, {"image": [torch.ones(2, 3, dtype=torch.uint8)] * ROWS}, ROWS)
    block = encode_block(batch, 0, ROWS, checksum=False)
    numbers = np.arange(ROWS, dtype=np.int32)
    source = RowSource(("image",), np.zeros(ROWS, np.int32), numbers, np.zeros(ROWS, np.int64))
    views = dict(enumerate(block.parts))
    lengths = np.zeros(ROWS, np.int64)
    found = assemble(SCHEMA, lengths, [source], [block.layout], [views]).ragged("image")
    assert found.shapes.tolist() == [[2, 3]] * ROWS
    values, index = block.layout.field_parts(SCHEMA["image"])
    views[index] = shapes.astype("<i8").reshape(-1).view(np.uint8)
    with pytest.raises(ValueError, match="'image': shapes describe"):
        assemble(SCHEMA, lengths, [source], [block.layout], [views])
