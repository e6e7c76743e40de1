"""Defines receipts: the keys and locations of rows, with which a process reads the rows straight from the store."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash

from ..codecs.blocks import BlockLayout
from ..codecs.gather import RowSource
from ..codecs.integers import distinct
from ..codecs.schema import Field, Kind, Schema
from ..codecs.shared_rows import SharedRows
from .compact import (
    int_parts,
    ints_of,
    pack_keys,
    pack_source,
    pack_tag,
    plain_strings,
    unpack_keys,
    unpack_source,
    unpack_tag,
)
from .errors import InvalidArgument, LeaseLost

POSITION = "position"
"""Name of the tag (here an integer attached to each row) that holds a row's position in the prompt stream; the samplers
`in_order` and `windowed` follow it."""
Tags: TypeAlias = "Mapping[str, np.ndarray | Sequence[str] | Sequence[float]]"
"""Type of tags: name -> a number or a string for each row, `[N]`."""
_FORMAT = "receipt6"
_SUM_BYTES = 8
"""Number of bytes of the xxh3 checksum with which an encoded receipt begins."""
_FIELD_KEYS = ("name", "kind", "dtype", "trailing", "pad_value", "ndim", "shared", "parts")


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Reference to one immutable block (a group of rows stored together) in the store."""

    block_id: int
    """Id of the block, assigned by the directory (the metadata service): unique in the run and never reused."""
    location: bytes
    """Address of the block, which only the store can interpret."""
    layout: BlockLayout


