"""Finds where the 8-bit layers of a vLLM worker keep the model's weights, and which parts of them the worker has.

linear layer           q, k and v, or gate and up, one below the other in `weight`
experts                `w13_weight`: gate above up of each expert; `w2_weight`: down of each expert
tensor parallelism     a layer has some rows of a weight, or some columns
expert parallelism     a layer has some experts
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .....codecs.integers import ceil_div
from .....codecs.weights.quantization import BLOCK, SUFFIX, Scheme
from ...hf.stored_names import StoredTensor

Index = tuple[slice | int, ...]
"""Index of a part of a tensor."""
_ALL = slice(None)
_LINEAR, _EXPERTS = ("weight",), ("w13_weight", "w2_weight")


@dataclass(slots=True)
class Layer:
    """A quantized tensor of vLLM, which has weights of the model or parts of them."""

    name: str
    module: Any
    attribute: str
    """Name of the tensor in the module; its scales have the same name with SUFFIX."""
    shape: tuple[int, ...]
    """Shape of the tensor, without what a kernel may fill up."""
    way: str = ""
    """Name of the reader that gives the weight; "" while none is known."""
    written: bool = False
    """True if the reader's view is what the kernel computes with, so that later versions are written through it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a weight, or of its scales, that a worker has."""

    layer: Layer
    at: Index
    """Place in the layer's tensor."""
    boxes: tuple[Index, ...]
    """Boxes of the weight that are there, one below the other."""
    whole: bool
    """True if this is all of the weight."""
    is_scales: bool = False

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole weight that the worker has."""
        return weight if self.whole else torch.cat([weight[box] for box in self.boxes], -2)

    def scales(self, scheme: Scheme) -> Part:
        """Return the same part of the weight's scales."""

        def scaled(index: Index) -> Index:
            *stacked, rows, columns = index
            size = BLOCK if scheme == "fp8_block" else 1
            return (*stacked, _divided(rows, size), _divided(columns, size) if size > 1 else slice(0, 1))

        # Columns of a weight share the scales of their rows.
        shares = self.whole or (scheme != "fp8_block" and all(box[-2] == _ALL and box[0] == _ALL for box in self.boxes))
        boxes = tuple(scaled(box) for box in self.boxes)
        return Part(self.layer, scaled(self.at), boxes, shares, is_scales=True)


def _divided(index: slice | int, size: int) -> slice:
    assert isinstance(index, slice)
    return index if index == _ALL else slice(index.start // size, ceil_div(index.stop, size))


def _share(whole: int, local: int, rank: int, size: int) -> slice:
    """Return the range of `whole` that rank `rank` of `size` has, of which it has `local`. Several ranks have the same
    one if there are more ranks than ranges, such as heads of keys."""
    start = rank * whole // (size * local) * local if local else 0
    return _ALL if local == whole else slice(start, start + local)


class ServedParts:
    """The parts of quantized weights that a worker has, by the weights' names in the model and in its files."""

    def __init__(
        self,
        model: Any,
        stored: Mapping[str, StoredTensor],
        shapes: Mapping[str, tuple[int, ...]],
        scheme: Scheme,
        mapper: Any = None,
    ) -> None:
        """stored: the tensors in files of each quantized weight, by the weight's name in the model. shapes: their
        shapes in the model. mapper: vLLM's of the names in files to its own; None if they are the same."""
        self._shapes = shapes
        self._names: dict[str, tuple[str, str]] = {}
        """Name in the model and in the files of each weight of a linear layer, by its name in vLLM."""
        self._experts: dict[tuple[str, str], tuple[str, StoredTensor]] = {}
        """Name and files of each weight of stacked experts, by the name of the experts in vLLM and of the tensor."""
        for name, tensor in stored.items():
            file = tensor.parts[0][0]
            own = next(iter([] if mapper is None else mapper.apply_list([file])), file)
            if tensor.stacked:
                experts = own.rsplit(".", 3)[0]  # What follows is the number of an expert, and a matrix of it.
                self._experts[experts, _EXPERTS[len(tensor.parts[0]) == 1]] = name, tensor
            else:
                self._names[own] = name, file
        self.of: dict[str, Part] = {}
        self.layers: list[Layer] = []
        self.unknown = ""
        """Name of a layer in 8 bits that is none of these; "" if there is none."""
        fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        for name, module in model.named_modules():
            for attribute in (*_LINEAR, *_EXPERTS):
                if getattr(module, attribute + SUFFIX, None) is not None:
                    find = self._linear if attribute in _LINEAR else self._stacked
                    found = dict(find(name, module, attribute, fused))
                    self.of |= found | {one + SUFFIX: part.scales(scheme) for one, part in found.items()}
                    self.layers += {id(part.layer): part.layer for part in found.values()}.values()
                    self.unknown = self.unknown or ("" if found else name)

    def lost(self, names: Collection[str]) -> list[str]:
        """Return those of `names` of which the worker has nothing."""
        return sorted(name for name in names if name not in self.of)

    def _linear(
        self, name: str, module: Any, attribute: str, fused: Mapping[str, list[str]]
    ) -> Iterator[tuple[str, Part]]:
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}.{part}.weight".removeprefix(".") for part in fused.get(last, [last])]
        widths: list[int] = list(module.logical_widths)
        if len(parts) != len(widths) or not all(part in self._names for part in parts):
            return
        rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
        named = [self._names[part] for part in parts]
        columns = self._shapes[named[0][0]][1]
        local = getattr(module, "input_size_per_partition", columns)
        layer, end = Layer(name, module, attribute, (sum(widths), local)), 0
        for names, width in zip(named, widths, strict=True):
            box = _share(self._shapes[names[0]][0], width, rank, size), _share(columns, local, rank, size)
            part = Part(layer, (slice(end, end + width), slice(0, local)), (box,), box == (_ALL, _ALL))
            end += width
            yield from dict.fromkeys(names, part).items()

    def _stacked(
        self, name: str, module: Any, attribute: str, _: Mapping[str, list[str]]
    ) -> Iterator[tuple[str, Part]]:
        found = self._experts.get((name.removesuffix(".routed_experts"), attribute))
        if found is None:
            return
        own, tensor = found
        count, rows, columns = self._shapes[own]
        names, parallel = len(tensor.parts[0]), module.moe_config.moe_parallel_config
        height, tp, splits_rows = rows // names, parallel.tp_size, names > 1
        experts = _share(count, count // parallel.ep_size, parallel.ep_rank, parallel.ep_size)
        down = _share(height, height // tp if splits_rows else height, parallel.tp_rank, tp)
        across = _share(columns, columns if splits_rows else columns // tp, parallel.tp_rank, tp)
        sizes = [len(range(size)[index]) for size, index in ((count, experts), (height, down), (columns, across))]
        layer = Layer(name, module, attribute, (sizes[0], names * sizes[1], sizes[2]))
        first = experts.start or 0
        for expert in range(sizes[0]):
            for number, file in enumerate(tensor.parts[first + expert]):
                at = expert, slice(number * sizes[1], (number + 1) * sizes[1]), slice(0, sizes[2])
                yield file, Part(layer, at, ((down, across),), (down, across) == (_ALL, _ALL))
        starts = [number * height + (down.start or 0) for number in range(names)]
        boxes = [(experts, slice(start, start + sizes[1]), across) for start in starts]
        boxes = [(experts, _ALL, across)] if down == _ALL else boxes
        whole = boxes == [(_ALL, _ALL, _ALL)]
        yield own, Part(layer, tuple(slice(0, size) for size in layer.shape), tuple(boxes), whole)
