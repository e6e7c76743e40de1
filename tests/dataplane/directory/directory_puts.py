"""Puts for tests of the pure directory: reserve and commit without a store."""

from __future__ import annotations

import numpy as np
import torch

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.directory.block_table import FreedBlock, Reservation
from headrace.dataplane.directory.calls import Grouping, PutRows, schema_id
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.meta import KVBatchMeta

SCHEMA = Schema(
    [
        Field(name="ids", kind=Kind.PER_TOKEN, dtype=torch.int32),
        Field(name="logp", kind=Kind.PER_TOKEN, dtype=torch.float32),
        Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32),
    ]
)
GROUP = 2


def make_put(keys: list[str], fields: tuple[str, ...], lengths: list[int] | None = None, **options: object) -> PutRows:
    """A put of blocks of at most 3 rows, 64 bytes per row."""
    sizes = [3] * (len(keys) // 3) + ([len(keys) % 3] if len(keys) % 3 else [])
    layouts = tuple(BlockLayout(fields, n, 0, (64 * n, *[0] * len(fields))) for n in sizes)
    tokens = any(SCHEMA[name].kind is Kind.PER_TOKEN for name in fields)
    given = np.array(lengths if lengths is not None else [5] * len(keys))
    base: dict = {"versions": None, "groups": None, "tags": {}, "replace": False, "writer": "w"} | options
    base["groups"] = Grouping.of(keys, base["groups"])
    return PutRows(
        "p", keys, fields, lengths=given if tokens else None, layouts=layouts, schema_id=schema_id(SCHEMA), **base
    )


def put(directory: Directory, *arguments: object, now: float = 0.0, **options: object) -> KVBatchMeta:
    made = make_put(*arguments, **options)  # type: ignore[arg-type]
    reservation = directory.reserve(made, now)
    assert reservation is not None
    return commit(directory, reservation, made)[0]


def commit(directory: Directory, reservation: Reservation, put: PutRows) -> tuple[KVBatchMeta, list[FreedBlock]]:
    committed, freed = directory.commit(reservation.reservation_id, put, lambda ids, _: [b"at"] * len(ids))
    return committed.receipt(put, SCHEMA, 0), freed
