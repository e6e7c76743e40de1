"""Memory of a worker of vLLM for an adapter's tensors, and the copies from there into slots.

vLLM fills a slot with two copies and two fills for each matrix, thousands in all, while no request runs. Here its
copies are noted once, for one layout of tensors, and then repeated together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...codecs.weights.conversion import as_integers, convert
from .spec import PARTS

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_zero_all: Any = torch._foreach_zero_  # pyright: ignore[reportPrivateImportUsage]
_scale_all: Any = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
_PART = 1 << 22
"""Number of elements of slots that are compared at a time."""
Copies = list[tuple[int, tuple[Any, ...], torch.Tensor]]
"""Copies into a slot: number of the tensor in which layers have a part of their slots, place in the slot, and what is
copied."""
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def layout_of(named: Mapping[str, torch.Tensor]) -> Layout:
    """Return dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in named.items()}


@dataclass(slots=True)
class _Part:
    """Some layers' slots: what a slot has, and what it should have. Copies are made between integers."""

    stacks: list[torch.Tensor]
    has: list[torch.Tensor]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    size: int


class AdapterMemory:
    """Tensors of one adapter at a time, all of one layout. It is used again for later versions."""

    def __init__(
        self,
        rank: int,
        named: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        note: Callable[[Mapping[str, torch.Tensor]], tuple[list[torch.Tensor], Copies]],
    ) -> None:
        """named: an adapter of the layout. dtype, device: those of the slots. note: returns all tensors in which layers
        have their slots, and the copies of an adapter whose matrices B are scaled already."""
        self.rank = rank
        self.layout = layout_of(named)
        self.sent = {name: torch.empty_like(tensor, device=device) for name, tensor in named.items()}
        """The tensors as they were sent."""
        self._own = {name: torch.empty(tensor.shape, dtype=dtype, device=device) for name, tensor in named.items()}
        self._scaled = [tensor for name, tensor in self._own.items() if name.endswith(PARTS[1])]
        self._stacks, self._copies = note(self._own)
        memory = {tensor.untyped_storage().data_ptr() for tensor in self._own.values()}
        self.repeatable = all(
            source.untyped_storage().data_ptr() in memory and source.dtype == self._stacks[number].dtype
            for number, _, source in self._copies
        )
        """False if vLLM copies from other memory than this, or converts, so that it has to do so itself each time."""
        self.proven: set[int] = set()
        """Slots into which the copies were compared with vLLM's own way."""
        self._views: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._sources = [as_integers(source) for _, _, source in self._copies]
        self._parts: list[_Part] = []
        self._scratch: tuple[torch.Tensor, ...] = ()
        """Memory in which a part of what a slot should have and of what it has are compared."""

    def take(self, named: Mapping[str, torch.Tensor], scaling: float) -> None:
        """Copy an adapter's tensors into this memory. scaling: factor of its matrices B."""
        convert(list(self.sent.values()), [named[name] for name in self.sent])
        self.scale(scaling)

    def scale(self, scaling: float) -> None:
        """Make the tensors of the slots of those that were sent."""
        convert(list(self._own.values()), list(self.sent.values()))
        if scaling != 1 and self._scaled:
            _scale_all(self._scaled, scaling)

    def write(self, slot: int) -> None:
        """Fill a slot, and clear the rest of it."""
        if slot not in self._views:
            targets = [as_integers(self._stacks[number][(slot, *place)]) for number, place, _ in self._copies]
            self._views[slot] = [stack[slot] for stack in self._stacks], targets
        whole, targets = self._views[slot]
        _zero_all(whole)
        _copy_all(targets, self._sources)

    def differs(self, slot: int) -> bool:
        """Return whether a slot has other numbers than `write` would write."""
        self._parts = self._parts or self._divided()
        found = []
        wanted, has = self._scratch
        for part in self._parts:
            wanted[: part.size].zero_()
            _copy_all(part.targets, part.sources)
            convert(part.has, [stack[slot] for stack in part.stacks])
            found.append((wanted[: part.size] != has[: part.size]).any())
        return bool(torch.stack(found).any())

    def _divided(self) -> list[_Part]:
        """Divide the slots into parts, each with views of the memory `_scratch` in which it is compared."""
        groups: list[list[int]] = []
        filled = _PART
        for number, stack in enumerate(self._stacks):
            if filled + stack[0].numel() > _PART and (filled or not groups):
                groups.append([])
                filled = 0
            groups[-1].append(number)
            filled += stack[0].numel()
        sizes = [sum(self._stacks[number][0].numel() for number in group) for group in groups]
        stack = self._stacks[0]
        self._scratch = tuple(torch.empty(max(sizes), dtype=stack.dtype, device=stack.device) for _ in range(2))
        wanted, has = self._scratch
        parts = []
        for group, size in zip(groups, sizes, strict=True):
            stacks = [self._stacks[number] for number in group]
            places = dict(zip(group, _views(wanted, stacks), strict=True))
            mine = [
                (as_integers(places[number][place]), source)
                for (number, place, _), source in zip(self._copies, self._sources, strict=True)
                if number in places
            ]
            parts.append(
                _Part(stacks, _views(has, stacks), [target for target, _ in mine], [one for _, one in mine], size)
            )
        return parts


def _views(flat: torch.Tensor, stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view of `flat` for one slot of each of the tensors, one after the other."""
    found, offset = [], 0
    for stack in stacks:
        size = stack[0].numel()
        found.append(flat[offset : offset + size].view(stack[0].shape))
        offset += size
    return found
