"""Describes what one process has in memory of each weight: boxes of the weight, and where each lies in a local tensor.

All numbers are elements, not bytes, so that a rank that keeps float32 weights can send them as bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ....codecs.integers import ceil_div

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype on the wire and shape of each weight, by Hugging Face name, as `TrainBackend.weight_specs` returns them."""
Box = tuple[tuple[int, int], ...]
"""Part of a weight: start and stop (exclusive) along each axis; `()` for a weight without axes."""
Cuts = Sequence[tuple[int, int, int]]
"""Cuts applied one after the other: axis, number of parts, index of the part that is kept."""


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a weight, and the place in a local tensor that holds its values."""

    weight: str
    """Hugging Face name of the weight."""
    box: Box
    tensor: str
    """Name of the local tensor, for example of a fused parameter."""
    offset: int
    """Position of the box's first element, in elements from the first element of the local tensor."""
    strides: tuple[int, ...]
    """Strides of the box's axes in the memory of the local tensor, in elements."""

    def offset_of(self, start: Sequence[int]) -> int:
        """Return the position of the element that has the index `start` in the whole weight."""
        steps = zip(start, self.box, self.strides, strict=True)
        return self.offset + sum((index - first) * stride for index, (first, _), stride in steps)


@dataclass(frozen=True, slots=True)
class Party:
    """A process that takes part in a transfer, and its regions of the weights."""

    host: str
    """Identity of the process's host. Two processes with the same one can share memory."""
    regions: tuple[Region, ...]
    device: str = ""
    """Identity of the process's GPU on its host; "" for a process that keeps its weights in host memory."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole weight."""
    return tuple((0, size) for size in shape)


def cut(box: Box, axis: int, num: int, index: int) -> Box:
    """Return part `index` of a box that is cut into `num` parts along `axis`. All parts have the same size, except that
    the last ones can be smaller or empty, as with `torch.chunk`."""
    start, stop = box[axis]
    width = ceil_div(stop - start, num)
    first = min(start + index * width, stop)
    return (*box[:axis], (first, min(first + width, stop)), *box[axis + 1 :])


def lengths(box: Box) -> tuple[int, ...]:
    """Return the number of elements of a box along each axis."""
    return tuple(stop - start for start, stop in box)


def within(inner: Box, outer: Box) -> bool:
    """Return whether `outer` contains all of `inner`."""
    return all(low <= start and stop <= high for (start, stop), (low, high) in zip(inner, outer, strict=True))


def place(weight: str, box: Box, tensor: str = "", shape: Sequence[int] = (), at: Sequence[int] = ()) -> Region:
    """Return the region of a box that lies in a contiguous local tensor.

    tensor: name of the local tensor; "" for that of the weight. shape: shape of the local tensor; () if it is that of
    the box. at: index of the box's first element in the local tensor; () for its first element.
    """
    sizes = tuple(shape) or lengths(box)
    strides = tuple(math.prod(sizes[axis + 1 :]) for axis in range(len(box)))
    offset = sum(index * stride for index, stride in zip(at, strides, strict=False))
    return Region(weight, box, tensor or weight, offset, strides)


def held(name: str, shape: Sequence[int], cuts: Cuts = (), tensor: str = "") -> Iterator[Region]:
    """Yield the region of a weight of which a process has one part as a tensor of its own; nothing if that is empty.

    FSDP2 cuts axis 0 over its ranks, after axis 0 or 1 was cut over tensor-parallel ranks. No cuts mean a copy of the
    whole weight. tensor: name of the local tensor; "" for that of the weight.
    """
    box = whole(shape)
    for axis, num, index in cuts:
        box = cut(box, axis, num, index)
    if all(lengths(box)):
        yield place(name, box, tensor)


def region_of_part(
    weight: str,
    shape: Sequence[int],
    part: tuple[int, Sequence[int], Sequence[int]],
    target: tuple[str, int, Sequence[int]],
) -> Region | None:
    """Return the region of a strided part of a weight that is copied to a local tensor; None if the part is no box.

    part: position of its first element in the contiguous weight, its shape, and its strides there. target: name of the
    local tensor, position of the copy in it, and the strides of the copy.
    """
    offset, sizes, strides = part
    tensor, target_offset, target_strides = target
    box: list[tuple[int, int]] = []
    moved: list[int] = []
    axes = [*zip(sizes, strides, target_strides, strict=True)]
    for axis, extent in enumerate(shape):
        stride = math.prod(shape[axis + 1 :])
        start, offset = divmod(offset, stride) if stride else (0, offset)
        size, step = 1, 0
        if axes and (axes[0][1] == stride or (axes[0][0] == 1 and len(axes) == len(shape) - axis)):
            size, _, step = axes.pop(0)
        if start + size > extent:
            return None
        box.append((start, start + size))
        moved.append(step)
    return (
        None
        if any(size != 1 for size, _, _ in axes)
        else Region(weight, tuple(box), tensor, target_offset, tuple(moved))
    )
