"""`ServedLayers` reads 8-bit weights back from vLLM's layers in the form in which the trainer sent them.

vLLM's kernels keep weights in forms of their own, and which one depends on the release, the kernel and the processor.
So each layer is tried when the model has been loaded: `READERS` are applied to it, one after the other, until one gives
exactly the bytes that were loaded. If none does, the engine does not start, because what it serves could not be proved.

Most of these forms are views of the memory that the kernel reads. Then later versions are written through the view, and
vLLM need not repack them. That a kernel does compute with this memory is tried, too: with zeros it must give zeros.

Where workers have parts of a weight, each takes two digests as the whole weight arrives: that of the whole, which must
be the trainer's, and that of its part, which must be what it serves.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from .....codecs.weights.conversion import as_integers
from .....codecs.weights.parameter_digests import DigestTaker, ParameterDigest, ParameterDigests, compare_digests
from .....codecs.weights.quantization import DTYPES, SUFFIX, Quantization, read_back, scale_shape
from .served_parts import Layer, ServedParts

_log = logging.getLogger(__name__)
_ROWS = 1024
"""Number of inputs that a kernel gets at a time."""
_TRIED = 16
"""Number of inputs with which a kernel is tried."""

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
_VIEWS = ("as sent", "transposed")
"""Names of the readers that return views of the memory that a layer has."""


def _cut(weight: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    if weight is None or weight.dtype != dtype or weight.ndim != len(shape):
        return None
    found = weight[tuple(slice(0, size) for size in shape)]
    return found if found.shape == shape else None


def computes_with(module: Any, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Return whether the kernel of a linear layer computes with this memory, and has no copy of it. With zeros instead
    of the weight its products must be 0, and with scales twice as large they must be twice as large."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_TRIED, weight.shape[1], generator=generator).to(weight.device, module.params_dtype)
    bits = as_integers(weight)
    kept = bits.clone(), scales.clone()
    before = module.quant_method.apply(module, inputs)
    try:
        bits.zero_()
        silent = module.quant_method.apply(module, inputs)
        bits.copy_(kept[0])
        scales.mul_(2)
        doubled = module.quant_method.apply(module, inputs)
    finally:
        bits.copy_(kept[0])
        scales.copy_(kept[1])
    return bool(before.any()) and not silent.any() and torch.equal(doubled, 2 * before)


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

    def memory(self) -> list[tuple[Any, str, torch.Tensor]]:
        """Return the memory into which later versions can be written. Each entry has a module, the name of one of its
        parameters, and a view of this as it is sent. Both tensors of a layer are there, or none."""
        found = []
        for layer in self._parts.layers:
            if layer.written:
                for name, tensor in zip(_names(layer), self._views(layer), strict=True):
                    found.append((layer.module, name, tensor))
        return found

    @contextmanager
    def lent(self, as_loaded: Callable[[Any, str, torch.Tensor], torch.nn.Parameter]) -> Iterator[None]:
        """Context manager in which vLLM's loaders find this memory in the place of the layers' parameters. as_loaded:
        function that makes a parameter for the loaders, given what `memory` returns."""
        kept = [(module, name, module._parameters[name]) for module, name, _ in self.memory()]
        try:
            for module, name, tensor in self.memory():
                module._parameters[name] = as_loaded(module, name, tensor)
            yield
        finally:
            for module, name, parameter in kept:
                module._parameters[name] = parameter

    def _views(self, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the weight and of the scales of a layer as they were sent."""
        scales = getattr(layer.module, layer.attribute + SUFFIX).detach()
        shape = scale_shape(layer.shape, self._quantization.scheme)
        weight = self._whole(layer)
        assert weight is not None
        return weight.detach(), scales[tuple(slice(0, size) for size in shape)]

    def _can_be_written(self, layer: Layer) -> bool:
        """Return whether the layer's kernel computes with what is written to the layer's memory. Of experts it is not
        known."""
        lendable = all(layer.module._parameters.get(name) is not None for name in _names(layer))
        if layer.way not in _VIEWS or len(layer.shape) != 2 or not lendable:
            return False
        weight, scales = self._views(layer)
        apart = all(stride > 0 for one in (weight, scales) for stride in one.stride())
        if not apart or scales.shape != scale_shape(layer.shape, self._quantization.scheme):
            return False
        try:
            return computes_with(layer.module, weight, scales)
        except Exception as error:  # The engine can do without: new versions are then repacked.
            _log.warning("%s: its kernel could not be tried (%s: %s)", layer.name, type(error).__name__, error)
            return False

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
            layer.written = self._can_be_written(layer)

    def __str__(self) -> str:
        """How new versions get into the layers, such as `8-bit layers: 252 in place (transposed)`."""
        counts = Counter(("in place" if one.written else "layerwise") + f" ({one.way})" for one in self._parts.layers)
        return "8-bit layers: " + ", ".join(f"{count} {way}" for way, count in sorted(counts.items()))

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


def _names(layer: Layer) -> tuple[str, str]:
    return layer.attribute, layer.attribute + SUFFIX
