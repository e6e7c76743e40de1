"""Describes the rows of puts and claims, as clients and the directory exchange them without the rows' content."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np

from ...codecs import messages
from ...codecs.blocks import BlockLayout
from ...codecs.gather import RowSource
from ...codecs.schema import Schema
from ..blobs.row_references import holds_blobs
from ..block_store import ANY_HOLDER
from ..errors import DuplicateKeys
from ..meta import BlockRef, KVBatchMeta
from .block_table import Reservation

Outcome = Literal["done", "retry"]
"""Outcome of claimed rows: `done` if the task has finished them, `retry` if it can claim them again."""

# ---------------- Rows of a put form groups by the caller's names, or by row keys up to their last dot.


class Grouping(msgspec.Struct, frozen=True, array_like=True):
    """Assigns the rows of one put to groups, such as all samples of one prompt."""

    names: Sequence[str]
    """Names of the G groups, without repeats, in order of appearance."""
    index: np.ndarray
    """Index into `names` of each row's group, int64 `[N]`."""
    given: bool
    """True when the caller named the groups, False when the names were taken from the keys."""

    @staticmethod
    def of(keys: Sequence[str], groups: Sequence[str] | None) -> Grouping:
        """Group rows by the names in `groups`. With None, a row's group is the part of its key before the last ".", or
        the whole key if there is no such part."""
        if groups is None:
            heads, names = _stem_runs(keys)
        else:
            column = np.array(groups, dtype=object)
            heads = np.ones(len(column), dtype=bool)
            heads[1:] = column[1:] != column[:-1]
            names = column[heads].tolist()
        index = np.cumsum(heads) - 1
        distinct_names = list(dict.fromkeys(names))
        if len(distinct_names) < len(names):  # The rows of some group are not consecutive.
            number = dict(zip(distinct_names, range(len(distinct_names)), strict=True))
            index = np.array([number[name] for name in names], dtype=np.int64)[index]
        return Grouping(distinct_names, index, groups is not None)


