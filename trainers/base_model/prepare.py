"""Prepares the model that a run starts from: the user's own, or the built-in one, made and warmed up here."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import safe_open

from ...actors.engines.config import BUILTIN_MODELS, ModelConfig, RouterReplayConfig
from ...actors.images.config import ImagesConfig
from ...codecs.schema import DTYPES
from ...codecs.tokens.routes import RouteSpec
from ..backends.fsdp.bitwise.conditions import check_family
from ..backends.lora_config import LoraConfig
from ..backends.model_split import check_split
from ..backends.vision.tower_costs import pixels_of_token
from ..config.config import Config, WarmupConfig
from ..config.store_demand import StoreDemand
from ..errors import UserError
from ..observe.progress import Progress
from ..observe.run_folder import RunFolder

TINY_QWEN3: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Qwen3Config of `builtin:tiny-qwen3`. With 100 k parameters it is the smallest size that learns the quickstart's
task."""
TINY_QWEN3_MOE: dict[str, Any] = {
    **TINY_QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Qwen3MoeConfig of `builtin:tiny-qwen3-moe`. The two experts of a token are together as wide as the MLP of
`builtin:tiny-qwen3`."""

WARMUP = "warmup"
"""Name of the folder in the run folder with the supervised run that warmed up the model on a file."""
ROUNDED = "rounded_base"
"""Name of the folder in the run folder with the rounded base of an adapter."""


def prepare_model(wanted: ModelConfig, training: WarmupConfig, seed: int, folder: RunFolder, progress: Progress) -> str:
    """Return the path or hub id of the model to start from. The model must have passed `check_model`, and a warm-up on
    a file must be done.

    The built-in model is made in the run folder (`base_model/`) from `seed` alone and warmed up as `training` says; a
    resumed run finds it there. Warm-up is a separate phase that no training metric includes.
    """
    if training.on_file:
        return str(folder.path / WARMUP / "model")
    if not wanted.builtin:
        return wanted.path
    path = folder.path / "base_model"
    if path.exists():
        return str(path)
    start = time.perf_counter()
    progress.phase("making the base model")

    def show(step: int, loss: float) -> None:
        progress.phase("supervised warm-up of the base model", step, training.steps, f"loss {loss:.3f}")

    loss = make_builtin(path, model_config(wanted), training, seed, show)
    fields = {} if loss is None else {"loss": loss}
    folder.metrics.event("warmup", 0, seconds=round(time.perf_counter() - start, 2), **fields)
    return str(path)


def make_builtin(
    path: Path, shape: Mapping[str, Any], training: WarmupConfig, seed: int, show: Callable[[int, float], None]
) -> float | None:
    """Make a built-in model in the new folder `path`, and warm it up unless `warmup.corpus` is `none`. Returns the loss
    of the warm-up, or None. shape: content of the model's config.json. show: see `warm_up`."""
    # Importing torch and transformers takes seconds, which a dry run must not spend.
    from . import made_tokenizers, warmup

    tokenizer, model = made_tokenizers.make_tokenizer(), warmup.make_model(shape, seed)
    loss = None if training.corpus == "none" else warmup.warm_up(model, tokenizer, training, seed, show)
    draft = path.with_name(f"{path.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(path)
    return loss


def prepare_base(model: str, lora: LoraConfig, folder: RunFolder, progress: Progress) -> str:
    """Return the path or hub id of the model with which engines start: `model`, or that with rounded weights.

    The rounded base is made in the run folder (`rounded_base/`), where a resumed run finds it. Raises UserError if the
    model cannot be rounded or the folder is damaged, and MissingExtra if the library that rounds is not installed.
    """
    if not lora.rounds or lora.base == "model":
        return model
    path = folder.path / ROUNDED
    if path.exists():
        check_weight_files(path)
    else:
        from . import rounded_base  # It imports torch and transformers.

        rounded_base.write_rounded(model, lora.base, path, progress)
    return str(path)


def unrounded(model: ModelConfig, rounded: str) -> str:
    """Return the folder or hub id of the model whose rounded weights are in the folder `rounded` of a run folder."""
    return str(Path(rounded).with_name("base_model")) if model.builtin else model.path


def model_config(model: ModelConfig) -> dict[str, Any]:
    """Return the content of the model's config.json; {} for a hub id whose config is not on this machine.

    The number of experts is always under the key `num_experts`, even for newer versions of transformers, which write it
    as `num_local_experts`. The sizes of the language part of a vision-language model stand at the top, too.
    """
    if model.builtin:
        return TINY_QWEN3_MOE if model.path == BUILTIN_MODELS[1] else TINY_QWEN3
    path = _config_file(model.path)
    content = {} if path is None else _json_object(path)
    if isinstance(content.get("text_config"), dict):
        content = {**content["text_config"], **content}
    if "num_local_experts" in content:
        content.setdefault("num_experts", content["num_local_experts"])
    return content


def _config_file(model: str) -> Path | None:
    """Return the path of the config.json of a model, or None if it is not on this machine.

    model: a folder, or a hub id, whose files are looked for in the Hugging Face cache.
    """
    path = Path(model) / "config.json"
    if Path(model).is_dir() or model.count("/") > 1:
        return path if path.exists() else None
    from huggingface_hub import try_to_load_from_cache  # Runs whose model is a folder do not need it.

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # The path is no hub id.
        return None
    return Path(found) if isinstance(found, str) else None


def _fetch_config(hub_id: str) -> None:
    """Download the config.json of a model to the Hugging Face cache. Raises UserError if that is impossible."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(hub_id, "config.json")
    except Exception as error:  # The library raises its own errors and those of the network.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"router_replay.enabled: got true with model.path={hub_id!r}, expected a folder with a config.json, or a "
            f"hub id whose config.json can be downloaded ({reason})"
        ) from error


def _json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises UserError, which names the file, if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: {path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"model.path: {path} holds a {type(content).__name__}, expected an object")
    return content


def check_weight_files(folder: Path) -> None:
    """Raise UserError if a safetensors file of a model folder is damaged or missing. The header of a file says its
    size, so the weights themselves are not read."""
    index = folder / "model.safetensors.index.json"
    named = set(_json_object(index).get("weight_map", {}).values()) if index.exists() else {"model.safetensors"}
    for path in (folder / str(name) for name in sorted(named)):
        if path.exists():
            try:
                with safe_open(path, "np"):
                    pass
            except Exception as error:  # The library has its own error, and files can raise any OSError.
                raise UserError(f"model.path: {path} is not a complete safetensors file ({error})") from error
        elif index.exists():
            raise UserError(f"model.path: {path} does not exist, expected it, because {index.name} names it")


def model_modules(model: ModelConfig) -> tuple[str, ...]:
    """Return the name of the transformers module that contains the model's code. Its import takes seconds. Returns ()
    if the model's type is not known."""
    kind = model_config(model).get("model_type", "qwen3" if model.builtin else None)
    return (f"transformers.models.{kind}.modeling_{kind}",) if kind else ()


def route_spec(replay: RouterReplayConfig, model: ModelConfig) -> RouteSpec | None:
    """Return the shape of the model's routes; None without router replay. Routes are the experts that the engine chose
    for each token; with router replay, rows carry them. Downloads the config of a hub id that is not on this machine.
    Raises UserError if router replay is on and the model has no experts, or its config cannot be read."""
    if not replay.enabled:
        return None
    if not model.builtin and _config_file(model.path) is None:
        _fetch_config(model.path)
    spec = RouteSpec.of(SimpleNamespace(**model_config(model)))
    if spec is None:
        raise UserError(
            f"router_replay.enabled: got true with model.path={model.path!r}, expected false, because the model has no "
            "experts"
        )
    return spec


def sizes_in_store(replay: RouterReplayConfig, images: ImagesConfig, model: ModelConfig) -> tuple[int, int]:
    """Return the bytes of the routes of a token, and of the pixels of a picture's token, for `StoreDemand.of`.

    Pixels count nothing if the model's config is not on this machine.
    """
    routes, pixel_bytes = route_spec(replay, model), DTYPES[images.dtype].itemsize if images.enabled else 0
    return 0 if routes is None else routes.token_bytes, pixels_of_token(model_config(model)) * pixel_bytes


def model_has_experts(model: ModelConfig) -> bool:
    """Return whether the model has experts; False if its config is not on this machine."""
    return RouteSpec.of(SimpleNamespace(**model_config(model))) is not None


def check_model(config: Config) -> None:
    """Raise UserError when the model does not fit the rows or the run. That is the case if a file of the model is
    damaged, if the longest row exceeds the model's context, if the train mesh or an engine's processes cannot split the
    model, if router replay is on for a model without experts, or if the store is too small for routes and pictures. If
    the model's config is not on this machine, the train backend checks the model at its start instead.
    """
    model = model_config(config.model)
    check_weight_files(Path(config.model.path).expanduser())
    try:
        check_split(config.trainer, SimpleNamespace(**model))
        if config.run.bitwise:
            check_family(SimpleNamespace(**model), config.rollout.engine)
    except ValueError as error:
        raise UserError(str(error)) from None
    sizes = sizes_in_store(config.router_replay, config.data.images, config.model)
    if problems := StoreDemand.of(config, *sizes).problems(config.dataplane.store.capacity_mib):
        raise UserError(problems[0])
    tp, heads = config.rollout.tp, model.get("num_attention_heads")
    if config.rollout.engine == "vllm" and heads and heads % tp:
        raise UserError(f"rollout.tp: got {tp}, expected a divisor of the model's num_attention_heads = {heads}")
    context = model.get("max_position_embeddings")
    for key, length in (config.sequence_lengths | {"rollout.max_model_len": config.rollout.max_model_len or 0}).items():
        if context is not None and length > context:
            raise UserError(f"{key}: got {length}, expected at most {context}, the context of {config.model.path}")
