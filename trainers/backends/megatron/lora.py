"""Adds LoRA's matrices to Megatron's linear layers, and names them after the modules of the HF model.

Megatron computes several HF modules with one layer, such as queries, keys and values. Each of these modules has its own
matrices A and B. The layer applies all A as one matrix, and all B as one matrix with a block for each module. The rows
of that matrix are in the order of the layer's own weight. With tensor parallelism a rank has:

    layer split by output    A whole, B its rows       the gradient of A is summed over the tensor-parallel ranks
    layer split by input     A its columns, B whole    the gradient of B is summed; the layer's own sum has the result
    layer that is not split  A and B whole             both gradients are summed, as the ranks share the tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ....actors.train.topology import Topology
from ..families.megatron import FAMILIES, Split
from ..hf_model import HfSource
from ..lora.adapted_layers import MATRICES, LoraSwitch, find_targets
from ..lora.adapter import Adapter
from ..weight_stream import OwnPiece, SpreadWeight
from .library import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from .mesh import Mesh
from .model import PolicyModel
from .pieces import spread_weight
from .weights import Entry, Part, boxes, entries_of, hf_layer, unbox

_OWN = ".weight"


class LayerAdapter(nn.Module):
    """The matrices of one Megatron layer: those of each HF module that the layer computes and that gets an adapter."""

    def __init__(
        self, entry: Entry, weight: torch.Tensor, chosen: set[str], config: Any, part: Part, adapter: Adapter,
        switch: LoraSwitch,
    ) -> None:  # fmt: skip
        """Create the rank's parts of the matrices, in float32 on the device of `weight`, with their start values.

        entry, weight: of the layer's own weight. chosen: names of the HF modules that get an adapter. config: HF
        config.
        """
        super().__init__()
        self._entry, self._config, self._part, self._switch = entry, config, part, switch
        self._rank = adapter.config.rank
        self.first, self.second = nn.ParameterList(), nn.ParameterList()
        self.modules_of: list[str] = []
        """Names of the HF modules with an adapter, in the order of `first` (A) and `second` (B)."""
        self._blocks: list[tuple[int, int | None]] = []
        """Number of rows of this rank's part of each HF module's weight, and the module's place in `modules_of`; None
        for a module without an adapter."""
        by_rows, by_columns = _splits(entry.split)
        for name, box in zip(entry.hf_names, boxes(entry, weight, config, part), strict=True):
            module, (rows, columns) = name.removesuffix(_OWN), box.shape
            self._blocks.append((rows, len(self.modules_of) if module in chosen else None))
            if module in chosen:
                self.modules_of.append(module)
                names = [f"{module}.{matrix}.weight" for matrix in MATRICES]
                start = partial(self._start, adapter, weight.device)
                self.first.append(start(names[0], [self._rank, columns], 1 if by_columns else None))
                self.second.append(start(names[1], [rows, self._rank], 0 if by_rows else None))

    def _start(
        self, adapter: Adapter, device: torch.device, name: str, shape: list[int], dim: int | None
    ) -> nn.Parameter:
        """Return this rank's part of the matrix `name`, of `shape`, which is split along `dim`."""
        if dim is None:
            value = adapter.start(name, tuple(shape))
        else:
            shape[dim] *= self._part.num_tp
            value = adapter.start(name, tuple(shape)).chunk(self._part.num_tp, dim)[self._part.tp].contiguous()
        param: Any = nn.Parameter(value.to(device))
        # In the gradient's norm, parameters without this mark count on the first tensor-parallel rank only.
        param.tensor_model_parallel = dim is not None
        # `sum_gradients` sums the gradients of parameters with this mark over the tensor-parallel ranks.
        param.in_parts = dim is None
        return param

    def forward(self, hidden: torch.Tensor, gathered: Any = None) -> torch.Tensor:
        """Return what the adapter adds to the layer's result, `[S, 1, out]`, in the dtype of `hidden`, `[S, 1, in]`.

        gathered: group of the ranks that have parts of the tokens, over which the result has all tokens; None if
        `hidden` has all of them. The inputs are then multiplied before they are gathered, so that what is gathered, and
        kept for the backward pass, is small.
        """
        switch = self._switch
        if switch.drops and switch.dropout:
            hidden = F.dropout(hidden, switch.dropout)
        inner = F.linear(hidden, torch.cat(list(self.first)).to(hidden.dtype))
        if gathered is not None:
            inner = gather_from_sequence_parallel_region(inner, tensor_parallel_output_grad=True, group=gathered)
        return F.linear(inner, self._second().to(hidden.dtype))

    def _second(self) -> torch.Tensor:
        """Return the scaled matrix of all B, `[rows of the layer, modules * rank]`, zero outside of its blocks."""
        width = len(self.second) * self._rank
        parts = []
        for height, block in self._blocks:
            if block is None:
                parts.append(self.second[0].new_zeros(height, width))
            else:
                before = block * self._rank
                parts.append(F.pad(self.second[block], (before, width - before - self._rank)))
        return unbox(self._entry, parts, self._config, self._part) * self._switch.scaling


def _splits(split: Split) -> tuple[bool, bool]:
    """Return whether the tensor-parallel ranks split a layer by output, and whether they split it by input."""
    return split in ("rows", "heads", "gated"), split == "columns"


