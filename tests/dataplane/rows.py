"""What a rollout and a train worker write of the rows of `headrace.testing`, and rows of 100 kB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.codecs.schema import Field, Kind, Schema
from headrace.testing.data_plane import rows

BYTES = Schema([Field("x", Kind.PER_SAMPLE, torch.uint8, trailing=(100_000,))])
"""100 kB per row."""
FIRST = ("ids", "mask", "routes", "reward", "image", "info")
"""What a rollout writes."""
LATER = ("logp", "advantage")
"""What a train worker adds."""


def columns(keys: Sequence[str], fields: Sequence[str] = FIRST) -> dict[str, list[Any] | torch.Tensor]:
    """What to put for `keys`: per field the rows' values."""
    return rows(keys, fields)


def keys_of(prompts: range, samples: int = 4, prefix: str = "p") -> list[str]:
    """`{prefix}{prompt}.{sample}` for every sample of every prompt."""
    return [f"{prefix}{prompt}.{sample}" for prompt in prompts for sample in range(samples)]


def block_of(value: int, num_rows: int = 1) -> dict[str, torch.Tensor]:
    """Rows of `BYTES`, every byte `value`."""
    return {"x": torch.full((num_rows, 100_000), value, dtype=torch.uint8)}


def stop_after_first_block(store: Any, then: Callable[[], None]) -> Callable[[], None]:
    """Let puts of this kind of store write one block, and then call `then`. Returns what undoes that."""
    store_class = type(store)
    name = next(name for name in ("put_to", "put_many", "put") if hasattr(store, name))
    real = getattr(store_class, name)

    def put(store: Any, *arguments: Any) -> None:
        if name == "put":
            real(store, *arguments)
        else:
            *where, blocks, timeout_s = arguments
            real(store, *where, blocks[:1], timeout_s)
        then()

    setattr(store_class, name, put)
    return lambda: setattr(store_class, name, real)