class Hold(Protocol):
    """One lease of a client in this process, which the receipts of its rows share. When it is garbage-collected, its
    client gives the rows back that are left."""

    lease_id: int
    left: dict[str, int]
    """Generation of each row that is neither released nor cleared, by its key."""

    def hand_over(self) -> None:
        """Keep the rows leased when this hold is garbage-collected."""
        ...

    def end(self, part: KVBatchMeta, error: BaseException | None) -> None:
        """Release rows at the end of a `with`: as done, or for retry after `error`."""
        ...

    async def end_async(self, part: KVBatchMeta, error: BaseException | None) -> None:
        """Release rows as `end` does, for a receipt of an asyncio client."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KVBatchMeta:
    """Receipt for N rows: their keys and locations, without their content, so that any holder can read them. Frozen;
    returned by put, claim and lookup.

    A `get` with a receipt reads the rows' bytes without a call to the directory. Its methods do not change it; they
    return new receipts. Receipts are compared by identity, and travel between processes by pickle or by `to_bytes` /
    `from_bytes` (about 20 bytes per row).

    The receipt of a claim is a context manager (`async with` for an asyncio client). At the end, its rows that were not
    released yet are released: as done, or for retry after an exception. If the receipt and all receipts made of it are
    garbage-collected before that, the rows are given back for retry. A receipt that was pickled or encoded, or was
    alive when its process forked, may be in use elsewhere, so its rows then stay leased until they are released or its
    client ends.
    """

    partition: str
    keys: tuple[str, ...]
    """Ids of the N rows, `{prompt_uid}.{sample}`; a key may repeat."""
    fields: tuple[str, ...]
    """Names of the fields that this receipt can read."""
    lengths: np.ndarray
    """Number of tokens of each row, int64 `[N]`; 0 for rows without PER_TOKEN fields."""
    versions: np.ndarray
    """Policy version (version of the weights) that produced each row, int64 `[N]`; -1 when the producer named none."""
    groups: np.ndarray
    """Group number of each row, int64 `[N]`: the rows of one prompt form a group, and its number is unique in the
    directory."""
    tags: Mapping[str, np.ndarray]
    """Tags of the rows: name -> a number or a text for each row, numpy array `[N]` (dtype object for texts), for
    filtering and balancing rows without reading them. A tag is included only when every row of the receipt has it."""
    blocks: tuple[BlockRef, ...]
    """Blocks that hold the rows; `sources` refer to them by their position here."""
    sources: tuple[RowSource, ...]
    """Locations of the N rows in `blocks`, one entry for each set of fields that were written together. Every name in
    `fields` is in exactly one entry."""
    lease_id: int = 0
    """Id of the lease (exclusive hold) that `claim` took on these rows; 0 when they were not claimed."""
    schema: Schema = field(kw_only=True)
    """Schema of the partition, so that readers need no other declaration."""
    plane_id: int = field(kw_only=True)
    """Random number of the data plane that issued the receipt (`StoreSpec.plane_id`). Clients of another data plane
    refuse the receipt."""
    generations: np.ndarray = field(kw_only=True)
    """Number that each row got when it was created, int64 `[N]`. It tells a row from a later row with the same key."""
    holds: tuple[Hold, ...] = field(default=(), kw_only=True, repr=False)
    """This process's holds on the rows of claims that this receipt is made of. They do not travel."""

    def __enter__(self) -> KVBatchMeta:
        """Return this receipt. Raises InvalidArgument if it is not made of receipts that `claim` returned here, and
        LeaseLost if all of its rows were released or cleared before."""
        if not self.holds:
            raise InvalidArgument("with: the receipt holds no rows in this process, expected a receipt from claim")
        if self.keys and not self._held():
            message = "with: the receipt's rows were released or cleared before, expected a receipt that holds rows"
            raise LeaseLost(message, partition=self.partition, keys=self.keys)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hold, part in self._held():
            hold.end(part, error)

    async def __aenter__(self) -> KVBatchMeta:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for hold, part in self._held():
            await hold.end_async(part, error)

    def _held(self) -> list[tuple[Hold, KVBatchMeta]]:
        """Return for each hold the part of this receipt whose rows this process has not released yet."""
        rows = [[i for i, key in enumerate(self.keys) if key in hold.left] for hold in self.holds]
        return [
            (hold, replace(self.select(index), lease_id=hold.lease_id))
            for hold, index in zip(self.holds, rows, strict=True)
            if index
        ]

    def __copy__(self) -> KVBatchMeta:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KVBatchMeta:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return KVBatchMeta.from_bytes, (self.to_bytes(),)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.keys)

    def select(self, indices: Sequence[int] | np.ndarray) -> KVBatchMeta:
        """Return a receipt for the rows at `indices`: int `[M]`, repeats allowed. It has the keys and locations of
        these rows in that order, and only the blocks that hold them.

        Raises IndexError when an index is out of range, and ValueError for anything but one dimension of integers (use
        `where` for masks).
        """
        index = np.asarray(indices)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(
                f"select: got {index.dtype} {list(index.shape)}, expected 1-D integers; `where` takes masks"
            )
        index = index.astype(np.int64)
        picked = [(source, source.block[index]) for source in self.sources]
        used = distinct(np.concatenate([block for _, block in picked])) if picked else np.empty(0, np.int64)
        return replace(
            self,
            keys=tuple(self.keys[i] for i in index.tolist()),
            lengths=self.lengths[index],
            versions=self.versions[index],
            groups=self.groups[index],
            generations=self.generations[index],
            tags={name: values[index] for name, values in self.tags.items()},
            blocks=tuple(self.blocks[i] for i in used.tolist()),
            sources=tuple(
                RowSource(
                    source.fields,
                    np.searchsorted(used, block).astype(np.int32),
                    source.row[index],
                    source.start[index],
                )
                for source, block in picked
            ),
        )

    def where(self, mask: np.ndarray) -> KVBatchMeta:
        """Return a receipt (keys and locations, without content) for the rows at which `mask` is true, in order. mask:
        bool `[N]`, such as `meta.tags["source"] == "math"`. Raises ValueError for any other array."""
        mask = np.asarray(mask)
        if mask.dtype != np.bool_ or mask.shape != (len(self),):
            raise ValueError(f"where: got {mask.dtype} {list(mask.shape)}, expected a bool mask of {len(self)} rows")
        return self.select(np.flatnonzero(mask))

    def split(self, parts: int | Sequence[int]) -> list[KVBatchMeta]:
        """Split this receipt into several receipts for consecutive rows. parts: the number of receipts, or a list of
        their numbers of rows, which must sum to N. Given their number, the receipts differ by at most one row. Raises
        ValueError for other numbers."""
        if isinstance(parts, int):
            if parts < 1:
                raise ValueError(f"split: got {parts} parts, expected at least 1")
            sizes = [len(chunk) for chunk in np.array_split(np.arange(len(self)), parts)]
        else:
            sizes = [int(size) for size in parts]
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"split: sizes {sizes} sum to {sum(sizes)}, expected {len(self)} rows")
        ends = np.cumsum(sizes)
        return [self.select(np.arange(end - size, end)) for size, end in zip(sizes, ends, strict=True)]

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """Return a receipt for the rows of this receipt followed by those of `others`.

        If all receipts have the same lease, the result keeps it. Otherwise the result has no lease, and the receipts
        that `claim` returned must be released instead of it. Raises ValueError unless all receipts have the same data
        plane, partition, fields and tags. Their schemas must also be the same, except for fields that were added to the
        partition between two receipts.
        """
        metas = (self, *others)
        for other in others:
            for name in ("plane_id", "partition"):
                if getattr(other, name) != getattr(self, name):
                    raise ValueError(f"concat: the receipts differ in {name}")
            for name in ("fields", "tags"):
                if set(getattr(other, name)) != set(getattr(self, name)):
                    raise ValueError(
                        f"concat: got {name} {list(getattr(other, name))}, expected {list(getattr(self, name))}"
                    )
        schema = _joint_schema("concat", metas)
        blocks, maps = _merge_blocks(metas)
        return replace(
            self,
            schema=schema,
            keys=tuple(key for meta in metas for key in meta.keys),
            lengths=np.concatenate([meta.lengths for meta in metas]),
            versions=np.concatenate([meta.versions for meta in metas]),
            groups=np.concatenate([meta.groups for meta in metas]),
            generations=np.concatenate([meta.generations for meta in metas]),
            tags={name: np.concatenate([meta.tags[name] for meta in metas]) for name in self.tags},
            blocks=blocks,
            sources=_concat_sources(metas, maps),
            lease_id=self.lease_id if all(meta.lease_id == self.lease_id for meta in others) else 0,
            holds=_joint_holds(metas),
        )

    def merge_fields(self, other: KVBatchMeta) -> KVBatchMeta:
        """Return a receipt for these rows that gives access to the fields of this receipt and of `other`. Both must be
        for the same rows.

        A field or tag that both receipts have is taken from `other`, the later write. Raises ValueError unless both
        have the same keys in the same order, from one partition of one data plane, and agree in the rows' lengths.
        """
        if (self.plane_id, self.partition, self.keys) != (other.plane_id, other.partition, other.keys):
            raise ValueError("merge_fields: the receipts differ in data plane, keys or the order of keys")
        kept = tuple(name for name in self.fields if name not in set(other.fields))
        lengths = self.lengths
        if any(other.schema[name].kind is Kind.PER_TOKEN for name in other.fields):
            if any(self.schema[name].kind is Kind.PER_TOKEN for name in kept) and (lengths != other.lengths).any():
                raise ValueError("merge_fields: the receipts differ in the rows' lengths")
            lengths = other.lengths
        left = replace(self, fields=kept, sources=narrow_sources(self.sources, kept))
        blocks, maps = _merge_blocks((left, other))
        sources = [_remap(source, maps[i]) for i, meta in enumerate((left, other)) for source in meta.sources]
        return replace(
            left,
            schema=_joint_schema("merge_fields", (self, other)),
            fields=kept + other.fields,
            lengths=lengths,
            tags={**self.tags, **other.tags},
            blocks=blocks,
            sources=tuple(sources),
            holds=_joint_holds((self, other)),
        )

    def with_tags(self, **tags: np.ndarray | Sequence[str] | Sequence[float]) -> KVBatchMeta:
        """Return a copy of this receipt with `tags` (name -> a number or a string for each row) added or replaced. The
        tags are not sent to the directory (the metadata service). Raises ValueError unless each tag is one number, bool
        or string for each row."""
        return replace(self, tags={**self.tags, **check_tags(tags, len(self))})

    def to_bytes(self) -> bytes:
        """Encode the receipt in about 20 bytes per row: an xxh3 checksum, then msgpack with packed integer columns. The
        garbage collection of this receipt gives no rows back any more, as others can use the bytes."""
        for hold in self.holds:
            hold.hand_over()
        layouts = [ref.layout for ref in self.blocks]
        field_sets = list(dict.fromkeys(layout.fields for layout in layouts))
        numbers = {name: number for number, name in enumerate(self.schema)}
        body = msgspec.msgpack.encode(
            [
                _FORMAT,
                self.plane_id,
                self.partition,
                pack_keys(self.keys, squeeze=True),
                [numbers[name] for name in self.fields],
                [int_parts(column) for column in (self.lengths, self.versions, self.groups, self.generations)],
                [[name, values.dtype.str, pack_tag(values)] for name, values in self.tags.items()],
                [[numbers[name] for name in names] for names in field_sets],
                [
                    [
                        ref.block_id,
                        ref.location,
                        field_sets.index(at.fields),
                        at.num_rows,
                        at.num_tokens,
                        at.part_bytes,
                        None if at.shared is None else astuple(at.shared),
                    ]
                    for ref, at in zip(self.blocks, layouts, strict=True)
                ],
                [pack_source(source, self.lengths, numbers) for source in self.sources],
                self.lease_id,
                pack_schema(self.schema),
            ]
        )
        return xxhash.xxh3_64_digest(body) + body

    @staticmethod
    def from_bytes(data: bytes) -> KVBatchMeta:
        """Decode a receipt that `to_bytes` encoded. Raises ValueError for other bytes and for damaged ones."""
        body = data[_SUM_BYTES:]
        if len(data) < _SUM_BYTES or xxhash.xxh3_64_digest(body) != data[:_SUM_BYTES]:
            raise ValueError(f"these {len(data)} bytes are not a receipt, or are damaged: their checksum is wrong")
        try:
            return _from_body(body)
        except (ValueError, TypeError, LookupError, AttributeError, msgspec.MsgspecError) as error:
            raise ValueError(f"these {len(data)} bytes are not a receipt of format {_FORMAT}: {error}") from error


