"""Writes the base of an adapter with its weights rounded to 8 or 4 bits, from which engines generate.

model.path --round on the CPU--> integers and scales --restore--> rounded_base/, float32 --> engines
    \\--> train workers: the same integers and scales, whose restored weights are compared with rounded_base/
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils.hub import cached_file

from ...actors.engines.tokenizer import has_tokenizer, load_tokenizer
from ..backends.hf_model import INDEX, HfSource
from ..backends.lora.adapted_layers import find_targets
from ..backends.lora.rounding import Rounding, rounded_weight
from ..backends.lora_config import LoraConfig
from ..errors import UserError
from ..observe.progress import Progress

_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
"""Endings of the files of a model folder that are copied: its configs, tokenizer and code."""


def write_rounded(model: str, kind: Rounding, path: Path, progress: Progress) -> None:
    """Write the model folder or hub id `model` with rounded weights as the folder `path`.

    The folder appears whole or not at all. The weight of each linear layer of the decoder, without routers and the
    output layer, is what remains of it after rounding, in float32. No more than one file of weights is in memory.
    Raises UserError if the model has no safetensors files, or if they do not contain such a weight as the model uses
    it, and MissingExtra if the library that rounds is not installed.
    """
    try:
        source = HfSource(model)
        names = [f"{name}.weight" for name in find_targets(source.empty_model(), LoraConfig())]
        wanted = {source.stored_name(name) for name in names}
    except ValueError as error:
        raise UserError(f"trainer.lora.base: got {kind!r}, which {model} does not allow: {error}") from error
    draft = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    files = sorted(set(source.files.values()))
    for number, file in enumerate(files, start=1):
        progress.phase(f"rounding the weights of the base to {kind}", number, len(files))
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name, at in source.files.items() if at == file}
        for name in wanted & tensors.keys():
            tensors[name] = rounded_weight(tensors[name], kind)
        save_file(tensors, draft / Path(file).name, metadata={"format": "pt"})
    _copy_rest(model, source.files, draft)
    draft.rename(path)


def _copy_rest(model: str, files: dict[str, str], draft: Path) -> None:
    """Copy configs and tokenizer of `model` to `draft`, and write the index of its weight files. files: tensor name ->
    path of its file in the model."""
    if has_tokenizer(model):
        load_tokenizer(model)  # This fetches the files of a hub id.
    config: Any = Path(model) / "config.json" if Path(model).is_dir() else cached_file(model, "config.json")
    for file in Path(config).parent.iterdir():
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, draft / file.name)
    if len(set(files.values())) > 1:
        size = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": {name: Path(at).name for name, at in files.items()}}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
