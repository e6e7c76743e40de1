"""`ServedLayers` reads 8-bit weights back from vLLM's layers in the form in which the trainer sent them.

vLLM's kernels keep weights in forms of their own, and which one depends on the release, the kernel and the processor.
So each layer is tried when the model has been loaded: `READERS` are applied to it, one after the other, until one gives
exactly the bytes that were loaded. If none does, the engine does not start, because what it serves could not be proved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .....codecs.integers import ceil_div
from .....codecs.weights.parameter_digests import ParameterDigest, ParameterDigests, compare_digests
from .....codecs.weights.quantization import BLOCK, DTYPES, SUFFIX, Quantization, read_back

_ROWS = 1024
"""Number of inputs that a kernel gets at a time."""

Reader = Callable[[Any, torch.Tensor, torch.dtype, tuple[int, int]], torch.Tensor | None]
"""Function that returns the weight `[N, K]` of a layer; None if the layer does not have it in the reader's form. It is
given the layer, its scales, and the dtype and shape of the weight."""


def _as_sent(layer: Any, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the weight that a layer keeps as it was sent, or filled up with zeros."""
    return _cut(getattr(layer, "weight", None), dtype, shape)


def _transposed(layer: Any, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the weight that a layer keeps with rows and columns exchanged, or filled up with zeros as well."""
    weight = getattr(layer, "weight", None)
    return None if weight is None or weight.ndim != 2 else _cut(weight.t(), dtype, shape)


def _by_kernel(layer: Any, scales: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor | None:
    """Return the weight with which a layer's kernel computes. The product with an input that is 1 in one place is a
    column of the weight. Nothing is lost: such an input is exact in 8 bits, and so is the column after the division by
    its scales."""
    rows, columns = shape
    whole = torch.empty(rows, columns, dtype=torch.float32, device=scales.device)
    for start in range(0, columns, _ROWS):
        stop = min(start + _ROWS, columns)
        inputs = torch.zeros(stop - start, columns, dtype=layer.params_dtype, device=scales.device)
        inputs[:, start:stop].fill_diagonal_(1)
        whole[:, start:stop] = layer.quant_method.apply(layer, inputs).t()[:rows]
    return read_back(whole, scales, dtype)


READERS: Mapping[str, Reader] = {
    "as sent": _as_sent, "transposed": _transposed, "by the kernel": _by_kernel
}  # fmt: skip
"""Declared forms in which layers keep a weight, in the order in which they are tried."""


def _cut(weight: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor | None:
    if weight is None or weight.dtype != dtype or weight.ndim != 2:
        return None
    rows, columns = shape
    return weight[:rows, :columns] if len(weight) >= rows and weight.shape[1] >= columns else None


@dataclass(slots=True)
class _Layer:
    """A quantized layer of vLLM, and the weights of the model that it has, one below the other."""

    name: str
    module: Any
    rows: dict[str, slice]
    """Rows of each weight by its name in the model."""
    shape: tuple[int, int]
    way: str = ""
    """Name of the reader that gives the weight; "" while none is known."""


class ServedLayers:
    """The quantized layers of a model in one worker of vLLM."""

    def __init__(self, model: Any, quantization: Quantization, shape_of: Callable[[str], tuple[int, ...]]) -> None:
        """Find the layers. shape_of: function that returns the shape of a quantized weight of the whole model. Layers
        that have only a part of a weight, as with tensor parallelism, are left out."""
        self._quantization = quantization
        shapes = {name: shape_of(name) for name in quantization.names}
        self._layers = list(_quantized_layers(model, shapes))
        self._of = {name: layer for layer in self._layers for name in layer.rows}

    @property
    def ways(self) -> set[str]:
        """Names of the readers in use."""
        return {layer.way for layer in self._layers}

    def find_readers(self, loaded: ParameterDigests, release: str, *, every: bool) -> None:
        """Find the reader of each layer. loaded: digests of all quantized weights that were loaded, and of their
        scales. release: vLLM's, for the error. every: whether this worker has all weights as a whole.

        Raises ValueError that names the first layer for which there is no reader."""
        digests = {weight.name: weight for weight in loaded.weights}
        if every and (lost := sorted(self._quantization.names - self._of.keys())):
            raise self._refusal(release, f"has no 8-bit layer for {lost[0]!r}")
        for layer in self._layers:
            wanted = tuple(digests[name + end] for name in layer.rows for end in ("", SUFFIX))
            for layer.way in READERS:
                if compare_digests(replace(loaded, weights=wanted), self.reader(), "") == (len(wanted), ""):
                    break
            else:
                raise self._refusal(
                    release, f"keeps the weight of {layer.name!r} in a form that cannot be compared with the trainer's"
                )

    def reader(self) -> Callable[[ParameterDigest], list[torch.Tensor]]:
        """Return a function that reads a weight, or its scales, as they were sent. It returns nothing for others, and
        if this worker does not have all of the weight. It keeps the last layer's weight in memory, because a layer's
        weights are read one after the other."""
        last: dict[int, torch.Tensor | None] = {}

        def read(weight: ParameterDigest) -> list[torch.Tensor]:
            name = weight.name.removesuffix(SUFFIX)
            if (layer := self._of.get(name)) is None:
                return []
            if weight.name != name:
                found = layer.module.weight_scale[self._scale_rows(layer.rows[name])]
                return [found] if weight.fits(found) else []
            if id(layer) not in last:
                last.clear()
                last[id(layer)] = self._whole(layer)
            whole = last[id(layer)]
            found = None if whole is None else whole[layer.rows[name]]
            return [found] if found is not None and weight.fits(found) else []

        return read

    def _whole(self, layer: _Layer) -> torch.Tensor | None:
        scales = layer.module.weight_scale[self._scale_rows(slice(0, layer.shape[0]))]
        return READERS[layer.way](layer.module, scales, DTYPES[self._quantization.scheme], layer.shape)

    def _scale_rows(self, rows: slice) -> slice:
        size = BLOCK if self._quantization.scheme == "fp8_block" else 1
        return slice(rows.start // size, ceil_div(rows.stop, size))

    def _refusal(self, release: str, why: str) -> ValueError:
        scheme = self._quantization.scheme
        return ValueError(f"rollout.quantization: got {scheme!r}, expected another one, because vLLM {release} {why}")


def _quantized_layers(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Layer]:
    """Yield the layers with weights in 8 bits that have all rows and columns of their weights."""
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if getattr(module, "weight_scale", None) is None:
            continue
        prefix, _, last = name.rpartition(".")
        rows: dict[str, slice] = {}
        end = columns = 0
        for part in fused.get(last, [last]):
            num_rows, columns = shapes.get(own := f"{prefix}.{part}.weight", (0, 0))
            rows[own] = slice(end, end + num_rows)
            end += num_rows
        if end == sum(module.logical_widths) and columns == getattr(module, "input_size_per_partition", columns):
            yield _Layer(name, module, rows, (end, columns))
