"""Small data planes over the store `local` that the tests of the client open, and their rows."""

from __future__ import annotations

from typing import Any

import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.dataplane.factory import DataPlane
from headrace.testing.data_plane import open_plane

SCHEMA = Schema(
    [
        Field(name="ids", kind=Kind.PER_TOKEN, dtype=torch.int32),
        Field(name="score", kind=Kind.PER_SAMPLE, dtype=torch.float32),
        Field(name="blob", kind=Kind.PER_SAMPLE, dtype=torch.uint8, trailing=(100_000,)),
        Field(name="note", kind=Kind.OBJECT),
    ]
)


def small_plane(**options: Any) -> DataPlane:
    """A data plane of 1 MiB with four rows a block, unless `options` of `open_plane` say otherwise."""
    return open_plane(**{"capacity_mib": 1, "timeout_s": 5.0, "block_rows": 4, **options})


def ids(count: int, base: int = 0) -> list[torch.Tensor]:
    return [torch.arange(base + i, base + 2 * i, dtype=torch.int32) for i in range(count)]
