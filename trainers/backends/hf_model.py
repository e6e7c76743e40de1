"""HF model folders: load a causal LM for training, gather its full weights, write it back as a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from .checkpoint import draft_of, publish, start_draft


def load_causal_lm(model: str) -> Any:
    """The HF model of a local folder or hub id, float32, on the CPU, dropout off.

    Dropout stays off in training: it would show up as a ratio between the policy and itself. Raises ValueError when
    there is no such model.
    """
    hf_logging.disable_progress_bar()  # one bar a rank would tear up the run's own progress
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"trainer.model: got {model!r}, expected a folder with a HF causal LM or a hub id of one ({reason})"
        ) from error


def full_weights(model: torch.nn.Module, dtype: torch.dtype, *, keep: bool) -> dict[str, torch.Tensor]:
    """HF name -> full CPU tensor of `dtype`, the caller's own; {} when not `keep`. Collective if the model is sharded.

    Tensors are gathered one by one, so no rank holds more than one full tensor besides what `keep` collects. Tied
    weights come under each of their names: an engine that is sent only `embed_tokens` would keep its old `lm_head`.
    """
    weights: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():  # tied weights are one and the same object then
        first = first_name.setdefault(id(value), name)
        if first == name:
            full = _gathered(value).detach()
            if keep:
                weights[name] = full.to("cpu", dtype if full.is_floating_point() else full.dtype, copy=True)
        elif keep:
            weights[name] = weights[first]
    return weights


def _gathered(value: torch.Tensor) -> torch.Tensor:
    """Mesh dimension by dimension, the first one first: torch warns of an order that it cannot merge otherwise."""
    if not isinstance(value, DTensor):
        return value
    placements = list(value.placements)
    whole: Any = value.to(value.device_mesh.device_type)  # offloaded parts are where the ranks' group cannot reach them
    for dim in range(len(placements)):
        placements[dim] = Replicate()
        whole = whole.redistribute(placements=placements)
    return whole.to_local()


def write_folder(path: str, model: Any, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Write `weights` with the model's config as a HF folder, and the tokenizer of `source` if it has one. One rank.

    The folder appears whole or not at all. Raises ValueError when `path` exists.
    """
    start_draft(path)
    model.save_pretrained(draft_of(path), state_dict=dict(weights))
    if not os.path.isdir(source) or os.path.exists(os.path.join(source, "tokenizer_config.json")):
        AutoTokenizer.from_pretrained(source).save_pretrained(draft_of(path))
    publish(path)
