"""Reads and writes adapters as folders in PEFT's format (`adapter_config.json`, `adapter_model.safetensors`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .spec import PARTS, PREFIX

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the adapter",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "scalings that differ between modules",
    "lora_bias": "biases",
    "trainable_token_indices": "tokens",
}
"""Entries of PEFT's configuration, other than their default, that change what an adapter computes, with what they
stand for."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter that was read from a folder."""

    rank: int
    alpha: float
    base: str
    """Name of the model that the folder names as the adapter's base."""
    tensors: Mapping[str, torch.Tensor]
    """Tensors by their names in PEFT's format, float32."""


def write_adapter(
    path: str,
    *,
    base: str,
    rank: int,
    alpha: float,
    dropout: float,
    tensors: Mapping[str, torch.Tensor],
    parameters: Iterable[str] = (),
) -> None:
    """Write an adapter as the new folder `path`, so that `PeftModel.from_pretrained(model, path)` loads it.

    base: folder or hub id of the model to which it belongs. tensors: its matrices by their names in PEFT's format.
    parameters: names of the weights of stacked experts that have matrices; all others belong to linear layers.
    """
    parameters = sorted(parameters)
    stacked = {name.rpartition(".")[0] for name in parameters}
    folder = Path(path)
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted(one for one in plain_names(tensors) if one.removesuffix(".base_layer") not in stacked),
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS)


def read_adapter(path: str) -> AdapterFolder:
    """Read the adapter in the folder `path`, as PEFT or `write_adapter` wrote it.

    Raises ValueError, which names the key `model.adapter`, if it is no such folder, or if its adapter is not a plain
    LoRA adapter of linear layers.
    """
    folder = Path(path)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"model.adapter: got {path!r}, expected a folder in PEFT's format; it has no {name}")
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = {name: tensor.float() for name, tensor in load_file(folder / TENSORS).items()}
    except Exception as error:
        raise ValueError(f"model.adapter: {path!r} cannot be read: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"model.adapter: got {path!r}, of the type {config.get('peft_type')!r}, expected 'LORA'")
    for key, words in _REFUSED.items():
        if config.get(key):
            raise ValueError(f"model.adapter: {path!r} has {words} ({key}={config[key]!r}), expected plain LoRA")
    rank = int(config["r"])
    alpha = float(config["lora_alpha"])
    if config.get("use_rslora"):  # The scaling is alpha / sqrt(rank) there.
        alpha *= rank**0.5
    return AdapterFolder(rank, alpha, str(config.get("base_model_name_or_path") or ""), tensors)


def plain_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the modules that have matrices among `tensors`, which have names of PEFT's format."""
    return {name[len(PREFIX) : -len(part)] for name in tensors for part in PARTS if name.endswith(part)}