def _from_body(body: bytes) -> KVBatchMeta:
    """Decode the bytes of a receipt after its checksum. Raises one of several errors for bytes that are no receipt."""
    items = msgspec.msgpack.decode(body)
    if items[0] != _FORMAT:
        raise ValueError(f"their format is {items[0]!r}")
    _, plane_id, partition, keys, fields, columns, tags, sets, blocks, sources, lease, schema = items
    lengths, versions, groups, generations = map(ints_of, columns)
    declared = unpack_schema(schema)
    names_of = tuple(declared)
    field_sets = [tuple(names_of[number] for number in numbers) for numbers in sets]
    return KVBatchMeta(
        partition,
        tuple(unpack_keys(keys)),
        tuple(names_of[number] for number in fields),
        lengths,
        versions,
        groups,
        {name: unpack_tag(values, np.dtype(dtype)) for name, dtype, values in tags},
        tuple(
            BlockRef(
                block_id, location, BlockLayout(field_sets[names], rows, tokens, tuple(part_bytes), _shared(groups))
            )
            for block_id, location, names, rows, tokens, part_bytes, groups in blocks
        ),
        tuple(unpack_source(parts, lengths, names_of) for parts in sources),
        lease,
        schema=declared,
        plane_id=plane_id,
        generations=generations,
    )


