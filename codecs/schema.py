"""Defines the schema of rows: the kind, dtype, trailing shape and pad value of each field."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# These are the dtypes that can be sent, by their names in messages.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    )
}


class Kind(enum.StrEnum):
    """Kind of a field: the shape of its value in one row."""

    PER_TOKEN = "per_token"
    """One value per token: a tensor `[L, *trailing]`. The row's length L is the same in all its PER_TOKEN fields."""
    PER_SAMPLE = "per_sample"
    """One value per row: a tensor `[*trailing]`."""
    RAGGED = "ragged"
    """A tensor per row, of any shape with a fixed number of dimensions (`ndim`), such as an image."""
    OBJECT = "object"
    """One object per row: a string, bytes, a number, None, or a list or dict of these, encoded as msgpack."""


@dataclass(frozen=True, slots=True)
class Field:
    """Declaration of one named field of the rows."""

    name: str
    kind: Kind
    dtype: torch.dtype | None = None
    """Type of the elements; None only for OBJECT."""
    trailing: tuple[int, ...] = ()
    """Shape of the value of one token (PER_TOKEN) or of one row (PER_SAMPLE); () for RAGGED and OBJECT."""
    pad_value: int | float | bool = 0
    """Value that `to_padded` writes after the last token of a row. Only padded tensors contain it; padding is never
    sent."""
    ndim: int = 1
    """Number of dimensions of one row, at least 1, for RAGGED only. Fields with a single number per row have the kind
    PER_SAMPLE."""
    shared: bool = False
    """True if leading tokens that rows of a group have in common are stored only once, for PER_TOKEN only. A put finds
    these tokens by comparing bytes, and readers get whole rows, so this changes only the number of bytes."""
    parts: tuple[Field, ...] = ()
    """Fields of the blobs, such as pictures, whose digests a row of this field lists; () for a field without blobs. See
    `blobs.blob_field`."""

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"field name: got {self.name!r}, expected a non-empty string")
        if not isinstance(self.kind, Kind):
            raise ValueError(f"field {self.name!r}: got kind {self.kind!r}, expected a Kind, such as Kind.PER_TOKEN")
        if (self.dtype is None) != (self.kind is Kind.OBJECT):
            raise ValueError(
                f"field {self.name!r}: dtype {self.dtype} does not fit kind {self.kind.value}; "
                "OBJECT fields have no dtype, all others need one"
            )
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise ValueError(f"field {self.name!r}: got dtype {self.dtype}, expected one of {', '.join(DTYPES)}")
        if self.trailing and self.kind in (Kind.RAGGED, Kind.OBJECT):
            raise ValueError(f"field {self.name!r}: kind {self.kind.value} takes no trailing shape")
        if self.shared and self.kind is not Kind.PER_TOKEN:
            raise ValueError(f"field {self.name!r}: only per_token fields share tokens, got kind {self.kind.value}")
        if not isinstance(self.trailing, tuple) or any(type(size) is not int or size < 0 for size in self.trailing):
            raise ValueError(f"field {self.name!r}: got trailing shape {self.trailing}, expected a tuple of sizes >= 0")
        if type(self.ndim) is not int or self.ndim < 1:
            raise ValueError(
                f"field {self.name!r}: got ndim {self.ndim}, expected at least 1; use per_sample for single numbers"
            )
        is_number = isinstance(self.pad_value, int | float)
        if not is_number or self.dtype is not None and not _holds(self.dtype, self.pad_value):
            raise ValueError(f"field {self.name!r}: pad value {self.pad_value!r} does not fit dtype {self.dtype}")
        if self.parts:
            self._check_parts()

    def _check_parts(self) -> None:
        if (self.kind, self.dtype, self.ndim) != (Kind.RAGGED, torch.uint8, 2):
            raise ValueError(f"field {self.name!r}: only ragged fields of uint8 with ndim=2 have parts; use blob_field")
        for part in Schema(self.parts).values():
            if part.kind is Kind.PER_TOKEN or part.parts:
                raise ValueError(
                    f"field {self.name!r}: part {part.name!r} is per_token or has parts, which no blob has"
                )

    @property
    def dtype_name(self) -> str | None:
        """Name of the dtype as encoded in messages between processes, such as `"float32"`; None for OBJECT."""
        return None if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def item_bytes(self) -> int:
        """Number of bytes of one token (PER_TOKEN), one row (PER_SAMPLE) or one element (RAGGED); 0 for OBJECT."""
        if self.dtype is None:
            return 0
        size = self.dtype.itemsize
        for extent in self.trailing:
            size *= extent
        return size

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind.value,
            "dtype": self.dtype_name,
            "trailing": list(self.trailing),
            "pad_value": self.pad_value,
            "ndim": self.ndim,
            "shared": self.shared,
            "parts": [part.to_dict() for part in self.parts],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Field:
        dtype = data["dtype"]
        return Field(
            name=data["name"],
            kind=Kind(data["kind"]),
            dtype=None if dtype is None else DTYPES[dtype],
            trailing=tuple(data["trailing"]),
            pad_value=data["pad_value"],
            ndim=data["ndim"],
            shared=data.get("shared", False),
            parts=tuple(Field.from_dict(part) for part in data.get("parts", ())),
        )


def _holds(dtype: torch.dtype, value: int | float | bool) -> bool:
    """Return whether `dtype` can represent `value`. Floats can be rounded, but must not overflow."""
    if dtype == torch.bool:
        return value in (0, 1)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return math.isfinite(value) and value == int(value) and limits.min <= value <= limits.max
    return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max


class Schema(Mapping[str, Field]):
    """Immutable, ordered mapping from field name to Field. It describes the rows of a partition (a named set of
    rows)."""

    __slots__ = ("_fields", "_hash")

    def __init__(self, fields: Iterable[Field]) -> None:
        self._fields: dict[str, Field] = {}
        self._hash: int | None = None
        if isinstance(fields, Mapping | Field | str) or not isinstance(fields, Iterable):
            raise ValueError(f"schema: got a {type(fields).__name__}, expected a list of Fields")
        for field in fields:
            if not isinstance(field, Field):
                raise ValueError(f"schema: got {field!r} in the list, expected Fields")
            if field.name in self._fields:
                raise ValueError(f"schema: field {field.name!r} is declared twice")
            self._fields[field.name] = field

    def __getitem__(self, name: str) -> Field:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; the schema has {', '.join(self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and list(self.values()) == list(other.values())

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._fields.values()))
        return self._hash

    def __repr__(self) -> str:
        return f"Schema({list(self._fields.values())!r})"

    def subset(self, names: Iterable[str]) -> Schema:
        """Return a schema of the named fields, in the order given. Raises KeyError for a name that is not declared."""
        return Schema(self[name] for name in names)

    def to_list(self) -> list[dict[str, Any]]:
        """Return the fields as plain dicts, for messages and manifests; `from_list` is the inverse."""
        return [field.to_dict() for field in self._fields.values()]

    @staticmethod
    def from_list(data: Iterable[Mapping[str, Any]]) -> Schema:
        return Schema(Field.from_dict(item) for item in data)
