"""Names large values that many rows refer to, such as pictures, by a digest of their content.

A row lists the digests of its blobs, in order. Each blob is stored once, however many rows refer to it. Its parts, such
as the pixels and the grid of a picture, are declared as fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from .batch import Batch, Column, Jagged, Ragged
from .jagged import pack
from .memory import as_bytes
from .objects import encode_column
from .schema import Field, Kind, Schema
from .threads import run_in_threads

DIGEST_BYTES = 16
"""Number of bytes of a digest. It is xxh3 of 128 bits, which takes less time than a copy of the bytes. Two blobs of one
run have the same by chance with a probability of less than 1e-20; it does not resist those who seek such blobs."""
THREADED_BYTES = 8 << 20
"""Number of bytes of the blobs of a put from which their digests are computed in several threads. That of 8 MiB takes
half a millisecond."""
_THREADS = min(4, os.cpu_count() or 1)


def blob_field(name: str, parts: Iterable[Field]) -> Field:
    """Declare a field whose rows list blobs. parts: the fields of one blob, of any kind but PER_TOKEN."""
    return Field(name, Kind.RAGGED, torch.uint8, ndim=2, parts=tuple(parts))


class Blob:
    """A large value with its digest. Do not change its tensors afterwards, because their memory is used as it is."""

    __slots__ = ("__weakref__", "_name", "batch")

    def __init__(self, field: Field, parts: Mapping[str, Any]) -> None:
        """field: the declaration, from `blob_field`. parts: the value of each part, by its name. Raises ValueError
        unless these are exactly the declared parts, each of its kind, dtype and shape."""
        schema = Schema(field.parts)
        if set(parts) != set(schema):
            raise ValueError(
                f"field {field.name!r}: got the parts {sorted(parts)} of a blob, expected {sorted(schema)}"
            )
        self.batch = pack(schema, {name: _one_row(schema[name], value) for name, value in parts.items()}, 1)
        """The parts, as the only row of a batch."""
        self._name = ""

    @property
    def name(self) -> str:
        """Digest of the parts and of their declaration, as hexadecimal digits. It is computed when it is first read."""
        if not self._name:
            self._name = _digest(self.batch)
        return self._name

    def named(self) -> Blob:
        """Compute the digest now, and return this blob."""
        self._name = self.name
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts as arrays of bytes, which protocol 5 need not copy."""
        columns: list[Any] = []
        for column in self.batch.values():
            if isinstance(column, Ragged):
                columns.append((as_bytes(column.values), column.shapes))
            else:
                columns.append((as_bytes(column), tuple(column.shape)) if isinstance(column, torch.Tensor) else column)
        return _unpickled, (self.name, self.batch.schema.to_list(), columns)


def _unpickled(name: str, fields: list[dict[str, Any]], columns: list[Any]) -> Blob:
    blob, schema, values = Blob.__new__(Blob), Schema.from_list(fields), dict[str, Column]()
    for (part, field), column in zip(schema.items(), columns, strict=True):
        if field.dtype is None:
            values[part] = column
            continue
        # Arrays that need no copy cannot be written to; copied, they outlive the memory that was shared.
        flat = torch.from_numpy(np.require(column[0], requirements="W")).view(field.dtype)
        values[part] = Ragged(flat, column[1]) if field.kind is Kind.RAGGED else flat.reshape(column[1])
    blob.batch, blob._name = Batch(schema, 1, values), name
    return blob


def _one_row(field: Field, value: Any) -> Any:
    dense = field.kind is Kind.RAGGED and isinstance(value, torch.Tensor | np.ndarray)
    return value[None] if dense else [value]


