"""Defines the interfaces of contenders, the stores and baselines that bring rows from one process to others.

A `Contender` runs in the driver, and starts and ends what it needs. An `Endpoint` runs in every worker process. Only
its `put`, `get`, `write`, `claim` and `clear` are timed. A put returns a token that readers need to read the rows: a
receipt (their keys and locations), keys, an object reference or a number of bytes.

Digests of rows and byte ranges tell whether a reader got what another process wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import torch
import xxhash
from tensordict import NonTensorData, NonTensorStack, TensorDict

from ...codecs.batch import Jagged, Ragged
from ...codecs.memory import as_bytes
from .workloads import Load, LoadSpec

Digests = dict[str, np.ndarray]
"""Digests of the rows: field name -> uint64 `[N]`."""

BYTES = "bytes"
"""Name of the single field of baselines that know only bytes."""


class Mismatch(ValueError):
    """Raised when a read returned other bytes, another dtype or other rows than the producer wrote."""


def row_digests(columns: Mapping[str, Any]) -> Digests:
    """Compute the xxh3 digest of every row's bytes and dtype, for columns of a Batch or of a TensorDict."""
    return {name: np.array([_digest(row) for row in _rows(column)], np.uint64) for name, column in columns.items()}


def check(got: Digests, expected: Digests, what: str) -> None:
    """Raise Mismatch if the digests differ. It names the field and the first row that differs, or what is missing."""
    if set(got) != set(expected):
        raise Mismatch(f"{what}: read fields {sorted(got)}, expected {sorted(expected)}")
    for name, wanted in expected.items():
        if len(got[name]) != len(wanted):
            raise Mismatch(f"{what}: field {name!r} has {len(got[name])} rows, expected {len(wanted)}")
        wrong = np.flatnonzero(got[name] != wanted)
        if len(wrong):
            raise Mismatch(f"{what}: field {name!r} differs in {len(wrong)} rows, the first is row {wrong[0]}")


def _rows(column: Any) -> list[Any]:
    if isinstance(column, Jagged):
        return list(column.values.split(column.lengths.tolist()))
    if isinstance(column, Ragged):
        return list(column.values.split(column.shapes.prod(axis=1).tolist()))
    if isinstance(column, NonTensorStack | NonTensorData):
        return list(column.tolist())
    return list(column.unbind()) if isinstance(column, torch.Tensor) else list(column)


def _digest(row: Any) -> int:
    if isinstance(row, torch.Tensor):
        return xxhash.xxh3_64_intdigest(as_bytes(row.contiguous().reshape(-1)).data, _DTYPE_SEEDS[row.dtype])
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(row, order="sorted"))


_DTYPE_SEEDS = {
    dtype: 1 + number
    for number, dtype in enumerate(
        (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )
    )
}
"""Seed of the digest for each dtype. Because of it, a row that is read with a wrong dtype counts as a mismatch."""


Op = Literal["put", "get", "gets", "field", "write_back", "clear", "claim", "step", "padding"]
"""Names of the operations. `gets` reads shuffled rows with several readers. `field` reads one field of many. `claim` is
a consumer's claim that already waits when the rows are put. `padding` converts padded tensors to packed columns and
back in one process, without a contender."""

ROW_OPS: frozenset[Op] = frozenset(("put", "get", "gets", "field", "write_back", "clear", "step"))
STORE_OPS: frozenset[Op] = frozenset(("claim", *ROW_OPS))
BYTE_OPS: frozenset[Op] = frozenset(("put", "get", "gets"))

CHECKSUMMED = "+checksum"
"""Suffix of a store's name when its reads verify checksums."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a put's rows that one of several readers reads."""

    index: int
    count: int
    rows: np.ndarray
    """Rows that the reader reads, int64. Contenders that know only bytes read part `index` of `count` equal parts
    instead."""

    def byte_range(self, nbytes: int) -> tuple[int, int]:
        """Return the range (start, stop) of the `nbytes` bytes that this reader reads."""
        return nbytes * self.index // self.count, nbytes * (self.index + 1) // self.count


def shares(num_rows: int, count: int) -> list[Share]:
    """Shuffle the rows and divide them among `count` readers. A single reader gets all rows in order."""
    if count == 1:
        return [Share(0, 1, np.arange(num_rows))]
    dealt = np.array_split(np.random.default_rng(count).permutation(num_rows), count)
    return [Share(index, count, rows) for index, rows in enumerate(dealt)]


class Endpoint(Protocol):
    """The part of a contender (store or baseline) that runs in one worker process, for one workload."""

    def put(self, load: Load, values: TensorDict, keys: Sequence[str]) -> Any:
        """Write the fields of the workload's first put as new rows. Returns a token for reading these rows."""
        ...

    def get(self, token: Any, share: Share, fields: Sequence[str] | None) -> Any:
        """Read the given fields of one reader's share of the rows. `token` is the share's token; `fields` None reads
        all."""
        ...

    def fingerprint(self, got: Any) -> Digests:
        """Return the digests of the rows that a `get` returned."""
        ...

    def close(self) -> None:
        """Release everything that this process holds. Idempotent."""
        ...


@runtime_checkable
class ByteEndpoint(Endpoint, Protocol):
    """An endpoint of a baseline that moves bytes without knowing rows or fields."""

    def expected(self, load: Load, share: Share) -> Digests:
        """Return the digests that a correct read of the share has. Only the producer's endpoint is called."""
        ...


@runtime_checkable
class RowEndpoint(Endpoint, Protocol):
    """An endpoint of a store or baseline that knows rows and fields."""

    def write(self, keys: Sequence[str], values: TensorDict, rewards: np.ndarray | None) -> Any:
        """Write fields of new or existing rows, and `rewards` `[N]` as a tag (a number stored in each row's metadata).
        Returns a token for reading the written values."""
        ...

    def clear(self, token: Any) -> None:
        """Remove the rows of `token`."""
        ...

    def counters(self) -> dict[str, int]:
        """Return the total counts of `directory_calls`, `bytes_got` and `wire_bytes_put` that the endpoint keeps."""
        ...


@runtime_checkable
class ClaimEndpoint(RowEndpoint, Protocol):
    """An endpoint of a store that can also lease rows to tasks."""

    def claim(self, num_rows: int, timeout_s: float) -> None:
        """Wait for rows that have all fields of the first put, and lease them. Clearing the rows ends the lease."""
        ...


class Contender(Protocol):
    """The part of a contender (store or baseline) that runs in the driver."""

    @property
    def name(self) -> str: ...

    @property
    def ops(self) -> frozenset[Op]: ...

    def factory(self, spec: LoadSpec) -> Callable[[], Endpoint]:
        """Return a picklable function that makes an endpoint in a worker process. It is called once before a workload
        begins."""
        ...

    def part(self, token: Any, share: Share) -> Any:
        """Return a token with which one reader can read its share of the rows of `token`."""
        ...

    def close(self) -> None:
        """End everything that was started. Idempotent."""
        ...


@runtime_checkable
class RowContender(Contender, Protocol):
    """A contender whose tokens stand for rows. The stages of a step can therefore read and write in turn."""

    def keys(self, token: Any) -> Sequence[str]:
        """Return the keys of the rows of `token`."""
        ...

    def merge(self, token: Any, written: Any) -> Any:
        """Combine two tokens of the same rows into one that reads the fields of both. The second comes from a later
        write of more fields."""
        ...

    def blocks(self, token: Any, fields: Sequence[str]) -> frozenset[int]:
        """Return the ids of the blocks that a read of `fields` touches; empty for a contender without blocks. A block
        is a unit of storage with several rows."""
        ...
