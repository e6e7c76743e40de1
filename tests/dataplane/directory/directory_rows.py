"""Puts and prompts in a pure directory without a store, and claims of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headrace.codecs.blocks import BlockLayout
from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.directory.block_table import FreedBlock, Reservation
from headrace.dataplane.directory.calls import ClaimRows, Grouping, PutRows, schema_id
from headrace.dataplane.directory.directory import Directory
from headrace.dataplane.directory.samplers import TaskConfig
from headrace.dataplane.meta import POSITION, KVBatchMeta

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


FIELDS = ("ids",)


def base36(number: int) -> str:
    return np.base_repr(number, 36).lower()


def keys_of(number: int) -> list[str]:
    """The rows of one prompt."""
    return [f"{base36(number)}.{sample}" for sample in range(GROUP)]


def placed(*numbers: int, rows: int = GROUP) -> dict[str, np.ndarray]:
    """The tag that says where these prompts stand in the stream, for `rows` rows of each."""
    return {POSITION: np.repeat(numbers, rows)}


def opened(sampler: str, *, first_prompt: int = 0, group_size: int = GROUP, **options: object) -> Directory:
    own = (sampler,) if ":" in sampler else ()
    directory = Directory(capacity_bytes=1 << 30, lease_s=1e9, reserve_s=5.0, samplers=own)
    tasks = (TaskConfig("a", sampler, dict(options), first_prompt), "b")
    directory.register("p", SCHEMA, tasks, group_size)
    return directory


def put_prompt(directory: Directory, number: int, version: int = 0) -> None:
    put(directory, keys_of(number), FIELDS, versions=np.full(GROUP, version), tags=placed(number))


def claim(directory: Directory, groups: int = 1, *, at_least: int | None = None, **options: Any) -> KVBatchMeta | None:
    """Claim up to `groups` prompts, and at least `at_least` of them (None: all)."""
    least = None if at_least is None else at_least * GROUP
    return directory.claim(ClaimRows("p", "a", FIELDS, groups * GROUP, True, at_least=least, **options), 0.0)


def taken(meta: KVBatchMeta | None) -> list[int]:
    """Numbers of the prompts claimed, in the receipt's order; of None, none."""
    return [] if meta is None else [int(key.rpartition(".")[0], 36) for key in meta.keys[::GROUP]]
