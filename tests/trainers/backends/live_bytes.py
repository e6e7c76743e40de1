"""Counts exactly how many bytes of tensors a piece of code holds at most, as the allocator sees them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.actors.train_backend import TrainBackend


class LiveBytes(TorchDispatchMode):
    """A context whose `peak` is the most bytes of storage, made by operations inside it, that are alive at once.
    Storage of `known` tensors does not count."""

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        alive = [tensor for tensor in (made() for made in self._made) if tensor is not None]
        self._made = [weakref.ref(tensor) for tensor in alive]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        self.peak = max(self.peak, sum(size for start, size in storages.items() if start not in self._known))
        return result


def gathering_share(backend: TrainBackend, model: nn.Module) -> float:
    """Return the most bytes that a pass over the backend's weights holds on this rank, over the largest weight's.
    `model` has the parameters. Collective."""
    params = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in backend.weight_specs().values()]
    with LiveBytes(params) as live:
        for _ in backend.weights():
            pass
    return live.peak / max(sizes)
