"""Finds the recipes of `examples/`, and writes offline forms with stand-ins for models and data sets.

A recipe is a folder with a configuration, a page about it, and a description of the stand-ins for its files:

model      a folder with the model's shape and a byte-level tokenizer; with `small` a tiny model with random weights
data sets  .jsonl files with rows of the same columns
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..dataplane.config import Section
from .errors import UserError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class RecipeFile(Section):
    """The content of a recipe's recipe.yaml."""

    summary: str
    """Model and task of the training, in a few words."""
    hardware: str
    """Machine for which the configuration is written, in a few words."""
    machine: str | None = None
    """The same machine, in the form of the option `--machine` of `headrace train --dry-run`. Unset: any machine without
    GPUs."""
    model: dict[str, Any] = {}
    """Content of the model's config.json. A stand-in of the same shape is made from it. Empty: the recipe
    needs no stand-in for its model."""
    rows: dict[str, tuple[dict[str, Any], ...]] = {}
    """Key of a source of prompts (such as `data.train`) -> rows with the columns of that data set."""
    small: dict[str, Any] = {}
    """Dotted config key -> its value in the scaled-down form, in addition to the keys that every recipe scales down."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One recipe."""

    name: str
    """Name of its folder."""
    folder: Path
    file: RecipeFile

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.folder / "config.yaml"


def recipes() -> Mapping[str, Recipe]:
    """Return all recipes by name, in alphabetical order."""
    found = {}
    for path in sorted(EXAMPLES.glob("*/recipe.yaml")):
        content = RecipeFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        found[path.parent.name] = Recipe(path.parent.name, path.parent, content)
    return found


def find_recipe(name: str) -> Recipe:
    """Return the recipe called `name`. Raises UserError if there is none."""
    known = recipes()
    if name not in known:
        raise UserError(f"recipe: got {name!r}, expected one of {', '.join(known)}")
    return known[name]


def configurations() -> Mapping[str, Path]:
    """Return the configurations of `examples/` by the name of their file, such as `quickstart`, or of their folder."""
    files = {path.stem: path for path in EXAMPLES.glob("*.yaml")}
    folders = {path.parent.name: path for name in ("run", "config") for path in EXAMPLES.glob(f"*/{name}.yaml")}
    return dict(sorted({**files, **folders}.items()))


def find_configuration(name: str) -> Path:
    """Return the configuration called `name`. Raises UserError if there is none."""
    known = configurations()
    if name not in known:
        raise UserError(f"recipe: got {name!r}, expected one of {', '.join(known)}")
    return known[name]


