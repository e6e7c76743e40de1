"""Verifies the checksums of blocks that were read, and names the rows of damaged ones."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ...codecs.blocks import RowSource, verify
from ...codecs.checksums import ChecksumMismatch
from ...codecs.integers import distinct
from ..errors import IntegrityError
from ..meta import KVBatchMeta


def verify_rows(
    meta: KVBatchMeta,
    sources: Sequence[RowSource],
    views: Sequence[Mapping[int, np.ndarray]] | Mapping[int, Mapping[int, np.ndarray]],
) -> None:
    """Check the checksums of the rows that `sources` read. views: for each block of the receipt, a mapping from part
    number to the part's bytes, with the header among them. Raises IntegrityError naming the rows that are damaged."""
    with damage_named(meta, sources):
        for source in sources:
            schema = meta.schema.subset(source.fields)
            for number in distinct(source.block).tolist():
                verify(schema, source, number, meta.blocks[number].layout, views[number], seed=meta.plane_id)


@contextlib.contextmanager
def damage_named(meta: KVBatchMeta, sources: Sequence[RowSource]) -> Iterator[None]:
    """Replace ChecksumMismatch by an IntegrityError that names the rows that `sources` read from the damaged block."""
    try:
        yield
    except ChecksumMismatch as error:
        raise IntegrityError(str(error), keys=keys_in(meta, sources, {error.block})) from error


def keys_in(meta: KVBatchMeta, sources: Sequence[RowSource], numbers: Collection[int]) -> list[str]:
    """Return the keys of the rows that `sources` read from the blocks at these positions in the receipt."""
    hit = np.zeros(len(meta), dtype=bool)
    for source in sources:
        hit |= np.isin(source.block, list(numbers))
    return [meta.keys[i] for i in np.flatnonzero(hit)]
