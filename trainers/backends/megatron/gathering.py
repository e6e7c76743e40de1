"""Lists which ranks of a Megatron mesh have the pieces of each HF weight, and extracts this rank's own pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ....actors.train.topology import Place, Topology
from ..hf_source import HfSource
from ..model_split import expert_tensor_size
from ..weight_stream import Cut, Piece, SpreadWeight
from .mesh import Mesh
from .model import PolicyModel
from .weights import EMBEDDING, Split, boxes, entries_of, hf_layer, split_of


def spread_weights(source: HfSource, topology: Topology, dtype: torch.dtype) -> list[SpreadWeight]:
    """List the HF model's weights in the model's own order, each with the ranks that provide its pieces. The list is
    the same on all ranks.

    Tied weights are listed once. `dtype` is the dtype in which all are streamed. When several ranks hold the same
    piece, the one with data- and context-parallel index 0 provides it.
    """
    config = source.config
    etp = expert_tensor_size(topology)
    found = []
    for name, param in source.empty_model().named_parameters():
        layer = hf_layer(name)
        stage = topology.pp - 1 if name != EMBEDDING else 0  # when tied, the last stage has a copy
        if layer is not None:
            stage = layer // (config.num_hidden_layers // topology.pp)
        first = topology.rank(Place(0, pp=stage))
        found.append(spread_weight(name, tuple(param.shape), dtype, first, topology.tp, etp, topology.ep))
    return found


def spread_weight(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, first: int, num_tp: int, num_etp: int, num_ep: int
) -> SpreadWeight:
    """Describe how one weight is split over the ranks of its pipeline stage.

    `first` is the first rank of the stage. The pieces are on this rank and the ranks after it, in order of the
    tensor-parallel index. For experts the expert-tensor-parallel index varies fastest, then the expert-parallel index.
    """
    split = split_of(name)
    pieces = tuple(Piece(first + index, cuts) for index, cuts in enumerate(_cuts(split, num_tp, num_etp, num_ep)))
    boxed = (shape[0], 2, shape[1] // 2, *shape[2:]) if split == "expert_gated" else ()
    return SpreadWeight(name, dtype, shape, pieces, boxed)


def _cuts(split: Split, num_tp: int, num_etp: int, num_ep: int) -> Iterator[tuple[Cut, ...]]:
    """Yield the cuts that produce each piece of a weight (or of its boxed view). The pieces are in the order of the
    ranks that hold them."""
    if split.startswith("expert"):
        for index in range(num_etp * num_ep):
            ep, etp = divmod(index, num_etp)
            yield tuple(cut for cut in (Cut(0, num_ep, ep), Cut(2, num_etp, etp)) if cut.num > 1)
    elif split == "whole" or num_tp == 1:
        yield ()
    else:
        for tp in range(num_tp):
            yield (Cut(1 if split == "columns" else 0, num_tp, tp),)


class OwnPieces:
    """Extracts this rank's pieces of HF weights from the parameters of its Megatron model."""

    def __init__(self, model: PolicyModel, config: Any, mesh: Mesh) -> None:
        """Index the parameters of `model` by the names of their HF weights. `config` is the HF config."""
        self._config, self._part = config, mesh.part
        self._params = {name: param.detach() for name, param in model.named_parameters()}
        entries = entries_of(list(self._params), model.first_layer, tied=config.tie_word_embeddings)
        self._entries = {name: entry for entry in entries for name in entry.hf_names}
        self._rest: Iterator[tuple[str, torch.Tensor]] = iter(())

    def __call__(self, weight: SpreadWeight) -> torch.Tensor:
        """Return this rank's piece of `weight`, in the shape in which the weight is cut.

        Calls are fastest in the order of `spread_weights`, because q, k and v follow each other there and come from one
        parameter. Raises KeyError if this rank has no piece of the weight.
        """
        for name, box in self._rest:
            if name == weight.name:
                return box
            break
        entry = self._entries[weight.name]
        pieces = boxes(entry, self._params[entry.name], self._config, self._part)
        self._rest = zip(entry.hf_names, pieces, strict=True)
        return next(box for name, box in self._rest if name == weight.name)
