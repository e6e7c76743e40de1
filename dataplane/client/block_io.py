"""Writes a batch to the store as blocks (groups of rows), and reads the rows of a receipt back in its order."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import numpy as np

from ...codecs.batch import Batch, Column, Jagged, Ragged
from ...codecs.block_header import ChecksumMismatch
from ...codecs.blocks import EncodedBlock
from ...codecs.gather import ReadPlan
from ..block_store import (
    ANY_HOLDER,
    BlockStore,
    ChoosesHolders,
    NamesHolders,
    PutsMany,
    ReadsRanges,
    Want,
    holder_of,
)
from ..config import MAX_BLOCK_ROWS
from ..errors import DataPlaneError, FieldsNotReady, IntegrityError, RowsCleared, SchemaMismatch, StoreLost
from ..meta import KVBatchMeta, narrow_sources
from .ranged_read import RangedReader

BLOCK_ROWS = 256
"""Default number of rows in a block. With half as many rows, a put to the store `simple` takes a third longer. Smaller
blocks save a reader bytes only if it reads some blocks whole and others not at all, for example when each block is a
group."""
LEAST_BYTES = 64 << 10
"""Smallest size of a block in bytes. Smaller blocks are given more rows, because their bookkeeping would cost more than
their bytes. The limit applies only where `block_rows` is not configured."""
MOST_BYTES = 4 << 20
"""Largest number of bytes of one field in a block. More bytes gain nothing, and several stores transfer all bytes of
the field in a block even if a reader wants only one row. The limit applies only where `block_rows` is not
configured."""
PROBE_S = 2.0
"""Time limit in seconds for asking the store, after a failed read, whether it still has a block."""


def cut(groups: Sequence[str] | np.ndarray, block_rows: int) -> list[tuple[int, int]]:
    """Divide rows into blocks of at most `block_rows` rows. Only groups (the rows of one prompt) with more rows are
    split.

    groups: name or number of each row's group, `[N]`. Returns (start, stop) of each block.
    """
    column = np.asarray(groups)
    ends = np.append(np.flatnonzero(column[1:] != column[:-1]) + 1, len(column))
    blocks: list[tuple[int, int]] = []
    start = 0
    while start < len(column):
        limit = start + block_rows
        stop = int(ends[max(0, int(np.searchsorted(ends, limit, "right")) - 1)])
        stop = stop if start < stop <= limit else limit
        blocks.append((start, stop))
        start = stop
    return blocks


def rows_per_block(
    num_rows: int, column_bytes: Sequence[int], block_rows: int | None, groups: np.ndarray | None = None
) -> int:
    """Return the number of rows to put in a block: `block_rows` as configured, or if None, a number chosen by size.

    The chosen number is BLOCK_ROWS, raised until a block has LEAST_BYTES bytes, and lowered until no field has more
    than MOST_BYTES bytes, but never below the size of the largest of `groups`, so that its rows can share tokens. It is
    at most MAX_BLOCK_ROWS. column_bytes: number of encoded bytes of each column of `num_rows` rows. groups: number of
    each row's group, int64 `[N]`; None if none share tokens.
    """
    if block_rows is not None:
        return block_rows
    num_rows = max(1, num_rows)
    rows = max(BLOCK_ROWS, LEAST_BYTES * num_rows // max(1, sum(column_bytes)))
    largest = 1 if groups is None or not len(groups) else int(np.bincount(groups).max())
    return min(max(largest, min(rows, MOST_BYTES * num_rows // max(1, *column_bytes))), MAX_BLOCK_ROWS)


def write_blocks(
    store: BlockStore,
    blocks: Sequence[EncodedBlock],
    first_id: int,
    space: bytes,
    deadline: float,
    holder: int = ANY_HOLDER,
) -> tuple[bytes, ...] | None:
    """Write the blocks of a put into the space that was reserved for them.

    first_id: id of the first block; the ids of the other blocks follow. space: location of the space, or b"" for a
    store that learns locations only when blocks are written. deadline: time by the clock `time.monotonic()`. holder:
    process of the store to whose host to write. Returns the blocks' locations. If the space has a location, the blocks
    lie end to end in it and the result is None.
    """
    timeout_s = max(0.0, deadline - time.monotonic())
    if space:
        ends = np.cumsum([block.layout.nbytes for block in blocks]).tolist()
        streams = [block.stream() for block in blocks]
        bases = [0, *ends[:-1]]
        offsets = [base + at for base, (places, _) in zip(bases, streams, strict=True) for at in places]
        store.put(first_id, space, chain.from_iterable(pieces for _, pieces in streams), offsets, timeout_s)
        return None
    if isinstance(store, ChoosesHolders):
        return store.put_to(holder, first_id, [block.complete() for block in blocks], timeout_s)
    if isinstance(store, PutsMany):
        return store.put_many(first_id, [block.complete() for block in blocks], timeout_s)
    final = []
    for number, block in enumerate(blocks):
        timeout_s = max(0.0, deadline - time.monotonic())
        final.append(store.put(first_id + number, b"", block.parts, block.layout.offsets, timeout_s))
    return tuple(final)


def check_readable(meta: KVBatchMeta, fields: Sequence[str]) -> None:
    """Raise SchemaMismatch for undeclared or repeated fields, FieldsNotReady for fields outside the receipt."""
    unknown = [name for name in fields if name not in meta.schema]
    if unknown or len(set(fields)) < len(fields):
        message = f"fields {list(fields)}: expected names of {list(meta.schema)}, each once"
        raise SchemaMismatch(message, op="get", partition=meta.partition)
    lacking = [name for name in fields if name not in meta.fields]
    if lacking:
        message = f"the receipt cannot read {lacking}; it reads {list(meta.fields)}, lookup gives one for more"
        raise FieldsNotReady(message, op="get", partition=meta.partition, keys=meta.keys)


def read_rows(store: BlockStore, meta: KVBatchMeta, fields: Sequence[str], *, check: bool, timeout_s: float) -> Batch:
    """Read `fields` of the rows of a receipt (`meta`), in the receipt's order, into new memory. check: whether to
    verify checksums.

    Raises RowsCleared naming the keys of the rows that are gone, StoreLost when the store does not answer, and
    IntegrityError naming the keys whose bytes have changed.
    """
    sources, layouts = narrow_sources(meta.sources, fields), [ref.layout for ref in meta.blocks]
    plan = ReadPlan(meta.schema.subset(fields), meta.lengths, sources, layouts)
    wants = {number: Want(meta.blocks[number], parts) for number, parts in plan.parts(header=check).items()}
    started = time.monotonic()
    try:
        try:
            batch = _read(store, meta, plan, wants, check, timeout_s)
        except Exception as error:
            if isinstance(error, DataPlaneError) and not isinstance(error, IntegrityError):
                raise  # The store's error already says what happened.
            # Bytes that do not fit have two causes: the block was freed and reused during the read (`settle` reports
            # that), or it is damaged.
            store.settle(list(wants.values()))
            if isinstance(error, ValueError | IndexError):
                damaged = {error.block} if isinstance(error, ChecksumMismatch) else ()
                raise IntegrityError(str(error), keys=_keys_in(meta, plan, damaged)) from error
            raise
        store.settle(list(wants.values()))
        return batch
    except RowsCleared as error:
        keys = _cleared_keys(store, meta, plan, wants)
        raise _named(error, meta, keys, started) from None
    except DataPlaneError as error:
        keys = error.keys or _keys_at(error.peer, store, meta, plan, wants) or meta.keys
        raise _named(error, meta, keys, started) from error.__cause__


def _read(
    store: BlockStore, meta: KVBatchMeta, plan: ReadPlan, wants: Mapping[int, Want], check: bool, timeout_s: float
) -> Batch:
    """Read the rows once from the store's memory. The result is valid only if `settle` succeeds afterwards."""
    seed = meta.plane_id if check else None
    if isinstance(store, ReadsRanges) and not store.lends([want.block for want in wants.values()]):
        return RangedReader(store, meta.blocks, plan, seed=seed).read(timeout_s)
    views: list[dict[int, np.ndarray]] = [{} for _ in meta.blocks]
    for number, parts in zip(wants, store.get(list(wants.values()), timeout_s), strict=True):
        views[number] = parts
    return plan.assemble(views, seed=seed)


