"""Converts a workload to plain byte arrays, one for each field, for baselines that do not know rows."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
import xxhash

from ....codecs.batch import Jagged, Ragged
from ....codecs.gather import as_bytes
from ..contenders import Share
from ..digests import BYTES, Digests
from ..workloads import Load


def parts_of(load: Load) -> list[np.ndarray]:
    """Return the values of each field of the workload's first put as a 1-D uint8 array. It is the column's own memory,
    or msgpack for a column of objects."""
    parts = []
    for name in load.first:
        column = load.batch[name]
        if isinstance(column, list):
            parts.append(np.frombuffer(msgspec.msgpack.encode(column), np.uint8))
        else:
            values = column.values if isinstance(column, Jagged | Ragged) else column
            parts.append(as_bytes(values if isinstance(values, torch.Tensor) else torch.as_tensor(values)))
    return parts


def slices(parts: list[np.ndarray], share: Share) -> list[np.ndarray]:
    """Return the piece of each field's byte array that belongs to a reader's share."""
    ranges = [share.byte_range(len(part)) for part in parts]
    return [part[start:stop] for part, (start, stop) in zip(parts, ranges, strict=True)]


def digest(pieces: list[np.ndarray]) -> Digests:
    """Compute one xxh3 digest over all pieces in order."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece.data)
    return {BYTES: np.array([state.intdigest()], np.uint64)}
