"""`quantize` makes the 8-bit weights of engines from the trainer's, by one rule that gives the same bytes everywhere.

    weight [N, K], any float   ->   name: 8-bit values [N, K]   +   name_scale: float32, one for each row or block

Of stacked experts `[E, N, K]` each is quantized for itself.

Like `conversion.convert`, it runs once for each version, before weights are packed into buckets. Checksums and digests
are taken afterwards, so that they are those of the quantized bytes, and a scale travels as a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..integers import ceil_div

Scheme = Literal["fp8", "fp8_block", "int8"]
"""Kind of the 8-bit weights: `fp8` and `int8` have a scale for each row, `fp8_block` one for each block of weights."""
BLOCK = 128
"""Number of rows and columns of a block of `fp8_block`."""
SUFFIX = "_scale"
"""Ending of the name of a weight's scales, after the weight's own name."""
DTYPES: Mapping[Scheme, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "fp8_block": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_MOST: Mapping[Scheme, float] = {"fp8": 448.0, "fp8_block": 448.0, "int8": 127.0}
"""Largest value of each kind. It stands for the largest absolute weight of a row or block."""
_LEAST = torch.finfo(torch.float32).tiny
"""Least scale. Smaller numbers have fewer digits, with which the largest weight could become larger than it may."""

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each weight by name."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """The weights of a model that are quantized, and how."""

    scheme: Scheme
    names: frozenset[str]
    """Hugging Face names of the weights that are quantized: matrices, or stacks of them."""

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the weights that are quantized, and of their scales."""
        return self.names | {name + SUFFIX for name in self.names}

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return the dtype in which a weight or the scales of one are sent; None for all others."""
        if name in self.names:
            return DTYPES[self.scheme]
        return torch.float32 if name.removesuffix(SUFFIX) in self.names else None

    def specs(self, specs: Specs) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the specs of what is sent, in the order of `stream`. specs: those of the weights. Raises ValueError if
        one of the weights to be quantized is not among them."""
        if missing := sorted(self.names - specs.keys()):
            raise ValueError(f"weights: {missing[0]!r} is to be quantized, but the trainer has no weight of this name")
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for name, (dtype, shape) in specs.items():
            if name in self.names:
                found[name] = DTYPES[self.scheme], shape
                found[name + SUFFIX] = torch.float32, scale_shape(shape, self.scheme)
            else:
                found[name] = dtype, shape
        return found

    def stream(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `weights`, each quantized one as its values and its scales. A tensor is valid until the next one is
        requested. On ranks that get empty tensors only for the sake of a collective call, they stay empty."""
        for name, tensor in weights:
            if name in self.names and tensor.numel():
                values, scales = quantize(tensor, self.scheme)
                yield name, values
                yield name + SUFFIX, scales
            else:
                yield name, tensor

    def restored(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of a model, in float32 where they were quantized. named: the tensors as they were sent.
        Raises ValueError if a weight came without scales, or in another form than this quantization gives it."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            if name in self.names:
                self.check(name, tensor, named.get(name + SUFFIX))
                found[name] = dequantize(tensor, named[name + SUFFIX], torch.float32)
            elif name.removesuffix(SUFFIX) not in self.names:
                found[name] = tensor
        return found

    def check(self, name: str, values: torch.Tensor, scales: torch.Tensor | None) -> None:
        """Raise ValueError if these are no values and scales of the weight `name`."""
        if values.dtype != DTYPES[self.scheme]:
            raise ValueError(f"weights: {name!r} has dtype {values.dtype}, expected {DTYPES[self.scheme]}")
        expected = scale_shape(tuple(values.shape), self.scheme)
        if scales is None:
            raise ValueError(f"weights: {name!r} came without its scales, expected {name + SUFFIX!r}")
        if scales.dtype != torch.float32 or tuple(scales.shape) != expected:
            raise ValueError(
                f"weights: {name + SUFFIX!r} is {scales.dtype} {tuple(scales.shape)}, expected torch.float32 {expected}"
            )

    def check_scales(self, named: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError that names the first scales among `named` that are not all finite and positive.

        They are damaged, or the trainer's weight is not finite."""
        scales = {
            name: one
            for name, one in named.items()
            if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in self.names
        }
        if scales:
            sound = torch.stack([((one > 0) & one.isfinite()).all() for one in scales.values()]).tolist()
            if wrong := [name for name, good in zip(scales, sound, strict=True) if not good]:
                raise ValueError(f"weights: {wrong[0]!r} has numbers that are not finite and positive, as scales are")


def scale_shape(shape: Sequence[int], scheme: Scheme) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`."""
    *stacked, rows, columns = shape
    return (*stacked, *((ceil_div(rows, BLOCK), ceil_div(columns, BLOCK)) if scheme == "fp8_block" else (rows, 1)))


def quantize(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 8-bit values of a weight, contiguous, and their float32 scales, on the weight's device.

    A scale is the largest absolute weight of its row or block, divided by the largest 8-bit value, in float32, but at
    least the smallest normal number; it is 1 where all weights are 0. Each weight is divided by its scale, and rounded
    to the nearest value, ties to even. A row with a weight that is not finite gets a scale that is not finite, so that
    no engine computes with it unnoticed.
    """
    if weight.ndim > 2:  # The copies in float32 are of one expert at a time.
        values, scales = zip(*(quantize(one, scheme) for one in weight), strict=True)
        return torch.stack(values), torch.stack(scales)
    with torch.no_grad():
        largest = _largest(weight, scheme)
        scales = torch.where(largest == 0, 1.0, (largest / _MOST[scheme]).clamp_min(_LEAST))
        scaled = weight / _spread(scales, weight.shape, scheme)  # The scales make the result float32.
        return (scaled.round_() if scheme == "int8" else scaled).to(DTYPES[scheme]), scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that 8-bit values and their scales stand for, in `dtype`."""
    if values.ndim > 2:
        return torch.stack([dequantize(*one, dtype) for one in zip(values, scales, strict=True)])
    scheme = _scheme(values, scales)
    return (values.to(torch.float32) * _spread(scales, values.shape, scheme)).to(dtype)


def read_back(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the 8-bit values, of `dtype`, of a weight that `dequantize` returned or that a kernel computed from them.
    They are exact, because bfloat16 and float32 keep the values apart."""
    if weight.ndim > 2:
        return torch.stack([read_back(*one, dtype) for one in zip(weight, scales, strict=True)])
    scaled = weight.to(torch.float32) / _spread(scales, weight.shape, _scheme(weight, scales))
    return (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)


def _scheme(weight: torch.Tensor, scales: torch.Tensor) -> Scheme:
    """Return a scheme with scales of this shape. A weight of one block has the same scale in each row and column."""
    return "fp8" if tuple(scales.shape) == (len(weight), 1) else "fp8_block"


def _largest(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the largest absolute weight of each row or block, in float32 and in the shape of the scales. Blocks at the
    edges are filled up with zeros."""
    if scheme != "fp8_block":
        return torch.linalg.vector_norm(weight, float("inf"), 1, keepdim=True, dtype=torch.float32)
    rows, columns = (-size % BLOCK for size in weight.shape)
    whole = torch.nn.functional.pad(weight, (0, columns, 0, rows)) if rows or columns else weight
    blocks = whole.reshape(len(whole) // BLOCK, BLOCK, -1, BLOCK)
    return torch.linalg.vector_norm(blocks, float("inf"), (1, 3), dtype=torch.float32)


def _spread(scales: torch.Tensor, shape: Sequence[int], scheme: Scheme) -> torch.Tensor:
    """Return the scales in a form that can be multiplied with a weight of `shape`."""
    if scheme != "fp8_block":
        return scales
    rows, columns = shape
    return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
