"""Loads a HF causal LM for training and writes trained weights back as a HF model folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from .checkpoints.checkpoint import draft_of, publish, start_draft

SHARD_BYTES = 4 << 30
"""Largest size of one weight file in bytes. Writing a file needs that much additional host memory."""


def load_causal_lm(model: str) -> Any:
    """Load the HF model of a local folder or hub id in float32 on the CPU, with dropout off.

    Dropout stays off in training too, because its noise would make the log-probs of one policy differ between two
    passes. Raises ValueError when there is no such model.
    """
    hf_logging.disable_progress_bar()  # a bar per rank would garble the run's own progress display
    try:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    except OSError as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"model.path: got {model!r}, expected a folder with a HF causal LM or a hub id of one ({reason})"
        ) from error


def write_folder(path: str, model: Any, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Write `weights`, the model's config and the tokenizer of the folder or hub id `source` as the HF folder `path`.

    If the folder `source` has no tokenizer, none is written. Only one rank may call this. The folder `path` appears
    whole or not at all. Raises ValueError when it exists already.
    """
    start_draft(path)
    # Persistent buffers belong to the folder too; a model on the meta device has no values for them.
    kept = model.state_dict(keep_vars=True)
    buffers = {name: value for name, value in model.named_buffers() if name in kept and not value.is_meta}
    model.save_pretrained(draft_of(path), state_dict={**weights, **buffers}, max_shard_size=SHARD_BYTES)
    if not os.path.isdir(source) or os.path.exists(os.path.join(source, "tokenizer_config.json")):
        AutoTokenizer.from_pretrained(source).save_pretrained(draft_of(path))
    publish(path)


def collect(stream: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, torch.Tensor]:
    """Read the pairs (name, tensor) of `stream` to the end and return copies of the tensors in host memory, by name.
    Without `keep` the tensors are dropped and the result is {}."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream if keep}