def _stem_runs(keys: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """Find the runs of consecutive keys with the same stem, which is the part of a key before the last ".".

    Returns a bool array `[N]` that is True where a run begins, and the stem of each run. The plain loop takes 0.12 us
    per key, half the time of numpy code on the keys' bytes.
    """
    first: list[int] = []
    names: list[str] = []
    before = None
    for number, key in enumerate(keys):
        stem = key.rpartition(".")[0] or key  # A key like ".3" has no stem, so the whole key is used.
        if stem != before:
            first.append(number)
            names.append(stem)
            before = stem
    heads = np.zeros(len(keys), dtype=bool)
    heads[first] = True
    return heads, names


class ClaimRows(msgspec.Struct, frozen=True, array_like=True):
    """Describes the rows that a claim asks for, on behalf of one task (consumer)."""

    partition: str
    task: str
    fields: tuple[str, ...]
    num_rows: int
    whole_groups: bool = False
    min_version: int | None = None
    """Lowest policy version to take. Rows with a lower version, and groups that contain one, are skipped. None takes
    all versions."""
    max_version: int | None = None
    """Highest policy version to take. Rows with a higher version, and groups that contain one, are skipped until a
    claim allows them. None takes all versions."""
    at_least: int | None = None
    """Smallest number of rows for which the claim returns, at most `num_rows`. None stands for `num_rows`."""
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments for the task's sampler, as plain values."""

    @property
    def least(self) -> int:
        """Smallest number of rows for which the claim returns."""
        return self.num_rows if self.at_least is None else self.at_least

    @property
    def wanted(self) -> str:
        """Description of the number of rows, for error messages, such as "8 rows" or "1 to 8 rows in whole groups"."""
        count = str(self.num_rows) if self.least == self.num_rows else f"{self.least} to {self.num_rows}"
        return f"{count} {'rows in whole groups' if self.whole_groups else 'rows'}"


class Fence(msgspec.Struct, frozen=True, array_like=True):
    """Condition under which a put may write to its rows: each must still be the row that the writer means."""

    generations: np.ndarray | None
    """Generation of each row, int64 `[N]`, -1 for rows without condition; None if the rows must only exist."""
    leases: tuple[int, ...] = ()
    """Ids of the leases of which one must hold each row that has a generation; () if they need no lease."""


class BlobsOfRows(msgspec.Struct, frozen=True, array_like=True):
    """Describes the blobs to which the rows of a put refer in one field, and those of them that the put brings."""

    field: str
    names: Sequence[str]
    """Digests of the distinct blobs."""
    index: np.ndarray
    """Position in `names` of each reference, row after row, int64 `[sum(counts)]`."""
    counts: np.ndarray
    """Number of references of each row, int64 `[N]`."""
    carried: tuple[int, ...] = ()
    """Positions in `names` of the blobs that the put brings."""
    layouts: tuple[BlockLayout, ...] = ()
    """Layout of the block of each blob that the put brings."""


class PutRows(msgspec.Struct, frozen=True, array_like=True):
    """Describes the rows and blocks of one put, without the content of the rows."""

    partition: str
    keys: Sequence[str]
    """Keys (ids) of the N rows."""
    fields: tuple[str, ...]
    lengths: np.ndarray | None
    """Number of tokens of each row, int64 `[N]`; None when no field is PER_TOKEN."""
    versions: np.ndarray | None
    """Policy version of each row, int64 `[N]`. With None, new rows get -1 and existing rows keep their version."""
    groups: Grouping
    tags: Mapping[str, np.ndarray]
    layouts: tuple[BlockLayout, ...]
    """Layout of each block. The blocks hold the rows in the order of `keys`."""
    replace: bool
    writer: str
    schema_id: int
    """Digest of the schema with which the blocks were encoded, from the function `schema_id`."""
    fences: tuple[Fence, ...] = ()
    """Conditions on the rows, all of which must hold; () for a put that may create them."""
    near: int = ANY_HOLDER
    """Number of a process of the store on the writer's host; ANY_HOLDER if there is none."""
    blobs: tuple[BlobsOfRows, ...] = ()
    """Blobs of the rows, for each field of the put that has blobs."""

    @property
    def all_layouts(self) -> tuple[BlockLayout, ...]:
        """Layouts of the rows' blocks, followed by those of the blobs that the put brings."""
        return self.layouts + tuple(layout for blobs in self.blobs for layout in blobs.layouts)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the blocks take in the store, including the padding between their parts."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        """Number of bytes that each block takes in the store."""
        return [layout.nbytes for layout in self.all_layouts]

    @property
    def value_bytes(self) -> int:
        """Number of bytes of the blocks' values, indexes and headers, without padding."""
        return sum(sum(layout.part_bytes) for layout in self.all_layouts)


class Committed(msgspec.Struct, frozen=True, array_like=True):
    """Values that the directory adds to the writer's `PutRows` when it commits a put. Both together make a receipt
    (the keys and locations of the rows)."""

    first_block_id: int
    locations: tuple[bytes, ...]
    lengths: np.ndarray | None
    """Number of tokens of each row, int64 `[N]`, 0 for rows without tokens; None when `PutRows` has the lengths."""
    versions: np.ndarray | None
    """Version of each row, int64 `[N]`; None when `PutRows` has the versions."""
    groups: np.ndarray
    """Id of each row's group, int64 `[N]`, unique in the directory."""
    generations: np.ndarray
    """Generation of each row, int64 `[N]`."""
    tags: dict[str, np.ndarray]
    """Tags (named numbers or texts) that all committed rows already had from earlier puts: tag name -> one value per
    row."""

    def receipt(self, put: PutRows, schema: Schema, plane_id: int) -> KVBatchMeta:
        """Build the put's receipt: the rows' keys and locations. Only the fields of this put can be read with it."""
        lengths = put.lengths if self.lengths is None else self.lengths
        versions = put.versions if self.versions is None else self.versions
        assert lengths is not None and versions is not None
        rows = np.array([layout.num_rows for layout in put.layouts])
        first = np.repeat(np.cumsum(rows) - rows, rows)
        start = np.zeros(len(first), dtype=np.int64)
        if put.lengths is not None:
            start = np.cumsum(put.lengths) - put.lengths
            start -= start[first]
        block = np.repeat(np.arange(len(rows), dtype=np.int32), rows)
        row = (np.arange(len(first)) - first).astype(np.int32)
        ids = range(self.first_block_id, self.first_block_id + len(rows))
        return KVBatchMeta(
            put.partition,
            tuple(put.keys),
            put.fields,
            lengths,
            versions,
            self.groups,
            {**self.tags, **put.tags},
            tuple(BlockRef(*item) for item in zip(ids, self.locations, put.layouts, strict=True)),
            (RowSource(put.fields, block, row, start),),
            schema=schema,
            plane_id=plane_id,
            generations=self.generations,
        )


def schema_id(schema: Schema) -> int:
    """Return a digest of a schema (CRC-32). It reveals writers that still use the schema of an earlier partition of the
    same name."""
    return zlib.crc32(messages.encode(schema))


def check_distinct(keys: Sequence[str], partition: str, op: str = "put") -> None:
    """Raise DuplicateKeys if a key occurs more than once. The error names these keys."""
    if len(set(keys)) < len(keys):
        seen: set[str] = set()
        twice = [key for key in keys if key in seen or seen.add(key)]
        raise DuplicateKeys(f"keys occur more than once in one {op}", op=op, partition=partition, keys=twice)


@dataclass(frozen=True, slots=True)
class Expired:
    """The leases and reservations that one call of `Directory.expire` ended because their deadlines had passed."""

    num_rows: int
    """Number of rows whose lease expired because a consumer died or stopped. They can be claimed again."""
    writers: tuple[str, ...]
    """Names of the writers that reserved space and did not commit in time. Writers of expired unused credit are not
    included."""
    reservations: tuple[Reservation, ...]
    """Expired reservations. The caller must give their space back to the store."""


def check_no_blobs(op: str, partition: str) -> None:
    """Raise ValueError for the name of a partition of blobs. op: the call that got it."""
    if holds_blobs(partition):
        raise ValueError(
            f"{op}: got partition {partition!r}, expected a name without '#'; blobs are put and cleared with their rows"
        )


def check_lease_id(op: str, lease_id: int) -> None:
    """Raise ValueError for a receipt without a lease. op: the call that got it."""
    if lease_id <= 0:
        raise ValueError(
            f"{op}: the receipt has no lease; expected a receipt from claim (concat of several has no lease)"
        )
