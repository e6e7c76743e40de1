"""`WeightReads` watches a model's loaders and lists the parts of the weights that they read: all that a worker needs.

A tensor-parallel worker reads its slice of most weights. Once it has told which, it is sent no more than these.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ....codecs import messages
from .regions import Region, place, region_of_part, whole


class WeightReads(TorchDispatchMode):
    """Context manager around a load. Views are not reads; every other operation reads all of the views it is given."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        """weights: the contiguous weights that are loaded, which stay where they are meanwhile."""
        super().__init__()
        self._weights = {name: tensor for name, tensor in weights.items() if tensor.numel()}
        self._starts, self._names = [], []
        for name, tensor in sorted(self._weights.items(), key=lambda item: item[1].data_ptr()):
            self._starts.append(tensor.data_ptr())
            self._names.append(name)
        self._regions: dict[str, dict[Region, None]] = {}

    @property
    def regions(self) -> tuple[Region, ...]:
        """Regions that were read, in a local tensor of the whole weight's shape. Weights of which nothing was seen to
        be read are listed whole."""
        found: list[Region] = []
        for name, tensor in self._weights.items():
            found += self._regions.get(name, {}) or [place(name, whole(tensor.shape))]
        return tuple(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = zip(func._schema.arguments, args, strict=False)
        given = [*named, *((one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs)]
        returns_view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        for argument, value in given:
            if returns_view and argument.alias_info is not None:
                continue
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.numel():
                    self._note(tensor)
        return func(*args, **kwargs)

    def _note(self, view: torch.Tensor) -> None:
        try:
            address = view.data_ptr()
        except RuntimeError:  # The tensor has no memory.
            return
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return
        name = self._names[at]
        weight = self._weights[name]
        if address >= weight.data_ptr() + weight.nbytes:
            return
        offset, rest = divmod(address - weight.data_ptr(), weight.element_size())
        region = None
        if not rest and view.dtype == weight.dtype:
            part = offset, tuple(view.shape), view.stride()
            region = region_of_part(name, tuple(weight.shape), part, (name, 0, view.stride()))
        box = whole(weight.shape) if region is None else region.box
        at_box = [start for start, _ in box]
        self._regions.setdefault(name, {})[place(name, box, name, weight.shape, at_box)] = None


def encode_regions(regions: Sequence[Region]) -> bytes:
    """Return regions as bytes, for a receiver's last message; b"" for none."""
    return zlib.compress(messages.encode(tuple(regions)), 1) if regions else b""


def decode_regions(message: bytes) -> tuple[Region, ...]:
    """Return the regions that `encode_regions` has encoded. Raises ValueError for other bytes."""
    try:
        return messages.decode(zlib.decompress(message), tuple[Region, ...]) if message else ()
    except zlib.error as error:
        raise ValueError(f"the regions of a receiver are damaged: {error}") from error
