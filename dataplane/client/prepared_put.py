"""Prepares a put: packs its rows by the schema, and encodes them as blocks."""

from __future__ import annotations

import numpy as np

from ...codecs.blocks import BatchEncoder, EncodedBlock
from ...codecs.schema import Schema
from ...codecs.shared_rows import shared_fields
from ..directory.calls import Fence, Grouping, PutRows, schema_id
from ..handle import DataPlaneHandle
from ..meta import Tags, check_tags
from .arguments import Fields, as_versions, mismatch, packed
from .blob_puts import BlobsOfField, split_blobs, with_references
from .block_io import cut, rows_per_block


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
