"""Describes a LoRA adapter and names its tensors as PEFT does.

LoRA (Hu et al. 2021, arXiv:2106.09685) keeps a matrix W of a model as it is, and adds the product of two small matrices
to it: `y = W x + (alpha / rank) B A x`, with A of `[rank, in]` and B of `[out, rank]`. The matrices A and B of all
layers are the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_norms: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors, before the name of the module in the Hugging Face model."""
PARTS = (".lora_A.weight", ".lora_B.weight")
"""Endings of the names of an adapter's tensors: the matrices A and B of a module."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Describes an adapter to engines, besides its tensors."""

    rank: int
    alpha: float
    base: str
    """Digest of the weights to which the adapter belongs (`base_digest`)."""

    @property
    def scaling(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Room for adapters in an engine."""

    rank: int
    """Largest rank of an adapter."""
    count: int
    """Number of versions that the engine can hold at the same time. Requests finish with the version with which they
    began, so that a version stays until the last of its requests has ended."""
    experts: bool = False
    """True if adapters of stacked experts come, too."""


def largest_numbers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the largest absolute number of each tensor, float `[N]`; NaN if a tensor has a NaN. The tensors are on one
    device, which reads all of them together."""
    return torch.stack(_norms(list(tensors), float("inf")))


def must_show(spec: AdapterSpec, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> bool:
    """Return whether the matrices of a module must change what an engine says that computes in `dtype`.

    pairs: the matrices A and B of one module or more. An engine adds their product to results of about 1. A sum in
    bfloat16 can be the same if a number of the product cannot exceed the dtype's precision, 0.8 %, although B is not
    zero.
    """
    first, second = (largest_numbers(matrices) for matrices in zip(*pairs, strict=True))
    largest = spec.scaling * spec.rank * float((first * second).max())
    return largest > torch.finfo(dtype).eps


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of the matrices A and B of a module, given its name in the Hugging Face model."""
    first, second = (f"{PREFIX}{module}{part}" for part in PARTS)
    return first, second


def module_pairs(
    named: Mapping[str, torch.Tensor], rank: int, modules: Iterable[str] | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the matrices A and B of each module, by the module's name in the Hugging Face model.

    named: all tensors of an adapter by their names in PEFT's format. modules: names of the modules that can have an
    adapter; None accepts all. Raises ValueError, which names the tensor, if a name has another form or names no such
    module, a module lacks one of its two matrices, or a matrix is not of this rank.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        part = next((part for part in PARTS if name.endswith(part)), None)
        if part is None or not name.startswith(PREFIX):
            raise ValueError(f"adapter: got a tensor {name!r}, expected names {PREFIX}MODULE{PARTS[0]} or {PARTS[1]}")
        found.setdefault(name[len(PREFIX) : -len(part)], {})[part] = tensor
    known = None if modules is None else set(modules)
    for module, parts in found.items():
        if known is not None and module not in known:
            raise ValueError(f"adapter: got matrices for {module!r}, which is no module of the model that can have any")
        for part, dim in zip(PARTS, (0, 1), strict=True):
            if part not in parts:
                raise ValueError(f"adapter: {PREFIX}{module}{part} was not sent")
            if parts[part].ndim != 2 or parts[part].shape[dim] != rank:
                raise ValueError(
                    f"adapter: {PREFIX}{module}{part} has shape {tuple(parts[part].shape)}, expected {rank}, the "
                    f"adapter's rank, in dimension {dim}"
                )
    return {module: (parts[PARTS[0]], parts[PARTS[1]]) for module, parts in found.items()}
