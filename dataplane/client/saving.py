"""Implements saving a partition into a file and loading it again, as operations of the client."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator

import numpy as np

from ...codecs import messages
from ..directory import requests
from ..directory.partition import PartitionState
from ..errors import DataPlaneError
from ..meta import KVBatchMeta
from ..partition_rows import PartitionRows
from ..saved_file import PartitionReader, PartitionWriter, SavedPartition
from .operations import ABORT_TIMEOUT_S, Operations
from .steps import Ask, Moved, Steps, Work

_logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Number of bytes of rows that are read or put at a time, unless a single row has more."""
CHUNK_ROWS = 1 << 16


def save(
    operations: Operations, partition: str, path: str | os.PathLike[str], timeout_s: float | None
) -> Steps[Moved[int]]:
    """Save a partition; see `DataPlaneClient.save`."""
    bound = operations.timeout(timeout_s)
    reply = yield Ask("export", requests.encode(requests.Export(partition)), bound)
    exported = messages.decode(reply, requests.Exported)
    rows = PartitionRows.from_bytes(exported.rows)
    chunks = [
        (meta, start, stop) for meta in map(KVBatchMeta.from_bytes, exported.receipts) for start, stop in _chunks(meta)
    ]
    state = messages.encode(exported.state)
    saved = SavedPartition(partition, exported.rows, state, len(chunks))
    writer = PartitionWriter(path)
    nbytes = 0
    try:
        yield Work("save", functools.partial(writer.begin, saved), time.monotonic() + bound)
        for meta, start, stop in chunks:
            moved = yield from operations.get(meta.select(np.arange(start, stop)), None, timeout_s)
            nbytes += moved.nbytes
            yield Work("save", functools.partial(writer.add, start, moved.result), time.monotonic() + bound)
        yield Work("save", writer.finish, time.monotonic() + bound)
    except BaseException:
        writer.discard()
        raise
    return Moved(len(rows), nbytes)


def _chunks(meta: KVBatchMeta) -> Iterator[tuple[int, int]]:
    """Divide a receipt's rows into chunks of about CHUNK_BYTES, and yield (start, stop) of each. A receipt has rows'
    keys and locations. Sizes of rows are estimated from those of their blocks."""
    sizes = np.array([ref.layout.nbytes / max(1, ref.layout.num_rows) for ref in meta.blocks])
    ends = np.cumsum(sum((sizes[source.block] for source in meta.sources), np.zeros(len(meta))))
    start = 0
    while start < len(meta):
        before = ends[start - 1] if start else 0.0
        stop = int(np.searchsorted(ends, before + CHUNK_BYTES, "right"))
        stop = min(max(stop, start + 1), start + CHUNK_ROWS, len(meta))
        yield start, stop
        start = stop


def load(
    operations: Operations, path: str | os.PathLike[str], partition: str | None, timeout_s: float | None
) -> Steps[Moved[str]]:
    """Load a saved partition; see `DataPlaneClient.load`."""
    bound = operations.timeout(timeout_s)
    reader = yield Work("load", functools.partial(PartitionReader, path), time.monotonic() + bound)
    saved, rows = reader.saved, reader.rows
    name = saved.partition if partition is None else partition
    drop = requests.encode(requests.Unregister(name))
    restore = requests.Restore(name, messages.decode(saved.state, PartitionState), saved.rows)
    yield Ask("restore", requests.encode(restore), bound, lambda _: ("unregister", drop))
    nbytes = 0
    try:
        for number in range(saved.num_chunks):
            chunk = functools.partial(reader.chunk, number)
            places, batch = yield Work("load", chunk, time.monotonic() + bound)
            keys, groups = rows.keys[places], rows.group_names[places]
            moved = yield from operations.put(name, keys, batch, None, groups, None, False, timeout_s)
            nbytes += moved.nbytes
    except BaseException:
        try:
            yield from operations.unregister(name, ABORT_TIMEOUT_S)
        except (DataPlaneError, ValueError) as error:
            _logger.warning("partition %r, which was loaded in part, could not be removed: %s", name, error)
        raise
    return Moved(name, nbytes)
