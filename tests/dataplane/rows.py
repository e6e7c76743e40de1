"""Rows whose every byte follows from their key, so that any process can check what it read."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.codecs.batch import Batch
from headrace.codecs.jagged import unpack
from headrace.codecs.schema import Field, Kind, Schema

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
BYTES = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, trailing=(100_000,))])
"""100 kB per row."""
FIRST = ("ids", "mask", "routes", "reward", "image", "info")
"""What a rollout writes."""
LATER = ("logp", "advantage")
"""What a train worker adds."""


def fresh_run_id() -> str:
    """A run id by which the end of the tests finds what they left behind."""
    return f"test{os.getpid()}-{uuid.uuid4().hex[:8]}"


def length_of(key: str) -> int:
    """Tokens of a row: 0 for one key in eight."""
    seed = zlib.crc32(key.encode())
    return 0 if seed % 8 == 0 else 1 + seed % 37


def row(key: str) -> dict[str, Any]:
    """All fields of one row."""
    generator = np.random.default_rng(zlib.crc32(key.encode()))
    tokens = length_of(key)
    return {
        "ids": torch.from_numpy(generator.integers(-(2**31), 2**31, tokens, dtype=np.int32)),
        "mask": torch.from_numpy(generator.random(tokens) < 0.5),
        "routes": torch.from_numpy(generator.integers(-128, 128, (tokens, 2, 3), dtype=np.int8)),
        "reward": torch.tensor(generator.random(), dtype=torch.float32),
        "image": torch.from_numpy(generator.integers(0, 256, generator.integers(0, 5, 2), dtype=np.uint8)),
        "info": {"key": key, "text": "Zürich \u2603", "turns": [1, None, 2.5]},
        "logp": torch.from_numpy(generator.standard_normal(tokens, dtype=np.float32)),
        "advantage": torch.from_numpy(generator.standard_normal(2, dtype=np.float32)).to(torch.bfloat16),
    }


def columns(keys: Sequence[str], fields: Sequence[str] = FIRST) -> dict[str, list[Any] | torch.Tensor]:
    """What to put for `keys`: per field the rows' values."""
    rows = [row(key) for key in keys]
    found: dict[str, list[Any] | torch.Tensor] = {}
    for name in fields:
        values = [row[name] for row in rows]
        stacked = SCHEMA[name].kind is Kind.PER_SAMPLE and values
        found[name] = torch.stack(values) if stacked else values
    return found


def assert_rows(batch: Batch, keys: Sequence[str], fields: Sequence[str]) -> None:
    """`batch` holds exactly `fields` of `keys`, in this order, to the bit."""
    assert batch.num_rows == len(keys)
    assert set(batch) == set(fields), (list(batch), list(fields))
    found = unpack(batch)
    for name in fields:
        assert len(found[name]) == len(keys)
        for key, value in zip(keys, found[name], strict=True):
            expected = row(key)[name]
            if isinstance(expected, torch.Tensor):
                assert value.dtype == expected.dtype and value.shape == expected.shape, (key, name, value.shape)
                assert torch.equal(value, expected), (key, name)
            else:
                assert value == expected, (key, name)


def keys_of(prompts: range, samples: int = 4, prefix: str = "p") -> list[str]:
    """`{prefix}{prompt}.{sample}` for every sample of every prompt."""
    return [f"{prefix}{prompt}.{sample}" for prompt in prompts for sample in range(samples)]


def block_of(value: int, rows: int = 1) -> dict[str, torch.Tensor]:
    """Rows of `BYTES`, every byte `value`."""
    return {"x": torch.full((rows, 100_000), value, dtype=torch.uint8)}


def stop_after_first_block(store: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Let puts of this kind of store write one block, and then call `then`. Returns what undoes that."""
    store_class = type(store)
    name = "put_many" if hasattr(store, "put_many") else "put"
    real = getattr(store_class, name)

    def put(store: Any, first_block_id: int, *rest: Any) -> None:
        if name == "put_many":
            blocks, timeout_s = rest
            real(store, first_block_id, blocks[:1], timeout_s)
        else:
            real(store, first_block_id, *rest)
        then()

    setattr(store_class, name, put)
    return lambda: setattr(store_class, name, real)