def hosts_of(store: BlockStore, meta: KVBatchMeta) -> np.ndarray:
    """Return the host of each row of a receipt, dtype object (str) `[N]`; see `DataPlaneClient.hosts_of`."""
    hosts = np.full(len(meta), "", dtype=object)
    if isinstance(store, ChoosesHolders) and meta.sources:
        of_block = [store.host_of(holder_of(ref.location)) for ref in meta.blocks]
        hosts[:] = np.array(of_block, dtype=object)[meta.sources[0].block]
    return hosts


def column_bytes(column: Column) -> int:
    """Return the number of bytes of the column's values. Objects count as 0 bytes, because Python manages their
    memory."""
    if isinstance(column, Jagged | Ragged):
        return column.values.nbytes
    return 0 if isinstance(column, list) else column.nbytes


def _cleared_keys(store: BlockStore, meta: KVBatchMeta, plan: ReadPlan, wants: Mapping[int, Want]) -> Sequence[str]:
    """Return the keys of rows in blocks that the store no longer has, or all keys when the store does not answer."""
    gone = set()
    for number, want in wants.items():
        try:
            store.get([want], PROBE_S)
            store.settle([want])
        except RowsCleared:
            gone.add(number)
        except DataPlaneError:
            return list(meta.keys)
    return _keys_in(meta, plan, gone) or list(meta.keys)


