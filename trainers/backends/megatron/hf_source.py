"""Reads single tensors from a HF model folder, so that each rank reads only the weights of its part of the model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.hub import cached_file

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


class HfSource:
    """Gives access to the config and the safetensors weights of a local folder or hub id."""

    def __init__(self, model: str) -> None:
        """Read the config and the file of each tensor. Raises ValueError when there is no such model."""
        self._model = model
        try:
            self.config: Any = AutoConfig.from_pretrained(model)
            self._files = self._locate()
        except OSError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(
                f"trainer.model: got {model!r}, expected a folder with a HF causal LM or a hub id of one ({reason})"
            ) from error

    def tensor(self, name: str, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return the tensor `name` of the model in float32, or its `[start:stop]` along dimension 0.

        Names are the HF model's own. Experts that the folder stores one by one are stacked. Raises ValueError when the
        tensor does not exist.
        """
        if name in self._files:
            return self._read(name, start, stop)
        match = _EXPERTS.fullmatch(name)
        if match is None:
            raise ValueError(f"trainer.model: {self._model!r} has no tensor {name!r} in its safetensors files")
        prefix, kind = match.groups()
        experts = range(self.config.num_experts)[start:stop]
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        return torch.stack(
            [torch.cat([self._read(f"{prefix}.{e}.{part}.weight", None, None) for part in parts]) for e in experts]
        )

    def empty_model(self) -> Any:
        """Return the HF model without weights, for writing a model folder."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)

    def _read(self, name: str, start: int | None, stop: int | None) -> torch.Tensor:
        if name not in self._files:
            raise ValueError(f"trainer.model: {self._model!r} has no tensor {name!r} in its safetensors files")
        with safe_open(self._files[name], framework="pt") as opened:
            whole = start is None and stop is None
            found = opened.get_tensor(name) if whole else opened.get_slice(name)[start:stop]
        return found.float()

    def _locate(self) -> dict[str, str]:
        """Map each tensor's name to its file. Raises OSError when there are no safetensors files."""
        index = self._path(INDEX)
        if index is None:
            path = self._path(ONE_FILE)
            if path is None:
                raise OSError(f"no {ONE_FILE} and no {INDEX}")
            with safe_open(path, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), path)
        with open(index) as file:
            shards: dict[str, str] = json.load(file)["weight_map"]
        return dict(zip(shards, self._paths(shards.values()), strict=True))

    def _paths(self, names: Iterable[str]) -> list[str]:
        names = list(names)
        found = {name: self._path(name) for name in set(names)}
        missing = sorted(name for name, path in found.items() if path is None)
        if missing:
            raise OSError(f"{INDEX} names {missing[0]}, which is not there")
        return [str(found[name]) for name in names]

    def _path(self, name: str) -> str | None:
        if os.path.isdir(self._model):
            path = os.path.join(self._model, name)
            return path if os.path.exists(path) else None
        return cached_file(self._model, name, _raise_exceptions_for_missing_entries=False)
