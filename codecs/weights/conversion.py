"""`convert` changes the dtype of weights that are sent; nothing else on their way to the engines changes their bytes.

Trainers keep float32 weights, and engines that compute in bfloat16 keep bfloat16. So weights are rounded before they
are packed into buckets. Checksums and digests are taken afterwards: they are those of the bytes that engines keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

WIRE_PAIRS = frozenset({(torch.float32, torch.bfloat16)})
"""Pairs of a trainer's and an engine's dtype for which the engine's is sent. Otherwise the trainer's is sent, and the
engine converts it when it loads it."""
PAIRS = WIRE_PAIRS | {
    (torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.bfloat16, torch.float16)
}  # fmt: skip
"""Pairs that `convert` accepts. Values are rounded to the nearest, ties to even, as by engines. Those that are not in
`WIRE_PAIRS` occur in exports and merged adapters."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer of each number of bytes."""
_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


def wire_dtype(own: torch.dtype, engine: torch.dtype) -> torch.dtype:
    """Return the dtype in which a weight is sent. own: the trainer's dtype. engine: that of the engines."""
    return engine if (own, engine) in WIRE_PAIRS else own


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor whose elements are integers with the same bits. Torch copies many bfloat16 tensors on a
    GPU by way of float32, which changes the bits of NaN, and copies integers as they are."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def convert(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor of `sources` into that of `targets`, which has its shape, converted to the target's dtype. On a
    GPU the copies are only queued. Raises ValueError for a pair of dtypes that is not in `PAIRS`."""
    into: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if source.dtype == target.dtype:
                target, source = as_integers(target), as_integers(source)
            elif (source.dtype, target.dtype) not in PAIRS:
                raise ValueError(f"weights: got {source.dtype}, expected a dtype that can be sent as {target.dtype}")
            into.append(target)
            given.append(source)
        if into:
            _copy_all(into, given)


def converted(weight: torch.Tensor, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return a weight in `dtype` on `device`; the tensor itself if it has both.

    device: None for that of the weight. A tensor that was converted is contiguous.
    """
    if weight.dtype == dtype:
        return weight.to(device or weight.device)
    target = torch.empty(weight.shape, dtype=dtype, device=device or weight.device)
    convert([target], [weight])
    return target
