"""`ServedLayers` reads 8-bit weights back from vLLM's layers in the form in which the trainer sent them.

vLLM's kernels keep weights in forms of their own, and which one depends on the release, the kernel and the processor.
So each layer is tried when the model has been loaded: `READERS` are applied to it, one after the other, until one gives
exactly the bytes that were loaded. If none does, the engine does not start, because what it serves could not be proved.

Where workers have parts of a weight, each takes two digests as the whole weight arrives: that of the whole, which must
be the trainer's, and that of its part, which must be what it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from .....codecs.weights.parameter_digests import DigestTaker, ParameterDigest, ParameterDigests, compare_digests
from .....codecs.weights.quantization import DTYPES, SUFFIX, Quantization, read_back
from .served_parts import Layer, ServedParts

_ROWS = 1024
"""Number of inputs that a kernel gets at a time."""

Reader = Callable[[Layer, torch.Tensor, torch.dtype], torch.Tensor | None]
"""Function that returns the weight of a layer, of the layer's shape; None if the layer does not have it in the reader's
form. It is given the layer, its scales, and the dtype of the weight."""


def _as_sent(layer: Layer, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the weight that a layer keeps as it was sent, or filled up with zeros."""
    return _cut(getattr(layer.module, layer.attribute, None), dtype, layer.shape)


def _transposed(layer: Layer, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the weight that a layer keeps with rows and columns exchanged, or filled up with zeros as well."""
    weight = getattr(layer.module, layer.attribute, None)
    return None if weight is None or weight.ndim < 2 else _cut(weight.mT, dtype, layer.shape)


def _by_kernel(layer: Layer, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the weight with which a layer's kernel computes. The product with an input that is 1 in one place is a
    column of the weight. Nothing is lost: such an input is exact in 8 bits, and so is the column after the division by
    its scales. Kernels of experts have no such product."""
    if len(layer.shape) != 2:
        return None
    rows, columns = layer.shape
    whole = torch.empty(rows, columns, dtype=torch.float32, device=scales.device)
    for start in range(0, columns, _ROWS):
        stop = min(start + _ROWS, columns)
        inputs = torch.zeros(stop - start, columns, dtype=layer.module.params_dtype, device=scales.device)
        inputs[:, start:stop].fill_diagonal_(1)
        whole[:, start:stop] = layer.module.quant_method.apply(layer.module, inputs).t()[:rows]
    return read_back(whole, scales, dtype)


READERS: Mapping[str, Reader] = {
    "as sent": _as_sent, "transposed": _transposed, "by the kernel": _by_kernel
}  # fmt: skip
"""Declared forms in which layers keep a weight, in the order in which they are tried."""


def _cut(weight: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    if weight is None or weight.dtype != dtype or weight.ndim != len(shape):
        return None
    found = weight[tuple(slice(0, size) for size in shape)]
    return found if found.shape == shape else None


class ServedLayers:
    """The quantized layers of a model in one worker of vLLM."""

    def __init__(self, parts: ServedParts, quantization: Quantization) -> None:
        self._parts, self._quantization = parts, quantization
        self._split = frozenset(name for name, part in parts.of.items() if not part.whole)
        self.begin()

    @property
    def ways(self) -> set[str]:
        """Names of the readers in use."""
        return {layer.way for layer in self._parts.layers}

    def part(self, name: str, weight: torch.Tensor) -> torch.Tensor | None:
        """Return what this worker has of a weight, or of its scales. None if it has nothing. name: that of the weight
        in the model or in its files."""
        part = self._parts.of.get(name)
        return None if part is None else part.of(weight)

    def find_readers(self, loaded: ParameterDigests, release: str) -> None:
        """Find the reader of each layer. loaded: digests of what this worker has of the tensors of the files. release:
        vLLM's, for the error. Raises ValueError that names the first layer for which there is no reader."""
        if lost := self._parts.lost(self._quantization.names):
            raise self._refusal(release, f"has no 8-bit layer for {lost[0]!r}")
        if self._parts.unknown:
            raise self._refusal(release, f"has {self._parts.unknown!r} in 8 bits, which the trainer does not send so")
        of_layer: dict[int, list[ParameterDigest]] = {}
        for weight in loaded.weights:
            of_layer.setdefault(id(self._parts.of[weight.name].layer), []).append(weight)
        for layer in self._parts.layers:
            wanted = tuple(of_layer.get(id(layer), ()))
            for layer.way in READERS:
                if wanted and compare_digests(replace(loaded, weights=wanted), self.reader(), "") == (len(wanted), ""):
                    break
            else:
                raise self._refusal(
                    release, f"keeps the weight of {layer.name!r} in a form that cannot be compared with the trainer's"
                )

    def begin(self) -> None:
        """Forget the digests of the weights that arrived last."""
        self._arrived = DigestTaker(0, self._split), DigestTaker(0, self._split)

    def arrive(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the digests of whole weights of which this worker has a part."""
        whole, own = self._arrived
        for name, tensor in weights:
            if name in self._split:
                whole.take(name, tensor)
                own.take(name, self._parts.of[name].of(tensor))

    def in_parts(self, expected: ParameterDigests) -> ParameterDigests:
        """Return the trainer's digests with those of this worker's parts in place of those of whole weights.

        A part has the trainer's digest if another weight than the trainer's has arrived, so that it is found to differ.
        A weight of which no digest was taken, or one of another kind, stays, and cannot be compared.
        """
        whole, own = ({one.name: one for one in taker.result().weights} for taker in self._arrived)

        def in_part(weight: ParameterDigest) -> ParameterDigest:
            arrived = whole.get(weight.name)
            if arrived is None or arrived.kind != weight.kind:
                return weight
            part = own[weight.name]
            return part if arrived.digest == weight.digest else replace(part, digest=weight.digest)

        return replace(expected, weights=tuple(in_part(weight) for weight in expected.weights))

    def reader(self) -> Callable[[ParameterDigest], list[torch.Tensor]]:
        """Return a function that reads what this worker has of a weight, or of its scales, as it was sent. It returns
        nothing for others, and for a digest of another part. It keeps the last layer's weight in memory, because a
        layer's weights are read one after the other."""
        last: dict[int, torch.Tensor | None] = {}

        def read(weight: ParameterDigest) -> list[torch.Tensor]:
            if (part := self._parts.of.get(weight.name)) is None:
                return []
            layer = part.layer
            if part.is_scales:
                whole = getattr(layer.module, layer.attribute + SUFFIX)
            elif id(layer) in last:
                whole = last[id(layer)]
            else:
                last.clear()
                whole = last[id(layer)] = self._whole(layer)
            found = None if whole is None else whole[part.at]
            return [found] if found is not None and weight.fits(found) else []

        return read

    def _whole(self, layer: Layer) -> torch.Tensor | None:
        scales = getattr(layer.module, layer.attribute + SUFFIX)
        return READERS[layer.way](layer, scales, DTYPES[self._quantization.scheme])

    def _refusal(self, release: str, why: str) -> ValueError:
        scheme = self._quantization.scheme
        return ValueError(f"rollout.quantization: got {scheme!r}, expected another one, because vLLM {release} {why}")