@functools.lru_cache(maxsize=64)
def pack_schema(schema: Schema) -> bytes:
    """Encode a schema. The bytes of one that is encoded again and again are kept."""
    return msgspec.msgpack.encode([[item.to_dict()[key] for key in _FIELD_KEYS] for item in schema.values()])


@functools.lru_cache(maxsize=64)
def unpack_schema(data: bytes) -> Schema:
    """Decode the result of `pack_schema`. All receipts of a partition have the same bytes here, so they are decoded
    once."""
    items = msgspec.msgpack.decode(data)
    return Schema(Field.from_dict(dict(zip(_FIELD_KEYS, item, strict=True))) for item in items)


def _shared(groups: list[list[Any]] | None) -> SharedRows | None:
    return None if groups is None else SharedRows(*map(tuple, groups))


def check_tags(tags: Tags, num_rows: int) -> dict[str, np.ndarray]:
    """Return `tags` as numpy arrays `[num_rows]` of bool, integers or floats, or of dtype object for texts (str).

    Raises ValueError unless each tag is one number, bool or string for each row. Texts may be a list, or an array of
    dtype U or object.
    """
    checked = {}
    for name, values in tags.items():
        try:
            array = _tag_column(name, values)
        except (TypeError, OverflowError, RuntimeError) as error:  # These are errors of numpy and torch.
            raise ValueError(
                f"tag {name!r}: got a {type(values).__name__}, expected one number or string for each of {num_rows} "
                f"rows ({error})"
            ) from None
        is_column = array.dtype.kind in "biufO" and array.shape == (num_rows,)
        if not is_column or array.dtype.kind == "O" and any(type(item) is not str for item in array.tolist()):
            raise ValueError(
                f"tag {name!r}: got {array.dtype} {list(array.shape)}, "
                f"expected one number or string for each of {num_rows} rows"
            )
        checked[name] = array
    return checked


