"""Converts HF weights to Megatron parameters and back, and computes each rank's part of them.

All functions are pure. They work on given tensors and their parts, and do not read or gather them. HF names are those
of the HF model's own parameters (experts stacked), without tied ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....codecs.integers import ceil_div
from ....codecs.tokens.routes import num_experts
from ..families.megatron import FAMILIES, Split


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter or buffer and the HF tensors that contain its values. A parameter can hold all experts of
    the rank."""

    name: str
    """Name of the parameter or buffer in this rank's Megatron model."""
    hf_names: tuple[str, ...]
    """Names of the corresponding tensors in the HF model."""
    split: Split

    @property
    def is_expert(self) -> bool:
        """True if the parameter belongs to experts, which are divided over the expert-parallel ranks."""
        return self.split.startswith("expert")


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of the weights: the number of equal parts and this rank's part, by kind of parallelism."""

    tp: int = 0
    num_tp: int = 1
    etp: int = 0
    """Index of this rank's part of the matrices of each expert, from 0 to `num_etp` - 1."""
    num_etp: int = 1
    ep: int = 0
    """Index of the group of experts that this rank holds, from 0 to `num_ep` - 1."""
    num_ep: int = 1


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def hf_layer(hf_name: str) -> int | None:
    """Return the number of the decoder layer that a HF tensor belongs to; None for a tensor outside the layers."""
    found = _HF_LAYER.fullmatch(hf_name)
    return int(found[1]) if found else None


def split_of(hf_name: str, kind: str) -> Split:
    """Return how the Megatron tensor that contains this HF tensor of a model of type `kind` is split.

    Raises ValueError when there is none.
    """
    if hf_name in (EMBEDDING, HEAD):
        return "vocabulary"
    if hf_name == NORM:
        return "whole"
    found = _HF_LAYER.fullmatch(hf_name)
    if found is not None:
        for row in FAMILIES[kind].rows:
            if found[2] in row.hf_names:
                return row.split
    raise ValueError(f"megatron weights: HF tensor {hf_name!r} has no counterpart in a Megatron model of type {kind!r}")


def entries_of(names: Sequence[str], first_layer: int, config: Any) -> list[Entry]:
    """Return an entry for each of the tensors `names` of a pipeline stage, with its HF tensors, in this order.

    `first_layer` is the index of the stage's first layer in the whole model. `config` is the HF config. Raises
    ValueError for a name without a HF counterpart.
    """
    return [Entry(name, *_counterpart(name, first_layer, config)) for name in names]


def _counterpart(name: str, first_layer: int, config: Any) -> tuple[tuple[str, ...], Split]:
    if name == "embedding.word_embeddings.weight":
        return (EMBEDDING,), "vocabulary"
    if name == "output_layer.weight":  # A tied output layer shares the embedding's weights.
        return (EMBEDDING if config.tie_word_embeddings else HEAD,), "vocabulary"
    if name == "decoder.final_layernorm.weight":
        return (NORM,), "whole"
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        for row in FAMILIES[config.model_type].rows:
            if layer[2] == row.name:
                return tuple(f"model.layers.{int(layer[1]) + first_layer}.{hf}" for hf in row.hf_names), row.split
    raise ValueError(f"megatron weights: {name!r} has no counterpart in a HF model of type {config.model_type!r}")


def expert_range(config: Any, part: Part) -> tuple[int, int]:
    """Return the range of the experts that an expert-parallel rank holds, as (first, one past the last)."""
    size = num_experts(config) // part.num_ep
    return part.ep * size, (part.ep + 1) * size


def split_dim(entry: Entry, part: Part) -> int | None:
    """Return the dimension along which ranks divide the HF tensors; None when every rank has all of them."""
    if entry.is_expert:
        if part.num_etp == 1:
            return 0 if part.num_ep > 1 else None
        return 2
    if entry.split == "whole" or part.num_tp == 1:
        return None
    return 1 if entry.split == "columns" else 0


def boxes(entry: Entry, tensor: torch.Tensor, config: Any, part: Part) -> Iterator[torch.Tensor]:
    """Turn the rank's part of an entry into boxes, which are rectangular parts of HF tensors. The inverse of `unbox`.

    `tensor` has the shape of the entry's parameter; one box is yielded for each of its `hf_names`. A box is made when
    it is requested, and some are copies. Vocabulary boxes come without the padding. Gate and up matrices of experts,
    which are one HF tensor, come as one box `[experts, 2, rows, columns]`.
    """
    if entry.is_expert:
        yield tensor.unflatten(1, (2, -1)) if entry.split == "expert_gated" else tensor
    elif entry.split == "vocabulary":
        yield tensor[: _tokens(config, part)]
    elif entry.split == "gated":
        yield from tensor.chunk(2)
    elif entry.split == "heads":
        groups = tensor.unflatten(0, (config.num_key_value_heads // part.num_tp, -1))
        queries = config.num_attention_heads // config.num_key_value_heads
        width = groups.shape[1] // (queries + 2)
        for piece in groups.split([queries * width, width, width], 1):
            yield piece.flatten(0, 1)
    else:
        assert entry.split in ("whole", "columns", "rows"), entry
        yield tensor


def unbox(entry: Entry, parts: Sequence[torch.Tensor], config: Any, part: Part) -> torch.Tensor:
    """Turn boxes, which are parts of HF tensors, back into the rank's Megatron parameter. The inverse of `boxes`."""
    first = parts[0]
    if entry.is_expert:
        return first.flatten(1, 2) if entry.split == "expert_gated" else first
    if entry.split == "vocabulary":
        missing = ceil_div(config.vocab_size, part.num_tp) - len(first)
        return torch.cat([first, first.new_zeros(missing, *first.shape[1:])])
    if entry.split == "gated":
        return torch.cat(list(parts))
    if entry.split == "heads":
        num = config.num_key_value_heads // part.num_tp
        return torch.cat([piece.unflatten(0, (num, -1)) for piece in parts], 1).flatten(0, 1)
    assert entry.split in ("whole", "columns", "rows"), entry
    return first


def cut(entry: Entry, tensors: Sequence[torch.Tensor], config: Any, part: Part) -> torch.Tensor:
    """Cut the rank's part of an entry, the values of its parameter, from whole HF tensors.

    `tensors` are in the order of the entry's `hf_names`. Stacked experts must contain only the rank's own
    (`expert_range`).
    """
    wholes = [tensor.unflatten(1, (2, -1)) if entry.split == "expert_gated" else tensor for tensor in tensors]
    dim = split_dim(entry, part)
    if dim is None or (entry.is_expert and dim == 0):
        return unbox(entry, wholes, config, part)
    rank, num = (part.etp, part.num_etp) if entry.is_expert else (part.tp, part.num_tp)
    return unbox(entry, [whole.chunk(num, dim)[rank] for whole in wholes], config, part)


def _tokens(config: Any, part: Part) -> int:
    """Return how many rows of this rank's part of the vocabulary belong to tokens; the others are padding."""
    width = ceil_div(config.vocab_size, part.num_tp)
    return min(width, config.vocab_size - part.tp * width)
