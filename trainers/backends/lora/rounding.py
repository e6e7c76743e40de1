"""Rounds the weight of a linear layer to 8 bits with torchao, or to 4 bits with bitsandbytes, and restores it.

A rounded weight is two tensors, its integers and their scales. Only this module imports the two libraries.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal

import torch

from ....dataplane.imports import MissingExtra

Rounding = Literal["int8", "nf4"]
BLOCK = 64
"""Number of consecutive values of a weight in `nf4` that have a scale of their own."""


@functools.cache
def _library(kind: Rounding) -> Any:
    module = {"int8": "torchao.quantization", "nf4": "bitsandbytes.functional"}[kind]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or module, f"trainer.lora.base={kind}", "quantized") from None


def round_weight(weight: torch.Tensor, kind: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers and the float32 scales of `weight`, `[out, in]` on the CPU, rounded from its float32 values.

    With `int8` they are int8 `[out, in]` and `[out, 1]`, a symmetric scale for each row. With `nf4` they are two values
    in a byte, uint8 `[out * in / 2, 1]`, and a scale for each `BLOCK` values (Dettmers et al. 2023, arXiv:2305.14314,
    without its rounding of the scales). Raises MissingExtra if the library is not installed.
    """
    library, weight = _library(kind), weight.to(torch.float32).contiguous()
    if kind == "int8":
        rounded = library.Int8Tensor.from_hp(weight, library.PerRow())
        return rounded.qdata, rounded.scale
    data, state = library.quantize_4bit(weight, blocksize=BLOCK, quant_type=kind)
    return data, state.absmax


def restore_weight(
    data: torch.Tensor, scale: torch.Tensor, kind: Rounding, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight of `shape` for which `data` and `scale` stand (see `round_weight`), in `dtype`.

    It is on their device. In bfloat16 it is the rounded float32 value.
    """
    library = _library(kind)
    if kind == "int8":
        return library.Int8Tensor(data, scale, [1, shape[1]], dtype).dequantize(dtype)
    # The kernel of bitsandbytes 0.50 for CPUs takes wrong scales for rows that are no multiple of a block.
    values = shape[0] * shape[1]
    blocks = torch.Size((1, values) if values % BLOCK else (values // BLOCK, BLOCK))
    state = library.QuantState(absmax=scale, shape=blocks, dtype=dtype, blocksize=BLOCK, quant_type=kind)
    return library.dequantize_4bit(data, state).reshape(shape)


def rounded_weight(weight: torch.Tensor, kind: Rounding) -> torch.Tensor:
    """Return what remains of `weight`, `[out, in]` on the CPU, after rounding, in float32."""
    rows, columns = weight.shape
    return restore_weight(*round_weight(weight, kind), kind, (rows, columns), torch.float32)
