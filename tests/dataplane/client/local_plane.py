"""Configuration and rows of the data planes over the store `local` that the tests of the client open."""

from __future__ import annotations

import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.config import DataPlaneConfig, StoreConfig

SCHEMA = Schema(
    [
        Field(name="ids", kind=Kind.PER_TOKEN, dtype=torch.int32),
        Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32),
        Field(name="blob", kind=Kind.PER_SAMPLE, dtype=torch.uint8, trailing=(100_000,)),
        Field(name="note", kind=Kind.OBJECT),
    ]
)


def config(**options: object) -> DataPlaneConfig:
    store = StoreConfig(kind="local", capacity_mib=1)
    return DataPlaneConfig(**{"store": store, "timeout_s": 5.0, "block_rows": 4} | options)  # type: ignore[arg-type]


def ids(count: int, base: int = 0) -> list[torch.Tensor]:
    return [torch.arange(base + i, base + 2 * i, dtype=torch.int32) for i in range(count)]