def _keys_at(
    peer: str, store: BlockStore, meta: KVBatchMeta, plan: ReadPlan, wants: Mapping[int, Want]
) -> Sequence[str]:
    """Return the keys of the rows whose blocks the process `peer` holds; none for a store with a single process."""
    if not isinstance(store, NamesHolders) or peer not in store.holders:
        return []
    number = store.holders.index(peer)
    return _keys_in(meta, plan, [at for at, want in wants.items() if holder_of(want.block.location) == number])


def naming_lost(error: StoreLost, meta: KVBatchMeta, fields: Sequence[str], dead: Mapping[int, str]) -> StoreLost:
    """Return the error of a read of `fields` so that it names exactly the keys of the rows that are lost. dead: names
    of the store's dead processes, by number. Returns `error` itself if they held none of the rows."""
    gone = [number for number, ref in enumerate(meta.blocks) if holder_of(ref.location) in dead] if dead else []
    hit = np.zeros(len(meta), dtype=bool)
    for source in narrow_sources(meta.sources, fields):
        hit |= np.isin(source.block, gone)
    keys = [meta.keys[i] for i in np.flatnonzero(hit)]
    if not keys:
        return error
    peers = sorted({dead[holder_of(meta.blocks[number].location)] for number in gone})
    message = f"{len(keys)} of {len(meta)} rows are lost: {error.message}"
    context = error.fields() | {"keys": keys, "num_keys": len(keys), "peer": " and ".join(peers)}
    return type(error)(message, **context)


def _keys_in(meta: KVBatchMeta, plan: ReadPlan, numbers: Collection[int]) -> list[str]:
    hit = np.zeros(len(meta), dtype=bool)
    for rows in plan.sources:
        hit |= np.isin(rows.source.block, list(numbers))
    return [meta.keys[i] for i in np.flatnonzero(hit)]


def _named(error: DataPlaneError, meta: KVBatchMeta, keys: Sequence[str], started: float) -> DataPlaneError:
    """Return the store's error with the reader's context: operation, partition, keys and elapsed seconds."""
    context = error.fields() | {"op": "get", "partition": meta.partition, "keys": keys, "num_keys": len(keys)}
    context["elapsed_s"] = context["elapsed_s"] or time.monotonic() - started
    return type(error)(error.message, **context)
