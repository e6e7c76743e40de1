"""Makes what a Hugging Face model computes for a row independent of the other rows of its batch.

Some models read more than a row's own positions. Engine and train backend both use this module, so that they compute
the same policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def fix_rotary_length(model: Any, length: int | None) -> int | None:
    """Make rotary embeddings choose their frequencies for contexts of `length` tokens, whatever rows a batch has.

    A `longrope` model (Phi-3, Phi-4-mini) has two sets of frequencies, for contexts up to its original length and for
    longer ones. `dynamic` NTK scaling computes them from the length. transformers looks at the longest row of each
    batch; vLLM decides once, by the largest context of the engine.

    model: a Hugging Face causal LM, possibly on the meta device. length: number of tokens that no row exceeds; None:
    the model's own limit. Returns the length that rows must not exceed; None if the model has no such embeddings or its
    limit is unknown.
    """
    if length is None:
        length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    scaled = [module for module in model.modules() if _scales_by_longest_row(module)]
    if not scaled or length is None:
        return None
    for module in scaled:
        # The embeddings choose by the largest position that they get. They therefore get the position `length - 1` in
        # addition, and its result is dropped.
        module.register_forward_pre_hook(partial(_add_position, length - 1), with_kwargs=True)
        module.register_forward_hook(_drop_position)
    return length


def _scales_by_longest_row(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)  # a dictionary where types of layers differ
    kinds = kinds.values() if isinstance(kinds, Mapping) else (kinds,)
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def _add_position(last: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Append the position `last` to the positions of each row, int64 `[..., S]`."""
    given: Any = kwargs if "position_ids" in kwargs else list(args)
    key = "position_ids" if given is kwargs else 1
    positions = given[key]
    given[key] = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), last)], dim=-1)
    return (args, kwargs) if given is kwargs else (tuple(given), kwargs)


def _drop_position(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Drop the last position from the angles, `[..., S + 1, D]`, or from each of several tensors of them."""
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)


def counts_columns(config: Any, columns: int) -> bool:
    """Return whether attention depends on a token's column in the batch, and not only on its position in its row.

    It does with Llama 4's temperature tuning in transformers, once a batch has `floor_scale` columns: padding on the
    left and packed rows move a row's tokens to later columns. config: the model's config, or an object with the content
    of its config.json. columns: largest number of columns of a batch.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "attn_temperature_tuning", False)) and columns >= getattr(text, "floor_scale", 1)