def _tag_column(name: str, values: Any) -> np.ndarray:
    """Return the values of a tag as an array, of dtype object only if they are one dimension of str. Raises ValueError
    for strings among other values, and for strings that are not valid Unicode."""
    if isinstance(values, list | tuple):
        holds_text = any(isinstance(item, str) for item in values)
    else:
        values = np.asarray(values)
        holds_text = values.ndim == 1 and values.dtype.kind in "UO"
    if not holds_text:
        return np.asarray(values)
    items = plain_strings(values)
    for item in items:
        if type(item) is not str:
            raise ValueError(f"tag {name!r}: got {item!r} among strings, expected a string for each row")
    try:
        "".join(items).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"tag {name!r}: got {error.object[error.start]!r}, expected valid Unicode text") from None
    column = np.empty(len(items), dtype=object)
    column[:] = items
    return column


def tag_type(dtype: np.dtype) -> str:
    """Return the type of a tag's values for error messages: `text`, or the name of the dtype."""
    return "text" if dtype.kind == "O" else str(dtype)


def narrow_sources(sources: Sequence[RowSource], fields: Sequence[str]) -> tuple[RowSource, ...]:
    """Return the sources (locations of rows in blocks) restricted to the wanted `fields`. Sources without any of these
    fields are left out."""
    wanted = set(fields)
    kept = []
    for source in sources:
        names = tuple(name for name in source.fields if name in wanted)
        if names:
            kept.append(RowSource(names, source.block, source.row, source.start))
    return tuple(kept)


def _joint_schema(op: str, metas: Sequence[KVBatchMeta]) -> Schema:
    """Return the schema of the receipt that was issued last. It has the fields of the other receipts, and fields that
    were added to the partition since then. Raises ValueError when the schemas differ in another way. op: name of the
    operation for the error."""
    newest = max((meta.schema for meta in metas), key=len)
    for meta in metas:
        if any(newest.get(name) != field for name, field in meta.schema.items()):
            raise ValueError(f"{op}: the receipts differ in schema")
    return newest


def _joint_holds(metas: Sequence[KVBatchMeta]) -> tuple[Hold, ...]:
    return tuple(dict.fromkeys(hold for meta in metas for hold in meta.holds))


def _merge_blocks(metas: Sequence[KVBatchMeta]) -> tuple[tuple[BlockRef, ...], list[np.ndarray]]:
    """Merge the block lists of several receipts. Returns the blocks without duplicates and, for each receipt, an int32
    array that maps its block numbers to positions in the merged list."""
    blocks: dict[int, BlockRef] = {}
    number: dict[int, int] = {}
    for meta in metas:
        for ref in meta.blocks:
            blocks.setdefault(ref.block_id, ref)
            number.setdefault(ref.block_id, len(number))
    maps = [np.array([number[ref.block_id] for ref in meta.blocks], dtype=np.int32) for meta in metas]
    return tuple(blocks.values()), maps


def _remap(source: RowSource, block_map: np.ndarray) -> RowSource:
    return RowSource(source.fields, block_map[source.block], source.row, source.start)


def _concat_sources(metas: Sequence[KVBatchMeta], maps: Sequence[np.ndarray]) -> tuple[RowSource, ...]:
    """Concatenate the sources of several receipts. maps: for each receipt, its block numbers in the merged list. Fields
    that share a source in every receipt share one in the result; each other field gets a separate source."""
    source_of = [{name: source for source in meta.sources for name in source.fields} for meta in metas]
    sets: dict[tuple[int, ...], list[str]] = {}
    for name in metas[0].fields:
        sets.setdefault(tuple(id(of[name]) for of in source_of), []).append(name)
    joined = []
    for names in sets.values():
        parts = [_remap(of[names[0]], block_map) for of, block_map in zip(source_of, maps, strict=True)]
        joined.append(
            RowSource(
                tuple(names),
                np.concatenate([part.block for part in parts]),
                np.concatenate([part.row for part in parts]),
                np.concatenate([part.start for part in parts]),
            )
        )
    return tuple(joined)