def _digest(batch: Batch) -> str:
    digest = xxhash.xxh3_128(msgspec.msgpack.encode(batch.schema.to_list()))
    for column in batch.values():
        assert not isinstance(column, Jagged)
        if isinstance(column, list):
            digest.update(encode_column("blob", column)[0].data)
            continue
        if isinstance(column, Ragged):
            digest.update(np.ascontiguousarray(column.shapes, dtype="<i8").data)
        digest.update(as_bytes(column.values if isinstance(column, Ragged) else column).data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class References:
    """The blobs to which the N rows of one column refer."""

    names: Sequence[str]
    """Digests of the distinct blobs, as hexadecimal digits, in order of appearance."""
    index: np.ndarray
    """Position in `names` of each reference, row after row, int64 `[sum(counts)]`."""
    counts: np.ndarray
    """Number of references of each row, int64 `[N]`."""

    @staticmethod
    def of(names: Sequence[str], counts: Sequence[int] | np.ndarray) -> References:
        """names: digest of each reference, row after row."""
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        index = np.fromiter(map(number.__getitem__, names), np.int64, len(names))
        return References(list(number), index, np.asarray(counts, dtype=np.int64))

    @staticmethod
    def read(column: Ragged) -> References:
        """Return the references of a column of digests. Raises ValueError if a row has another shape than
        `[n, DIGEST_BYTES]`."""
        if len(column.shapes) and (column.shapes[:, 1] != DIGEST_BYTES).any():
            raise ValueError(f"digests: got rows of {column.shapes[:, 1].max()} bytes each, expected {DIGEST_BYTES}")
        text = column.values.numpy().tobytes().hex()
        size = 2 * DIGEST_BYTES
        return References.of([text[at : at + size] for at in range(0, len(text), size)], column.shapes[:, 0])

    def column(self) -> Ragged:
        """Return the column of digests, from which `read` makes these references."""
        digests = np.frombuffer(bytes.fromhex("".join(self.names)), np.uint8).reshape(-1, DIGEST_BYTES)
        shapes = np.stack((self.counts, np.full_like(self.counts, DIGEST_BYTES)), axis=1)
        return Ragged(torch.from_numpy(digests[self.index].reshape(-1)), shapes)


@dataclass(frozen=True, slots=True)
class BlobRows:
    """The blobs to which rows refer, each read once."""

    blobs: Batch
    """The parts that were read, with one row for each distinct blob."""
    references: References

    def of(self, row: int) -> np.ndarray:
        """Return the positions in `blobs` of the blobs of one row, in the row's order, int64."""
        end = int(self.references.counts[: row + 1].sum())
        return self.references.index[end - int(self.references.counts[row]) : end]


def references_of(field: Field, value: Any) -> tuple[References, dict[str, Blob]]:
    """Return the references of a field's rows, and the blobs among them by name.

    value: for each row, a list of blobs; or a column of digests, as a reader gets it, for blobs that are stored. Raises
    ValueError for anything else.
    """
    if isinstance(value, Ragged):
        return References.read(value), {}
    declared, blobs = Schema(field.parts), dict[str, Blob]()
    names: list[str] = []
    counts: list[int] = []
    _name_all({id(item): item for listed in value for item in listed if isinstance(item, Blob)}.values())
    for row, listed in enumerate(value):
        wrong = next((item for item in listed if not isinstance(item, Blob)), None)
        if wrong is not None:
            raise ValueError(f"field {field.name!r}, row {row}: got a {type(wrong).__name__}, expected a list of Blobs")
        for blob in listed:
            if blob.name not in blobs and blob.batch.schema != declared:  # The digest covers the declaration, too.
                raise ValueError(f"field {field.name!r}, row {row}: got a blob of other parts than {list(declared)}")
            blobs[blob.name] = blob
            names.append(blob.name)
        counts.append(len(listed))
    return References.of(names, counts), blobs


def _name_all(blobs: Iterable[Blob]) -> None:
    """Compute the digests that blobs lack. xxhash leaves other threads the interpreter meanwhile."""
    unnamed = [blob for blob in blobs if not blob._name]
    columns = [column for blob in unnamed for column in blob.batch.values()]
    tensors = [column.values if isinstance(column, Ragged) else column for column in columns]
    if sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)) >= THREADED_BYTES:
        for call in run_in_threads([blob.named for blob in unnamed], _THREADS):
            call.result()
