"""Reads tokenizer and prompts as the rollout actors do later, to find mistakes in columns, templates and lengths."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....actors.engines.config import ModelConfig
from ....actors.protocols import PromptRow, PromptSource
from ....actors.rollout.data_config import DataConfig, is_generated
from ...cluster.rollout_specs import EvaluationPlan

READ_PROMPTS = 10_000
"""Largest number of prompts per source that are read to check their lengths. This takes about 4 seconds for prompts of
200 tokens."""


def read_prompts(
    model: ModelConfig, environment: str, training: DataConfig, seed: int, plans: Sequence[EvaluationPlan]
) -> list[str]:
    """Read the prompts as the rollout actors do later, to check tokenizer, columns, templates and lengths. environment:
    kind of the environment. training: source of the prompts of training. plans: evaluations, with their own sources.
    Returns one line for each source that is not on this machine yet or is too large to be read in full now.
    """
    if not model.builtin and not _is_local(model.path) and not _model_is_cached(model.path):
        return [f"model.path: {model.path} is not on this machine, so neither are its tokenizer nor the prompts"]
    from ....actors.engines.tokenizer import load_tokenizer
    from ....actors.rollout.prompts import check_prompt_lengths, open_source, without_overlong
    from ....actors.rollout.rows import check_columns
    from ...base_model.made_tokenizers import make_tokenizer

    left = []
    with _one_tokenizer_thread():
        tokenizer = make_tokenizer() if model.builtin else load_tokenizer(model.path)
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


class _FirstPrompts:
    def __init__(self, source: PromptSource, size: int) -> None:
        self.name = source.name
        self.size: int | None = size
        self._source = source

    def row(self, index: int) -> PromptRow:
        return self._source.row(index)

    def texts(self, start: int, stop: int) -> list[str]:
        return [self.row(index).text for index in range(start, stop)]


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


def _is_local(path: str) -> bool:
    return Path(path).is_dir() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def _model_is_cached(repository: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "tokenizer_config.json")
    return all(isinstance(try_to_load_from_cache(repository, name), str) for name in files)


def _source_is_here(source: str) -> bool:
    """Return whether the prompts of `source` can be read without a download. They are a generated task, a local file or
    folder, or a dataset in the Hugging Face cache."""
    if is_generated(source) or source.startswith(("/", ".", "~")) or Path(source).exists() or source.count("/") != 1:
        return True
    if importlib.util.find_spec("datasets") is None:
        return False
    from datasets import config as datasets_config

    return (Path(datasets_config.HF_DATASETS_CACHE) / source.replace("/", "___")).is_dir()
