"""A data plane in this process, and rows for it.

Every byte of a row follows from its key, so that reads can be checked.

with plane() as client:
    keys = ["p0.0", "p0.1"]
    client.put("train", keys, rows(keys))
    meta = client.claim("train", "train", list(SCHEMA), 2)
    assert_rows(client.get(meta), meta.keys)
"""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..codecs.batch import Batch
from ..codecs.jagged import unpack
from ..codecs.schema import Field, Kind, Schema
from ..dataplane.client.client import DataPlaneClient
from ..dataplane.config import DataPlaneConfig
from ..dataplane.factory import DataPlane, connect, open_data_plane

SCHEMA = Schema(
    [
        Field("ids", Kind.PER_TOKEN, torch.int32, pad_value=-1),
        Field("mask", Kind.PER_TOKEN, torch.bool),
        Field("routes", Kind.PER_TOKEN, torch.int8, trailing=(2, 3)),
        Field("reward", Kind.PER_SAMPLE, torch.float32),
        Field("image", Kind.RAGGED, torch.uint8, ndim=2),
        Field("info", Kind.OBJECT),
        Field("logp", Kind.PER_TOKEN, torch.float32),
        Field("advantage", Kind.PER_SAMPLE, torch.bfloat16, trailing=(2,)),
    ]
)
"""Fields of every kind. A rollout writes most of them; a train worker writes `logp` and `advantage`."""


def open_plane(store: str = "local", *, capacity_mib: int = 64, run_id: str = "", **settings: Any) -> DataPlane:
    """Open a data plane with its directory in this process. Use it as a context manager, or close it.

        with open_plane("shm", timeout_s=1.0) as plane, connect(plane.handle) as client:
            ...

    store: value of `store.kind`. capacity_mib: value of `store.capacity_mib`. run_id: id of the run; by default a new
    id that contains the number of the test process, so that its shared memory can be found. settings: other keys of
    `data_plane`. `timeout_s` is 10 seconds by default. Raises ValueError for a key that does not exist.
    """
    chosen = {"kind": store, "capacity_mib": capacity_mib}
    config = DataPlaneConfig.model_validate({"timeout_s": 10.0, **settings, "store": chosen})
    return open_data_plane(config, run_id=run_id or fresh_run_id(), in_process=True)


def fresh_run_id() -> str:
    """Return a new run id. At the end of the tests, it identifies files that this process left in /dev/shm."""
    return f"test{os.getpid()}-{uuid.uuid4().hex[:8]}"


@contextmanager
def plane(
    schema: Schema = SCHEMA,
    tasks: Sequence[str] = ("train",),
    *,
    partition: str = "train",
    group_size: int = 1,
    **settings: Any,
) -> Iterator[DataPlaneClient]:
    """Open a data plane in this process, and yield a client of it. The partition `partition` is registered.

        with plane() as client:
            client.put("train", ["a.0"], rows(["a.0"]))

    settings: see `open_plane`.
    """
    with open_plane(**settings) as opened, connect(opened.handle, name="test") as client:
        client.register(partition, schema, tasks, group_size=group_size)
        yield client


def rows(
    keys: Sequence[str], fields: Sequence[str] | None = None, schema: Schema = SCHEMA
) -> dict[str, list[Any] | torch.Tensor]:
    """Return columns to put for `keys`. The values of each field follow from the keys alone.

    A row has 0 to 37 tokens; one row in eight has none. fields: names of fields; all of the schema by default.

        client.put("train", keys, rows(keys, ["ids", "reward"]))
    """
    found: dict[str, list[Any] | torch.Tensor] = {}
    for name in tuple(schema) if fields is None else fields:
        values = [_value(schema[name], key) for key in keys]
        found[name] = torch.stack(values) if schema[name].kind is Kind.PER_SAMPLE and values else values
    return found


def assert_rows(
    batch: Batch, keys: Sequence[str], fields: Sequence[str] | None = None, schema: Schema = SCHEMA
) -> None:
    """Check that `batch` holds exactly the rows that `rows` makes for `keys` and `fields`, in order and bit for bit.

    Raises AssertionError with the key and the field that differ.

        assert_rows(client.get(meta), meta.keys)
    """
    fields = tuple(schema) if fields is None else fields
    assert batch.num_rows == len(keys)
    assert set(batch) == set(fields), (list(batch), list(fields))
    found = unpack(batch)
    for name in fields:
        assert len(found[name]) == len(keys)
        for key, value in zip(keys, found[name], strict=True):
            expected = _value(schema[name], key)
            if isinstance(expected, torch.Tensor):
                assert value.dtype == expected.dtype and value.shape == expected.shape, (key, name, value.shape)
                assert torch.equal(value, expected), (key, name)
            else:
                assert value == expected, (key, name)


def length_of(key: str) -> int:
    """Return the number of tokens that the row of `key` has in `rows`."""
    seed = zlib.crc32(key.encode())
    return 0 if seed % 8 == 0 else 1 + seed % 37


def _value(field: Field, key: str) -> Any:
    """Return the value of one field of one row."""
    dtype = field.dtype
    if dtype is None:  # A field without a dtype is of kind OBJECT.
        return {"key": key, "text": "Zürich \u2603", "turns": [1, None, 2.5]}
    generator = np.random.default_rng(zlib.crc32(f"{field.name} {key}".encode()))
    leading = {
        Kind.PER_TOKEN: (length_of(key),),
        Kind.RAGGED: tuple(generator.integers(0, 5, field.ndim).tolist()),
    }.get(field.kind, ())
    shape = (*leading, *field.trailing)
    if dtype is torch.bool:
        return torch.tensor(generator.random(shape) < 0.5)
    if dtype.is_floating_point:
        return torch.tensor(generator.standard_normal(shape), dtype=torch.float32).to(dtype)
    values = torch.empty(shape, dtype=dtype)
    data = bytearray(generator.bytes(values.nbytes))
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else values
