"""Names the weights of a model with an adapter, and merges the adapter into them as they are streamed."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Mapping
from dataclasses import replace

import torch

from ....actors.adapters.spec import PREFIX, AdapterSpec, module_pairs
from ..weight_stream import SpreadWeight
from .layers import is_matrix


def wire_name(name: str) -> str:
    """Return the name in PEFT's format of the parameter `name` of an adapter."""
    return f"{PREFIX}{name}"


def own_name(name: str) -> str:
    """Return the parameter's name in the model of a tensor that is streamed under `name`."""
    return name.removeprefix(PREFIX)


def divided(
    weights: Iterable[SpreadWeight], *, whole: bool = False, rounded: Container[str] = ()
) -> tuple[list[SpreadWeight], list[SpreadWeight]]:
    """Divide the weights of a model into those of its adapter, under their names in PEFT's format, and those of the
    base. whole: true to have the matrices of the adapter in float32, as they are trained, and the weights of the
    base that are among `rounded`, too."""
    adapter, base = [], []
    for weight in weights:
        if is_matrix(weight.name):
            dtype = torch.float32 if whole else weight.dtype
            adapter.append(replace(weight, name=wire_name(weight.name), dtype=dtype))
        else:
            exact = whole and weight.name in rounded
            base.append(replace(weight, dtype=torch.float32) if exact else weight)
    return adapter, base


def merged(
    stream: Generator[tuple[str, torch.Tensor], None, None],
    spec: AdapterSpec,
    dtype_of: Callable[[str], torch.dtype | None],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the weights of a model with its adapter merged into them, on rank 0; other ranks get empty tensors.

    stream: the tensors of the adapter, under their names in PEFT's format, then those of the base. A sum is computed in
    float32 and rounded once, to `dtype_of(name)`; None stands for the dtype in which the weight is streamed.
    """
    adapter: dict[str, torch.Tensor] = {}
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]] | None = None
    try:
        for name, tensor in stream:
            if name.startswith(PREFIX):
                adapter[name] = tensor.to(torch.float32, copy=True)
                continue
            if pairs is None:
                whole = all(part.numel() for part in adapter.values())
                pairs = module_pairs(adapter, spec.rank) if whole else {}
            own = tensor.dtype
            first_second = pairs.get(name.rpartition(".")[0]) if name.endswith(".weight") else None
            if first_second is not None:
                first, second = first_second
                tensor = tensor.to(torch.float32) + spec.scaling * (second @ first)
            yield name, tensor.to(dtype_of(name) or own)
    finally:
        stream.close()
