"""Reads tokenizer and prompts as the rollout actors do later, to find mistakes in columns, templates and lengths."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....actors.engines.config import ModelConfig
from ....actors.protocols import PromptRow, PromptSource
from ....actors.rollout.config import RolloutConfig
from ....actors.rollout.data_config import DataConfig, is_generated
from ...cluster.rollout_specs import EvaluationPlan, sampling

READ_PROMPTS = 10_000
"""Largest number of prompts per source that are read to check their lengths. This takes about 4 seconds for prompts of
200 tokens."""


def read_prompts(
    model: ModelConfig,
    environment: str,
    rollout: RolloutConfig,
    training: DataConfig,
    seed: int,
    plans: Sequence[EvaluationPlan],
) -> list[str]:
    """Read the prompts as the rollout actors do later, to check tokenizer, columns, templates and lengths. environment:
    kind of the environment. rollout: section whose stop texts and stop token ids are checked, too. training: source of
    the prompts of training. plans: evaluations, with their own sources. Returns one line for each source that is not on
    this machine yet or is too large to be read in full now.
    """
    if not _is_here(model):
        return [f"model.path: {model.path} is not on this machine, so neither are its tokenizer nor the prompts"]
    from ....actors.engines.tokenizer import load_tokenizer
    from ....actors.rollout.prompts import check_prompt_lengths, open_source, without_overlong
    from ....actors.rollout.rows import check_columns
    from ...base_model.made_tokenizers import make_tokenizer

    left = []
    with _one_tokenizer_thread():
        tokenizer = make_tokenizer() if model.builtin else load_tokenizer(model.path)
        _check_stops(rollout, tokenizer)
        sets = [(plan.setup.data, True) for plan in plans]
        read = [(training, False), *sets]
        for data, validation in [(part, held) for whole, held in read for part in whole.parts(validation=held)]:
            name = data.source(validation=validation)
            if not _source_is_here(name):
                left.append(f"data: {name} is not on this machine, so its prompts are read when the run starts")
                continue
            source = open_source(data, tokenizer, seed=seed, validation=validation)
            if source.size is not None and source.size > READ_PROMPTS:
                left.append(f"data.max_prompt_tokens: only the first {READ_PROMPTS} of {source.size} prompts of {name}")
                source = _FirstPrompts(source, READ_PROMPTS)
            if not validation and environment in ("single_turn", "tool_use"):
                check_columns(source, data.columns)  # Other environments can set these columns themselves.
            if data.overlong_prompts == "error" or source.size is None:
                check_prompt_lengths(source, tokenizer, data.max_prompt_tokens)
            elif not isinstance(source, _FirstPrompts):
                without_overlong(source, tokenizer, data.max_prompt_tokens)
    return left


def stop_notes(model: ModelConfig) -> list[str]:
    """Return sentences for the user about the tokens that end an answer, see `end_note`.

    There is none if the model is built in, not on this machine, or without a tokenizer.
    """
    if model.builtin or not _is_here(model):
        return []
    from ....actors.engines.stop_tokens import end_note, end_tokens
    from ....actors.engines.tokenizer import find_tokenizer

    tokenizer = find_tokenizer(model.path)
    note = None if tokenizer is None else end_note(end_tokens(model.path, tokenizer), tokenizer)
    return [note] if note else []


def _check_stops(rollout: RolloutConfig, tokenizer: Any) -> None:
    """Raise ValueError if a stop text or a stop token id can never end a sample."""
    from ....actors.engines.stop_tokens import resolve_stops

    try:
        resolve_stops(sampling(rollout, n=1, seed=0), tokenizer)
    except ValueError as error:
        raise ValueError(f"rollout.{error}") from error
    if unknown := [token for token in rollout.stop_token_ids if token >= len(tokenizer)]:
        raise ValueError(
            f"rollout.stop_token_ids: got {unknown[0]}, expected less than {len(tokenizer)}, the tokenizer's tokens"
        )


class _FirstPrompts:
    def __init__(self, source: PromptSource, size: int) -> None:
        self.name = source.name
        self.size: int | None = size
        self._source = source

    def row(self, index: int) -> PromptRow:
        return self._source.row(index)

    def rows(self, start: int, stop: int) -> list[PromptRow]:
        return [self.row(index) for index in range(start, stop)]


@contextmanager
def _one_tokenizer_thread() -> Iterator[None]:
    """Context manager that keeps tokenizers from starting threads. If threads were started, tokenizers would print a
    warning whenever this process starts a child process."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _is_here(model: ModelConfig) -> bool:
    return model.builtin or _is_local(model.path) or _model_is_cached(model.path)


def _is_local(path: str) -> bool:
    return Path(path).expanduser().is_dir() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def _model_is_cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json")
    return all(isinstance(try_to_load_from_cache(repository, name), str) for name in files)


def _source_is_here(source: str) -> bool:
    """Return whether the prompts of `source` can be read without a download. They are a generated task, a local file or
    folder, or a dataset in the Hugging Face cache."""
    if (
        is_generated(source)
        or source.startswith(("/", ".", "~"))
        or Path(source).expanduser().exists()
        or source.count("/") != 1
    ):
        return True
    if importlib.util.find_spec("datasets") is None:
        return False
    from datasets import config as datasets_config

    return (Path(datasets_config.HF_DATASETS_CACHE) / source.replace("/", "___")).is_dir()
