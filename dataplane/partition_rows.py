"""Defines the list of a partition's rows, without their content, and its encoding in a few bytes per row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from .compact import pack_ints, pack_keys, pack_tag, unpack_ints, unpack_keys, unpack_tag

_FORMAT = "rows1"


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRows:
    """List of N rows of a partition at one moment, as columns `[N]`, without the content of their fields. Frozen;
    returned by `rows`."""

    partition: str
    keys: np.ndarray
    """Ids of the rows, dtype object (str) `[N]`. `keys[rows.tags["source"] == "math"]` may be given to `lookup` as it
    is."""
    lengths: np.ndarray
    """Number of tokens of each row, int64 `[N]`; 0 for rows without PER_TOKEN fields."""
    versions: np.ndarray
    """Policy version that produced each row, int64 `[N]`; -1 when the producer named none."""
    groups: np.ndarray
    """Number of each row's group, int64 `[N]`, unique in the data plane; equal to `groups` in a receipt."""
    group_names: np.ndarray
    """Name of each row's group, dtype object (str) `[N]`."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows: name -> array `[N]` of numbers, bools or texts (dtype object). A tag is included when at least
    one row was given it; the other rows have 0, False or "" there."""
    tagged: Mapping[str, np.ndarray]
    """Rows that were given each tag: name -> bool `[N]`."""
    written: Mapping[str, np.ndarray]
    """Rows in which each field of the schema is written: name -> bool `[N]`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.keys)

    def to_bytes(self) -> bytes:
        """Encode the rows as msgpack with packed columns."""
        numbers, first, index = np.unique(self.groups, return_index=True, return_inverse=True)
        return msgspec.msgpack.encode(
            [
                _FORMAT,
                self.partition,
                pack_keys(self.keys.tolist(), squeeze=True),
                [pack_ints(column) for column in (self.lengths, self.versions, numbers, index)],
                pack_keys(self.group_names[first].tolist(), squeeze=True),
                [[name, values.dtype.str, pack_tag(values)] for name, values in self.tags.items()],
                [[name, _pack_flags(flags)] for name, flags in self.tagged.items()],
                [[name, _pack_flags(flags)] for name, flags in self.written.items()],
            ]
        )

    @staticmethod
    def from_bytes(data: bytes) -> PartitionRows:
        """Decode what `to_bytes` encoded. Raises ValueError for other bytes."""
        try:
            return _from_bytes(data)
        except Exception as error:  # whatever it is that another version or program encoded
            raise ValueError(f"not a list of rows ({len(data)} bytes): {error}") from error


def _from_bytes(data: bytes) -> PartitionRows:
    """Decode the bytes of a list of rows. Bytes that are not one may raise any exception."""
    mark, partition, keys, columns, names, tags, tagged, written = msgspec.msgpack.decode(data)
    if mark != _FORMAT:
        raise ValueError(f"it says {mark!r}, expected {_FORMAT!r}")
    lengths, versions, numbers, index = map(unpack_ints, columns)
    rows = PartitionRows(
        partition,
        _texts(unpack_keys(keys)),
        lengths,
        versions,
        numbers[index],
        _texts(unpack_keys(names))[index],
        {name: unpack_tag(values, np.dtype(dtype)) for name, dtype, values in tags},
        {name: _unpack_flags(flags, len(index)) for name, flags in tagged},
        {name: _unpack_flags(flags, len(index)) for name, flags in written},
    )
    every = (rows.keys, lengths, versions, rows.groups, *rows.tags.values())
    if {len(column) for column in every} != {len(rows)} or set(rows.tags) != set(rows.tagged):
        raise ValueError(f"columns of {[len(column) for column in every]} rows, expected equal numbers")
    return rows


def _texts(items: list[str]) -> np.ndarray:
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def _pack_flags(flags: np.ndarray) -> bytes:
    """Encode a bool array `[N]`: as its common value if there is one, else as one bit for each item."""
    if len(flags) and (flags == flags[0]).all():
        return b"1" if flags[0] else b"0"
    return b"b" + np.packbits(flags).tobytes()


def _unpack_flags(data: bytes, count: int) -> np.ndarray:
    """Decode what `_pack_flags` encoded from `count` bools."""
    if data[:1] != b"b":
        return np.full(count, data == b"1")
    return np.unpackbits(np.frombuffer(data, np.uint8, offset=1), count=count).astype(bool)
