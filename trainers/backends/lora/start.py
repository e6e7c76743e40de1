"""Computes the start values of an adapter's matrices, which do not depend on the mesh or the backend."""

from __future__ import annotations

import math

import torch
import xxhash


def start_value(name: str, shape: tuple[int, ...], init: str, seed: int, rank: int) -> torch.Tensor:
    """Return the start of a matrix A, float32 of `shape`, `[rank, in]` or `[experts, rank, in]`.

    name: name of its module in the Hugging Face model, which seeds the random numbers together with `seed`. init: as in
    `LoraConfig.init`; `kaiming` is what PEFT does (`torch.nn.init.kaiming_uniform_` with a = sqrt(5)). The matrix B
    starts with zeros.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) & (2**63 - 1))
    value = torch.empty(shape, dtype=torch.float32)
    if init == "gaussian":
        return value.normal_(0.0, 1.0 / rank, generator=generator)
    bound = 1.0 / math.sqrt(shape[-1])
    return value.uniform_(-bound, bound, generator=generator)
