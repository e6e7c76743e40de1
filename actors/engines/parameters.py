"""`ParameterSet` copies a weight update into a model's parameters, and checks all of it before it changes anything."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

from ...codecs.integers import ALIGN
from ...codecs.weights.parameter_digests import ParameterDigest

_CONVERTIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ParameterSet:
    """Parameters and persistent buffers of a model, by their names in a checkpoint. Tied parameters have several
    names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._specs = {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}
        parameters = {id(tensor) for tensor in model.parameters()}
        self._remainders = {name: tensor.data_ptr() % ALIGN for name, tensor in self._tensors.items()}
        """Address of each tensor modulo ALIGN, on which the last bit of a matrix product can depend on a CPU."""
        self._names_of: dict[int, list[str]] = {}
        """Names of each parameter, by the `id` of its tensor. An update must contain every parameter; it may leave out
        buffers."""
        for name, tensor in self._tensors.items():
            if id(tensor) in parameters:
                self._names_of.setdefault(id(tensor), []).append(name)

    def refresh(self, model: torch.nn.Module) -> None:
        """Look up the model's tensors again. This is needed after `model` was moved to another device, because moving
        it replaces its buffers with new tensors."""
        self._tensors.update(model.state_dict(keep_vars=True))

    def match(self, named: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Check an update (HF name -> tensor) against the model. Returns a (name, source tensor) pair for each tensor
        to replace.

        Tied parameters give one pair. Changes nothing. Raises ValueError if parameters are unknown, missing, or of the
        wrong shape or dtype, or if tied parameters are sent with different values; the message names the parameters.
        """
        unknown = [name for name in named if name not in self._tensors]
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._tensors, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"weights: the model has no parameter {_first(unknown)}{hint}")
        missing = [names[0] for names in self._names_of.values() if not any(name in named for name in names)]
        if missing:
            raise ValueError(f"weights: parameter {_first(missing)} was not sent")
        pairs: dict[int, tuple[str, torch.Tensor, torch.Tensor]] = {}
        for name, source in named.items():
            target = self._tensors[name]
            self._check(name, source)
            earlier = pairs.setdefault(id(target), (name, target, source))
            if earlier[2] is not source and not torch.equal(earlier[2], source):
                raise ValueError(f"weights: {earlier[0]!r} and {name!r} are tied in the model but differ as sent")
        return [(name, source) for name, _, source in pairs.values()]

    def _check(self, name: str, source: torch.Tensor) -> None:
        dtype, shape = self._specs[name]
        if source.shape != shape:
            raise ValueError(f"weights: {name!r} has shape {tuple(source.shape)}, expected {tuple(shape)}")
        if source.dtype != dtype and not (source.dtype in _CONVERTIBLE and dtype in _CONVERTIBLE):
            raise ValueError(f"weights: {name!r} has dtype {source.dtype}, expected {dtype}")

    def copy(self, pairs: list[tuple[str, torch.Tensor]]) -> None:
        """Copy each source tensor in `pairs`, which `match` returned, into the model's tensor of that name."""
        with torch.no_grad():
            for name, source in pairs:
                self._tensors[name].copy_(source)

    def served(self, weight: ParameterDigest) -> list[torch.Tensor]:
        """Return the model's tensor of this name, if it has the dtype and shape of the weight as sent."""
        return [tensor for tensor in [self._tensors[weight.name]] if weight.fits(tensor)]

    def drop(self) -> None:
        """Free the memory of the parameters; buffers are kept. `allocate` and then `copy` make the model usable
        again."""
        for tensor in self._parameters():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def allocate(self) -> None:
        """Allocate memory, filled with zeros, for the parameters that `drop` freed. It is aligned as theirs was, so
        that the same weights give the same bits."""
        for tensor in self._parameters():
            name = self._names_of[id(tensor)][0]
            _, shape = self._specs[name]
            if tensor.shape != shape:
                nbytes = shape.numel() * tensor.element_size()
                memory = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, device=tensor.device)
                start = (self._remainders[name] - memory.data_ptr()) % ALIGN
                tensor.data = memory[start : start + nbytes].view(tensor.dtype).view(shape)

    def _parameters(self) -> list[torch.Tensor]:
        return [self._tensors[names[0]] for names in self._names_of.values()]


def _first(names: list[str]) -> str:
    more = len(names) - 1
    return f"{names[0]!r}" + (f" (and {more} more)" if more else "")