def copy_example(config: Path, folder: Path) -> Path:
    """Copy a configuration into the new folder `folder`, with the other files of its folder if it has one of its own.
    Returns the path of the copy. Raises UserError if `folder` is not empty."""
    _require_new(folder)
    if config.parent == EXAMPLES:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(config, folder / "config.yaml"))
    shutil.copytree(config.parent, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return folder / config.name


def _require_new(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: {folder} is a file, expected a folder or a new name")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty, expected a new folder")


_ROWS = 64
"""Number of rows of a stand-in for a data set."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Chat template with the same arguments as Qwen3's template."""
_SMALL_MODEL = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
"""Dimensions of the tiny model. Only keys that the config of the recipe's model contains are set."""
_SMALL_RUN: Mapping[str, Any] = {
    "rollout.engine": "hf",
    "rollout.max_new_tokens": 16,
    "trainer.backend": "fsdp",
    "trainer.tokens_per_microbatch": 2048,
    "trainer.lr": 1e-4,
    "algorithm.steps": 2,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 4,
    "run.checkpoint_minutes": 0,
    "resources.threads": 1,
    "logging.tensorboard": False,
}
"""Dotted config key -> its value in the scaled-down form of every recipe."""
_LEFT_OUT = (
    "model.dtype", "resources.layout", "resources.ray_address", "resources.switch_roles", "rollout.num_engines",
    "rollout.num_actors", "rollout.tp", "rollout.max_batch", "rollout.max_model_len", "rollout.kv_cache",
    "rollout.gpu_memory_utilization", "rollout.vllm", "trainer.dp", "trainer.tp", "trainer.pp", "trainer.cp",
    "trainer.ep", "trainer.sequence_parallel", "trainer.distributed_optimizer", "trainer.offload", "trainer.recompute",
    "trainer.mixed_precision", "trainer.packing", "trainer.warmup_steps", "trainer.warmup_ratio", "trainer.head",
    "trainer.offload_optimizer", "trainer.fp8", "algorithm.chunk_groups", "algorithm.minibatches",
    "validation.max_new_tokens",
)  # fmt: skip
"""Keys about GPUs and sizes that the scaled-down form leaves at their defaults."""


def write_offline(recipe: Recipe, folder: Path, *, small: bool) -> list[str]:
    """Write `config.yaml` and the stand-ins that it names into `folder`. Returns one sentence for each replacement.

    small: True also replaces the model by a tiny one with random weights and shortens the run, so that it trains on a
    CPU in a minute. Otherwise the model folder has no weights, and suits only `headrace train --dry-run`. Raises
    UserError if `folder` is not empty.
    """
    _require_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_load(recipe.config.read_text(encoding="utf-8"))
    told: list[str] = []
    for key, rows in recipe.file.rows.items():
        told.append(_replace_rows(config, key, rows, folder))
    if small:
        for key in _LEFT_OUT:
            _drop(config, key)
        for key, value in {**_SMALL_RUN, **recipe.file.small}.items():
            _put(config, key, value)
        told.append(_shortened(config))
    if recipe.file.model:
        told.append(_replace_model(config, recipe, folder, small=small))
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return told


def _replace_rows(config: dict[str, Any], key: str, rows: tuple[dict[str, Any], ...], folder: Path) -> str:
    given, path = _get(config, key), folder / f"{key.replace('.', '-')}.jsonl"
    lines = [json.dumps(rows[index % len(rows)], ensure_ascii=False) for index in range(_ROWS)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    _put(config, key, str(path))
    section, _, name = key.rpartition(".")
    for of_data_set in (
        ("subset", "split") if name in ("train", "source") else ("validation_subset", "validation_split")
    ):
        _drop(config, f"{section}.{of_data_set}")
    if key == "data.train" and "validation_split" in config["data"]:  # Validation reads the same data set.
        for of_data_set in ("validation_subset", "validation_split"):
            _drop(config, f"data.{of_data_set}")
        _put(config, "data.validation", str(path))
    return f"{key}: {given} is replaced by {path}, {_ROWS} rows with its columns ({', '.join(rows[0])})"


def _shortened(config: dict[str, Any]) -> str:
    """Shorten validations and evaluations, and return a sentence about the scaled-down run."""
    validation = config.setdefault("validation", {})
    if validation.get("every", 1):
        validation |= {"num_prompts": 4, "every": 2}
    for one in (config.get("evaluation") or {}).values():
        one |= {"num_prompts": 4, "every": 2, "max_new_tokens": 16, "n": min(one.get("n", 1), 4)}
    algorithm = config["algorithm"]
    return (
        f"the run: {algorithm['steps']} steps of {algorithm['prompts_per_step']} x {algorithm['group_size']} samples "
        f"of up to {config['rollout']['max_new_tokens']} tokens, with the engine hf and the backend fsdp "
        "on one train worker"
    )


def _replace_model(config: dict[str, Any], recipe: Recipe, folder: Path, *, small: bool) -> str:
    from .base_model.made_tokenizers import byte_level_tokenizer  # Importing transformers takes seconds.

    given, path, shape = config["model"]["path"], folder / "model", dict(recipe.file.model)
    tokens = 256 + 3 if small else shape["vocab_size"]
    tokenizer = byte_level_tokenizer(min(tokens, 512))
    tokenizer.chat_template = _CHAT_TEMPLATE
    ends = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    if small:
        shape |= {key: value for key, value in _SMALL_MODEL.items() if key in shape}
        shape |= {"vocab_size": tokens, "max_position_embeddings": 4096}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**shape, **ends}, indent=1) + "\n")
    if small:
        _write_weights(path, config.get("run", {}).get("seed", 0))
    tokenizer.save_pretrained(path)
    config["model"]["path"] = str(path)
    what = "a tiny model of its kind with random weights" if small else "a folder with its shape, without weights"
    return f"model.path: {given} is replaced by {path}, {what}, and a tokenizer of bytes"


def _write_weights(path: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).save_pretrained(path)


# ---------------- These functions read and change values by dotted keys.


def _get(config: Mapping[str, Any], key: str) -> Any:
    here: Any = config
    for name in key.split("."):
        here = here[name]
    return here


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    here = config
    for section in sections:
        here = here.setdefault(section, {})
    here[name] = value


def _drop(config: dict[str, Any], key: str) -> None:
    *sections, name = key.split(".")
    here = config
    for section in sections:
        here = here.get(section) or {}
    here.pop(name, None)
