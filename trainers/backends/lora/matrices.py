"""Names the matrices of an adapter as PEFT does, and merges them into the weights of a model as they are streamed.

In training, the matrices of a linear layer are the parameters `LAYER.lora_A.weight` `[rank, in]` and `.lora_B.weight`
`[out, rank]`. Those of stacked experts are `EXPERTS.WEIGHT_lora_A` `[experts, rank, in]` and `EXPERTS.WEIGHT_lora_B`
`[experts, out, rank]`. PEFT numbers the rows of such an A by expert first, and the columns of B by rank first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable
from dataclasses import replace

import torch

from ....actors.adapters.spec import PREFIX, AdapterSpec
from ....codecs.weights.conversion import converted
from ..weight_stream import SpreadWeight

Stream = Generator[tuple[str, torch.Tensor], None, None]
_ENDINGS = {".lora_A.weight": ".weight", ".lora_B.weight": ".weight", "_lora_A": "", "_lora_B": ""}
"""Ending of the name of a matrix -> ending of the name of the weight to which it belongs."""


def is_matrix(name: str) -> bool:
    """Return whether the parameter `name` is a matrix of an adapter."""
    return name.endswith(tuple(_ENDINGS))


def target_of(name: str) -> tuple[str, str]:
    """Return the name of the weight to which the matrix `name` belongs, and which matrix it is, "A" or "B"."""
    ending = next(ending for ending in _ENDINGS if name.endswith(ending))
    return name.removesuffix(ending) + _ENDINGS[ending], ending.split("lora_")[1][0]


def wire_name(name: str) -> str:
    """Return the name in PEFT's format of the matrix `name`. PEFT wraps a module of stacked experts once for each of
    its weights, so that the names of all but the last, `down_proj`, have `base_layer` in them."""
    if name.endswith(".weight"):
        return f"{PREFIX}{name}"
    target, which = target_of(name)
    module, _, weight = target.rpartition(".")
    return f"{PREFIX}{module}{'' if weight == 'down_proj' else '.base_layer'}.lora_{which}.weight"


def wire_module(name: str) -> str:
    """Return the name of the module in PEFT's format to which the matrix `name` belongs."""
    return wire_name(name)[len(PREFIX) :].rsplit(".", 2)[0]


def to_wire(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole matrix `name` in PEFT's layout. Matrices of linear layers are returned as they are."""
    if tensor.ndim < 3:
        return tensor
    return (tensor if name.endswith("A") else tensor.permute(1, 2, 0)).reshape(_wire_shape(name, tensor.shape))


def from_wire(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the matrix `name` of `shape`, given in PEFT's layout. Raises ValueError if its size is another."""
    wanted = _wire_shape(name, shape)
    if tuple(tensor.shape) != wanted:
        raise ValueError(f"{wire_name(name)} has shape {tuple(tensor.shape)}, expected {wanted}")
    if len(shape) < 3 or name.endswith("A"):
        return tensor.reshape(shape)
    return tensor.reshape(shape[1], shape[2], shape[0]).permute(2, 0, 1)


def _wire_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 3:
        return tuple(shape)
    experts, rows, columns = shape
    return (experts * rows, columns) if name.endswith("A") else (rows, columns * experts)


def divided(
    weights: Iterable[SpreadWeight], *, whole: bool = False, rounded: Container[str] = ()
) -> tuple[list[SpreadWeight], list[SpreadWeight]]:
    """Divide the weights of a model into those of its adapter and those of the base. whole: true to have the matrices
    of the adapter in float32, as they are trained, and the weights of the base that are among `rounded`, too."""
    adapter, base = [], []
    for weight in weights:
        if is_matrix(weight.name):
            adapter.append(replace(weight, dtype=torch.float32) if whole else weight)
        else:
            exact = whole and weight.name in rounded
            base.append(replace(weight, dtype=torch.float32) if exact else weight)
    return adapter, base


def wire_specs(adapter: Iterable[SpreadWeight]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of the matrices of an adapter in PEFT's format, by name."""
    return {wire_name(one.name): (one.dtype, _wire_shape(one.name, one.shape)) for one in adapter}


def on_wire(stream: Stream) -> Stream:
    """Yield the matrices of an adapter in PEFT's format. stream: the matrices as they are trained, whole on rank 0 and
    empty on other ranks."""
    try:
        for name, tensor in stream:
            yield wire_name(name), to_wire(name, tensor)
    finally:
        stream.close()


def merged(
    stream: Stream, spec: AdapterSpec, dtype_of: Callable[[str], torch.dtype | None], *, transposed: bool
) -> Stream:
    """Yield the weights of a model with its adapter merged into them, on rank 0; other ranks get empty tensors.

    stream: the matrices of the adapter, then the weights of the base. A sum is computed in float32 and rounded once, to
    `dtype_of(name)`; None stands for the dtype in which the weight is streamed. transposed: true if stacked experts
    have their inputs before their outputs.
    """
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    try:
        for name, tensor in stream:
            if is_matrix(name):
                target, which = target_of(name)
                pairs.setdefault(target, {})[which] = tensor.to(torch.float32, copy=True)
                continue
            if tensor.numel() and name in pairs:
                product = pairs[name]["B"] @ pairs[name]["A"]
                product = product.transpose(1, 2) if product.ndim == 3 and transposed else product
                own = tensor.dtype
                tensor = converted(tensor.to(torch.float32) + spec.scaling * product, dtype_of(name) or own)
            yield name, converted(tensor, dtype_of(name) or tensor.dtype)
    finally:
        stream.close()
