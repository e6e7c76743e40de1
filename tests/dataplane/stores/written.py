"""Blocks for tests of stores at their own protocol: written, expected back to the byte, and freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.codecs.blocks import BlockLayout
from headrace.dataplane.block_store import Want
from headrace.dataplane.meta import BlockRef

SIZES = (100, 0, 300_000, 7, 0)
ALL = tuple(range(len(SIZES)))
NEXT_BLOCK = iter(range(1, 1 << 30))


def parts_of(block_id: int, sizes: tuple[int, ...] = SIZES) -> list[np.ndarray]:
    """The bytes of each part of a block."""
    generator = np.random.default_rng(block_id)
    return [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def layout_of(sizes: tuple[int, ...] = SIZES) -> BlockLayout:
    return BlockLayout(fields=("x",), num_rows=1, num_tokens=0, part_bytes=sizes)


def write(host: Any, store: Any, sizes: tuple[int, ...] = SIZES, block_id: int | None = None) -> Want:
    """Put a block, the next one by default."""
    block_id, layout = next(NEXT_BLOCK) if block_id is None else block_id, layout_of(sizes)
    location = host.allocate(block_id, layout.nbytes)
    assert location is not None
    location = store.put(block_id, location, parts_of(block_id, sizes), layout.offsets, 10.0)
    return Want(BlockRef(block_id, location, layout), tuple(range(len(sizes))))


def free(host: Any, *wants: Want) -> None:
    host.free_many([(want.block.block_id, want.block.location) for want in wants])


def assert_hold(store: Any, *wants: Want) -> None:
    """Check that the store has the wanted parts, to the byte and read-only."""
    for want, views in zip(wants, store.get(list(wants), 10.0), strict=True):
        assert sorted(views) == sorted(want.parts)
        expected = parts_of(want.block.block_id, want.block.layout.part_bytes)
        for part, view in views.items():
            np.testing.assert_array_equal(view, expected[part])
            assert not view.flags.writeable
    store.settle(list(wants))
