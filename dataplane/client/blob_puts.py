"""Prepares the blobs of a put, such as pictures: their references, and the blocks of those that are not stored yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...codecs.blobs import Blob, References, references_of
from ...codecs.blocks import EncodedBlock, encode_block
from ...codecs.schema import Schema
from ..blobs.row_references import holder_of_blobs
from ..directory.calls import BlobsOfRows, PutRows
from ..errors import BlobsMissing
from ..handle import DataPlaneHandle
from .arguments import Fields, mismatch


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