def _adapted(layer: Any, own: Any, switch: LoraSwitch, /, **options: Any) -> torch.Tensor:
    """Compute a Megatron layer's product, before a layer split by input sums it over ranks, with its adapter added.

    own, options: the layer's own function for the product, and what it takes.
    """
    if not switch.on:
        return own(**options)
    if options.get("allreduce_dgrad"):
        # The gradient of the input is summed over the ranks once, for layer and adapter together.
        options["input"] = copy_to_tensor_model_parallel_region(options["input"], group=layer.tp_group)
        options["allreduce_dgrad"] = False
    gathered = layer.tp_group if options.get("sequence_parallel") else None
    return own(**options) + layer.adapter(options["input"], gathered)


class ModelAdapter:
    """The adapter of one pipeline stage."""

    def __init__(self, adapter: Adapter, model: PolicyModel, source: HfSource, mesh: Mesh, topology: Topology) -> None:
        """Add the adapter to the frozen `model`. Raises ValueError, on every rank, if a target has no layer of Megatron
        or a pipeline stage has no target."""
        self._config, lora = source.config, adapter.config
        self._rank = lora.rank
        self._targets = find_targets(source.empty_model(), lora)
        adapter.expect_matrices(f"{module}.{matrix}.weight" for module in self._targets for matrix in MATRICES)
        self._check(topology)
        self.switch = LoraSwitch(lora.scaling, lora.dropout)
        model.requires_grad_(False)
        self._params: dict[str, nn.Parameter] = {}
        """Parameters of this stage, by the name `MODULE.lora_A.weight` of the matrix that they are a part of."""
        self._entries: list[Entry] = []
        weights = model.weights()
        for entry in entries_of(list(weights), model.first_layer, source.config):
            chosen = {name.removesuffix(_OWN) for name in entry.hf_names} & set(self._targets)
            if chosen:
                layer: Any = model.get_submodule(entry.name.removesuffix(_OWN))
                made = LayerAdapter(entry, weights[entry.name], chosen, source.config, mesh.part, adapter, self.switch)
                layer._forward_impl = partial(_adapted, layer, layer._forward_impl, self.switch)
                layer.adapter = made
                self._list(entry.split, made)

    def _list(self, split: Split, made: LayerAdapter) -> None:
        for module, *pair in zip(made.modules_of, made.first, made.second, strict=True):
            for matrix, param, kind in zip(MATRICES, pair, _kinds(split), strict=True):
                name = f"{module}.{matrix}.weight"
                self._params[name] = param
                self._entries.append(Entry(name, (name,), kind))

    @property
    def trained(self) -> tuple[Mapping[str, torch.Tensor], Sequence[Entry]]:
        """The tensors that training changes, as `trained_tensors` returns them."""
        return self._params, self._entries

    def spread(self, base: Sequence[SpreadWeight], num_tp: int) -> list[SpreadWeight]:
        """Return the matrices of the whole model with the ranks that hold their pieces.

        base: the same for the weights of the base, whose dtype the matrices are streamed in.
        """
        every, found = {weight.name: weight for weight in base}, []
        for module in self._targets:
            weight = every[module + _OWN]
            rank, first = self._rank, weight.pieces[0].rank
            rows, columns = weight.shape
            split = _row_of(weight.name, self._config).split
            for matrix, shape, kind in zip(MATRICES, ((rank, columns), (rows, rank)), _kinds(split), strict=True):
                name = f"{module}.{matrix}.weight"
                found.append(spread_weight(name, kind, shape, weight.dtype, first, num_tp, 1, 1))
        return found

    def piece(self, base: OwnPiece, weight: SpreadWeight) -> torch.Tensor:
        """Return this rank's piece of a matrix, or of a weight of the base, an `OwnPiece`. base: that of the base."""
        param = self._params.get(weight.name)
        return base(weight) if param is None else param.detach()

    def _check(self, topology: Topology) -> None:
        for module in self._targets:
            row = _row_of(module + _OWN, self._config)
            if ".linear_" not in row.name:
                raise ValueError(
                    f"trainer.lora.targets: got {module.rpartition('.')[2]!r}, expected other layers with "
                    "trainer.backend = 'megatron', which has no linear layer for it"
                )
        size = self._config.num_hidden_layers // topology.pp
        stages = {(hf_layer(module + _OWN) or 0) // size for module in self._targets}
        for stage in range(topology.pp):
            if stage not in stages:
                raise ValueError(
                    f"trainer.lora.targets: got layers of which none is among the decoder layers {stage * size} to "
                    f"{(stage + 1) * size - 1}, expected some in every stage of trainer.pp = {topology.pp}"
                )


def _kinds(split: Split) -> tuple[Split, Split]:
    """Return how the matrices A and B are split, given the split of the layer's weight."""
    by_rows, by_columns = _splits(split)
    return "columns" if by_columns else "whole", "rows" if by_rows else "whole"


def _row_of(hf_name: str, config: Any) -> Any:
    """Return the row of the family's table for a tensor of a decoder layer."""
    local = hf_name.split(".", 3)[3]
    return next(row for row in FAMILIES[config.model_type].rows if local in row.hf_names)
