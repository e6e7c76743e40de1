"""Checks the models beside the policy, a reference model and teachers: they must exist and have its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....actors.engines.config import ModelConfig
from ...base_model.prepare import check_weight_files, model_config
from ...errors import ConfigError
from .prompts import is_here, load_or_make_tokenizer


def check_other_models(policy: ModelConfig, models: Sequence[tuple[str, str]], longest: int = 0) -> list[str]:
    """Check each of `models`, given as (key, folder or hub id). Returns a line for each model that only the run itself
    can check, because it or the policy is not on this machine.

    Their log-probs are compared token by token, so a token id must mean the same text for all of them. longest: number
    of tokens of the longest row that is trained on. Raises ConfigError with one sentence for each model that does not
    exist, is damaged, or has another vocabulary or a shorter context.
    """
    problems, left = list[str](), list[str]()
    known = policy.builtin or is_here(policy.path)
    own = _vocabulary(load_or_make_tokenizer(policy)) if models and known else None
    for key, path in models:
        folder = Path(path).expanduser()
        if not folder.is_dir() and (":" in path or path.startswith(("/", ".", "~")) or path.count("/") > 1):
            problems.append(f"{key}: got {path!r}, expected an existing model folder or a hub id")
        elif own is None or not is_here(path):
            left.append(f"{key}: {path} or the policy is not on this machine, so their vocabularies are not compared")
        else:
            try:
                check_weight_files(folder)
                problems += _differences(key, path, own, policy) or _too_short(key, path, longest)
            except ValueError as error:
                problems.append(f"{key}: {error}")
    if problems:
        raise ConfigError(problems)
    return left


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    return tokenizer.get_vocab()


def _differences(key: str, path: str, own: dict[str, int], policy: ModelConfig) -> list[str]:
    """Return one sentence in a list if the model at `path` has another vocabulary than `own`, the policy's; else []."""
    other = _vocabulary(load_or_make_tokenizer(ModelConfig(path=path)))
    wrong = sorted(own.items() ^ other.items(), key=lambda pair: pair[1])
    expected = f"expected a model with the vocabulary of model.path={policy.path!r}"
    if wrong:
        token, number = wrong[0]
        where = "both have it at different places" if token in own and token in other else "only one of them has it"
        return [
            f"{key}: got {path!r}, {expected}: they differ in {len(wrong)} entries, first {token!r} ({number}); {where}"
        ]
    size, needed = model_config(ModelConfig(path=path)).get("vocab_size"), max(own.values(), default=0) + 1
    if size is not None and size < needed:
        return [f"{key}: got {path!r} with vocab_size={size} in its config.json, {expected}, which has {needed} tokens"]
    return []


def _too_short(key: str, path: str, longest: int) -> list[str]:
    """Return one sentence in a list if the context of the model at `path` is shorter than `longest` tokens; else []."""
    context = model_config(ModelConfig(path=path)).get("max_position_embeddings")
    if context is None or context >= longest:
        return []
    return [
        f"{key}: got {path!r} with max_position_embeddings={context} in its config.json, expected a context of at "
        f"least {longest} tokens, the longest row that is trained on"
    ]
