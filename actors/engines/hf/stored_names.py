"""Finds the tensors of a model folder that make up a model's weights, by the conversions of transformers.

A model's own names are those of its modules. Folders have other names for some of them: a prefix in front (parts of a
model for pictures and text), another word for a module, or a matrix of each expert where the model has all experts in
one tensor. transformers declares such conversions for each model, and this module reads the declarations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The tensors of a folder that make up one tensor of a model."""

    parts: tuple[tuple[str, ...], ...]
    """Names in the folder. With `stacked` there is a tuple for each expert, with the names of the matrices that follow
    each other in the expert's rows. Otherwise there is one name, that of the whole tensor."""
    stacked: bool = False

    def views(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name in the folder of each part of the model's tensor `whole`, and the part as a view. All matrices
        of an expert have the same height."""
        if not self.stacked:
            yield self.parts[0][0], whole
            return
        for names, expert in zip(self.parts, whole.unbind(0), strict=True):
            yield from zip(names, expert.chunk(len(names), dim=0), strict=True)


def stored_tensors(model: Any, names: Iterable[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return how the tensors of a folder make up those of a model.

    model: a HF model, which may be on the meta device. names: names of all tensors in the folder. The first result is a
    dict by the model's own names. The second one has the tensors that transformers computes in another way than by
    stacking matrices, and the operations by which it does so.
    """
    conversions = get_model_conversion_mapping(model)
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    renamings: list[Any] = [one for one in conversions if not isinstance(one, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    own = model.state_dict()
    found: dict[str, StoredTensor] = {}
    matrices: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if pattern is None:
            found[renamed] = StoredTensor(((name,),))
        else:
            matrices.setdefault(renamed, {}).setdefault(pattern, []).append(name)
    unknown: dict[str, str] = {}
    for renamed, by_pattern in matrices.items():
        converter = of_pattern[next(iter(by_pattern))]
        columns = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
        if _stacks(converter) and len({len(column) for column in columns}) == 1:
            found[renamed] = StoredTensor(tuple(zip(*columns, strict=True)), stacked=True)
        else:
            unknown[renamed] = ", ".join(type(operation).__name__ for operation in converter.operations)
    return found, unknown


def _stacks(converter: WeightConverter) -> bool:
    """Return whether a conversion only puts the matrices of experts one after the other."""
    merge, *rest = converter.operations
    stacked = isinstance(merge, MergeModulelist) and merge.dim == 0
    joined = all(isinstance(operation, Concatenate) and operation.dim == 1 for operation in rest)
    return stacked and joined and len(rest) == (len(converter.source_patterns) > 1)
