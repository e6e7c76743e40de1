"""Loads a Hugging Face causal LM for the `hf` engine and checks that it can decode with a cache."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

_FORWARD_ARGUMENTS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep")
_CACHE_ARGUMENTS = ("cache", "past_key_values")  # the name since transformers 5.24, and the one before


def model_stop_ids(model: Any) -> np.ndarray:
    """Return the ids of the end-of-sequence tokens in the model's generation config, int64."""
    ids = model.generation_config.eos_token_id
    return np.array([] if ids is None else np.atleast_1d(ids), dtype=np.int64)


@functools.cache
def cache_argument(model: type) -> str | None:
    """Return the name of the argument in which this class of models takes a key-value cache; None if it takes none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in accepted), None)


def load_model(path: str, dtype: torch.dtype) -> torch.nn.Module:
    """Load a decoder-only causal LM on the CPU, in eval mode, from a local folder or a hub id.

    Raises ValueError with a one-sentence message when there is no such model, or when its `forward` lacks an argument
    that decoding with a cache needs.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise ValueError(f"model: got {path!r}, expected a folder that exists or a hub id (organisation/name)")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"model: {path!r} has no config.json, expected a Hugging Face model folder")
    disable_progress_bar()  # the bars of all actors would be drawn over the run's own display
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder) if folder.is_dir() else path, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model: {path!r} could not be loaded as a causal LM: {reason}") from error
    accepted = inspect.signature(model.forward).parameters
    missing = [name for name in _FORWARD_ARGUMENTS if name not in accepted]
    if cache_argument(type(model)) is None:
        missing.append("key-value cache")
    if missing:
        raise ValueError(
            f"model: {type(model).__name__} takes no {', '.join(missing)}; the hf engine needs a decoder-only model"
        )
    return model.eval()
