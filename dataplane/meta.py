"""Receipts: what a holder needs to read rows without asking anybody, and nothing of the rows' contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..codecs.blocks import BlockLayout, RowSource


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One immutable block."""

    block_id: int
    """Minted by the directory, unique in the run, never reused."""
    location: bytes
    """The store's own address of the block; opaque to everybody else."""
    layout: BlockLayout


@dataclass(frozen=True, slots=True)
class KVBatchMeta:
    """A frozen receipt of N rows.

    Returned by put, claim and lookup; `get` with it reads bytes without a directory call. Pure methods return new receipts.
    """

    partition: str
    keys: tuple[str, ...]
    """N row ids, `{prompt_uid}.{sample}`; a key may repeat."""
    fields: tuple[str, ...]
    """Fields that this receipt can read."""
    lengths: np.ndarray
    """int64 `[N]`: tokens of each row (0 for rows without PER_TOKEN fields)."""
    versions: np.ndarray
    """int64 `[N]`: policy version that produced the row; -1 when the producer named none."""
    groups: np.ndarray
    """int64 `[N]`: directory-wide number of the row's group (rows of one prompt share it)."""
    tags: Mapping[str, np.ndarray]
    """Per-row scalars, name -> `[N]` numeric numpy array: filter and balance on these without reading a row."""
    blocks: tuple[BlockRef, ...]
    """The blocks that `sources` point into."""
    sources: tuple[RowSource, ...]
    """Per set of fields written together: block, row and first token of each of the N rows. Covers every field in `fields` once."""
    lease_id: int = 0
    """Lease under which a claim gave these rows; 0 when they were not claimed."""
