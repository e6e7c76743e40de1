"""Prepares a put: encodes its rows as blocks, and those of its blobs, such as pictures, that are not stored yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ...codecs.blobs import Blob, References, references_of
from ...codecs.blocks import BatchEncoder, EncodedBlock, encode_block
from ...codecs.schema import Schema
from ...codecs.shared_rows import shared_fields
from ..blobs.row_references import holder_of_blobs
from ..directory.calls import BlobsOfRows, Fence, Grouping, PutRows, schema_id
from ..errors import BlobsMissing
from ..handle import DataPlaneHandle
from ..meta import Tags, check_tags
from .arguments import Fields, as_versions, mismatch, packed
from .block_io import cut, rows_per_block


@dataclass(frozen=True, slots=True)
class BlobsOfField:
    """Blobs of one field of a put."""

    references: References
    blobs: Mapping[str, Blob]
    """The blobs that the caller has, by their digests."""


def split_blobs(
    partition: str, schema: Schema, fields: Fields, keys: Sequence[str]
) -> tuple[Fields, dict[str, BlobsOfField]]:
    """Return the fields of a put with digests in place of blobs, and the blobs by field. Raises SchemaMismatch for
    values that are no blobs of the schema."""
    found: dict[str, BlobsOfField] = {}
    digests = {}
    for name, field in schema.items():
        if field.parts and name in fields.keys():
            with mismatch(partition, keys):
                references, blobs = references_of(field, fields[name])
                found[name] = BlobsOfField(references, blobs)
                digests[name] = references.column()
    if not found:
        return fields, {}
    return {str(name): digests.get(str(name), fields[name]) for name in fields.keys()}, found


def with_references(put: PutRows, found: Mapping[str, BlobsOfField]) -> PutRows:
    """Return a put that says which blobs its rows refer to, and brings none."""
    if not found:
        return put
    blobs = [
        BlobsOfRows(name, one.references.names, one.references.index, one.references.counts)
        for name, one in found.items()
    ]
    return msgspec.structs.replace(put, blobs=tuple(blobs))


def carrying(
    handle: DataPlaneHandle, put: PutRows, found: Mapping[str, BlobsOfField], absent: Mapping[str, Collection[str]]
) -> tuple[PutRows, list[EncodedBlock]]:
    """Return a put that brings the blobs that are not stored, and their blocks. Each blob is a block, so that it is
    freed by itself.

    absent: digests of the blobs that are not stored, by field. Raises BlobsMissing naming those that the caller does
    not have.
    """
    described, blocks = [], []
    for refs in put.blobs:
        wanted, blobs = set(absent[refs.field]), found[refs.field].blobs
        if missing := [name for name in refs.names if name in wanted and name not in blobs]:
            message = f"field {refs.field!r}: {len(missing)} blobs are not stored, and the put has only their digests"
            raise BlobsMissing(message, op="put", partition=holder_of_blobs(put.partition, refs.field), keys=missing)
        carried = tuple(number for number, name in enumerate(refs.names) if name in wanted)
        own = [
            encode_block(
                blobs[refs.names[number]].batch, 0, 1, checksum=handle.verifies_blocks, seed=handle.store.plane_id
            )
            for number in carried
        ]
        described.append(msgspec.structs.replace(refs, carried=carried, layouts=tuple(block.layout for block in own)))
        blocks += own
    return msgspec.structs.replace(put, blobs=tuple(described)), blocks


def prepared(
    handle: DataPlaneHandle,
    writer: str,
    schema: Schema,
    partition: str,
    keys: list[str],
    fields: Fields,
    versions: int | np.ndarray | None,
    groups: list[str] | None,
    tags: Tags,
    replace: bool,
    fences: tuple[Fence, ...],
) -> tuple[PutRows, list[EncodedBlock], dict[str, BlobsOfField]]:
    """Return a description of the rows of a put, its blocks, and its blobs by field. A group is split over blocks only
    if it does not fit in one.

    writer: name of the client. fences: conditions on the rows. The other arguments are those of `DataPlaneClient.put`.
    Raises SchemaMismatch for rows that do not fit the schema or cannot be stored, and ValueError for other wrong
    arguments.
    """
    if groups is not None and len(groups) != len(keys):
        raise ValueError(f"groups: got {len(groups)} names, expected one for each of {len(keys)} keys")
    fields, found = split_blobs(partition, schema, fields, keys)
    batch = packed(partition, schema, fields, keys)
    grouping = Grouping.of(keys, groups)
    config, blocks = handle.config, []
    with mismatch(partition, keys):
        if keys:
            encoder = BatchEncoder(batch)
            sharing = grouping.index if shared_fields(batch) else None
            rows = rows_per_block(batch.num_rows, encoder.column_bytes, config.block_rows, sharing)
            checksum, seed = handle.verifies_blocks, handle.store.plane_id
            blocks = encoder.blocks(cut(grouping.index, rows), checksum=checksum, seed=seed, groups=sharing)
    put = PutRows(
        partition,
        keys,
        tuple(batch),
        batch.lengths,
        as_versions(versions, len(keys)),
        grouping,
        check_tags(tags, len(keys)),
        tuple(block.layout for block in blocks),
        replace,
        writer,
        schema_id(schema),
        fences,
    )
    return with_references(put, found), blocks, found
