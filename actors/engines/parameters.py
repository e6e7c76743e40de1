"""A model's parameters as the target of a weight update: everything is checked before anything is touched."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

_CONVERTIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ParameterSet:
    """Parameters (and persistent buffers) of `model` by checkpoint name; tied ones have several names."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        parameters = {id(tensor) for tensor in model.parameters()}
        self._names_of: dict[int, list[str]] = {}
        """Per required tensor (a parameter, not a buffer), the names it answers to."""
        for name, tensor in self._tensors.items():
            if id(tensor) in parameters:
                self._names_of.setdefault(id(tensor), []).append(name)

    def match(self, named: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) pairs that replace every parameter. Touches nothing.

        Raises ValueError naming unknown, missing, misshapen and wrongly typed parameters, and tied ones that differ.
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
            _check(name, target, source)
            earlier = pairs.setdefault(id(target), (name, target, source))
            if earlier[2] is not source and not torch.equal(earlier[2], source):
                raise ValueError(f"weights: {earlier[0]!r} and {name!r} are tied in the model but differ as sent")
        return [(target, source) for _, target, source in pairs.values()]

    @staticmethod
    def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy each source into its target, in place."""
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)


def _check(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    if source.shape != target.shape:
        raise ValueError(f"weights: {name!r} has shape {tuple(source.shape)}, expected {tuple(target.shape)}")
    if source.dtype != target.dtype and not (source.dtype in _CONVERTIBLE and target.dtype in _CONVERTIBLE):
        raise ValueError(f"weights: {name!r} has dtype {source.dtype}, expected {target.dtype}")


def _first(names: list[str]) -> str:
    more = len(names) - 1
    return f"{names[0]!r}" + (f" (and {more} more)" if more else "")
