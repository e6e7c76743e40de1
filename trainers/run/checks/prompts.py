"""Reads tokenizer and prompts as the rollout actors do later, to find mistakes in columns, templates and lengths."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ....actors.engines.config import ModelConfig
from ....actors.images.config import ImagesConfig
from ....actors.process.json_lines import replace_file
from ....actors.rollout.config import RolloutConfig
from ....actors.rollout.data_config import MIXTURE, DataConfig, is_generated
from ....actors.rollout.supervised.config import SftConfig
from ...cluster.rollout_specs import EvaluationPlan, sampling
from ...config.config import AlgorithmConfig
from ...fetch.gguf_folder import rounding_note

READ_PROMPTS = 10_000
"""Largest number of prompts per source that are read to check their lengths. This takes about 4 seconds for prompts of
200 tokens."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Size and content of a file or dataset of training prompts."""

    rows: int
    """Number of its rows."""
    digest: str
    """Digest of the file; "" for a dataset."""


@dataclass(slots=True)
class PromptsRead:
    """What the checks of a start found out about the prompts of a run."""

    left: list[str] = field(default_factory=list)
    """One line for each check that only the run itself can make."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user about prompts that can be used but may not be meant."""
    ends: list[str] = field(default_factory=list)
    """Sentence about the tokens that end an answer, if the model's files disagree about them. In a run the rollout
    actors say it."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each mistake."""
    plan: list[str] = field(default_factory=list)
    """Lines about the steps and epochs of the run, for the plan of a dry run."""
    rows: dict[str, SourceRows] = field(default_factory=dict)
    """Files and datasets of training prompts that were read, by name."""

    def changed_since(self, folder: Path) -> list[str]:
        """Return what `changed_data` returns for the run folder `folder` and the training prompts that were read."""
        return changed_data(folder, self.rows)


def read_prompts(
    read: PromptsRead,
    model: ModelConfig,
    rollout: RolloutConfig,
    training: DataConfig,
    plans: Sequence[EvaluationPlan],
    absent: Collection[str],
    *,
    environment: str,
    seed: int,
) -> None:
    """Read the prompts as the rollout actors do later, and add what was found to `read`.

    This checks tokenizer, columns, templates and lengths. Without a tokenizer, because the model is not on this machine
    or is wrong, the rows are checked alone. training: source of the prompts of training. plans: evaluations, with their
    own sources. absent: paths that do not exist, which are mistakes by themselves. environment: kind of the
    environment.
    """
    from ....actors.engines.stop_tokens import end_note, end_tokens

    with _one_tokenizer_thread():
        tokenizer = _tokenizer(read, model, absent)
        if tokenizer is not None:
            try:
                _check_stops(rollout, tokenizer)
                if not model.builtin and (note := end_note(end_tokens(model.path, tokenizer), tokenizer)):
                    read.ends.append(note)
            except ValueError as error:
                read.problems.append(str(error))
        if rounded := rounding_note(model.path):
            read.notes.append(rounded)
        parts: list[tuple[DataConfig, str | None]] = [(part, None) for part in training.parts(validation=False)]
        parts += [(part, plan.name) for plan in plans for part in plan.setup.data.parts(validation=True)]
        for data, name in parts:
            source = data.source(validation=name is not None)
            if source in absent:
                continue
            if not _source_is_here(source):
                read.left.append(f"data: {source} is not on this machine, so its prompts are read when the run starts")
                continue
            try:
                columns = name is None and environment in ("single_turn", "tool_use")
                _read_source(read, data, name, tokenizer, seed=seed, columns=columns)
            except ValueError as error:
                if str(error) not in read.problems:  # Keys of a set are those of section `data`, below its name.
                    of_set = f"{name}." if name is not None and name.startswith("evaluation.") else ""
                    read.problems.append(of_set + str(error))


def _tokenizer(read: PromptsRead, model: ModelConfig, absent: Collection[str]) -> Any:
    """Return the model's tokenizer; None if it is not on this machine or cannot be loaded."""
    if model.path in absent:
        return None
    try:
        here = model.builtin or is_here(model.path)
    except ValueError as error:
        read.problems.append(f"model.path: got {model.path!r}, expected a folder that exists or a hub id ({error})")
        return None
    if not here:
        read.left.append(
            f"model.path: {model.path} is not on this machine, so its tokenizer, the chat template and the lengths of "
            "prompts are checked when the run starts"
        )
        return None
    try:
        return load_or_make_tokenizer(model)
    except ValueError as error:
        read.problems.append(str(error))
        return None


def load_or_make_tokenizer(model: ModelConfig) -> Any:
    """Return the tokenizer of a model that is on this machine; that of the built-in model is made. Raises ValueError if
    it cannot be loaded."""
    from ....actors.engines.tokenizer import load_tokenizer
    from ...base_model.made_tokenizers import make_tokenizer

    return make_tokenizer() if model.builtin else load_tokenizer(model.path)


def _read_source(
    read: PromptsRead, data: DataConfig, name: str | None, tokenizer: Any, *, seed: int, columns: bool
) -> None:
    """Read one source. name: name of the evaluation that reads it; None for training. columns: True to check the user's
    columns, too, which other environments than the built-in ones can set themselves. Raises ValueError for a
    mistake."""
    import numpy as np

    from ....actors.rollout.difficulty import success_rates, wanted_prompts
    from ....actors.rollout.prompt_rows import check_rows
    from ....actors.rollout.prompt_sources import load_rows, validation_note
    from ....actors.rollout.prompts import (
        CHECKED_WITH_PICTURES,
        KeptSource,
        TableSource,
        check_prompt_lengths,
        open_source,
        place_of,
        without_overlong,
    )
    from ....actors.rollout.rows import check_columns

    held_out, most = name is not None, data.max_prompt_tokens
    if is_generated(data.source(validation=held_out)):
        source = open_source(data, tokenizer, seed=seed, validation=held_out)
    else:
        table = load_rows(data, validation=held_out)
        if name is None:
            read.rows[table.name] = SourceRows(len(table), table.digest)
        elif (note := validation_note(data, table, name)) is not None:
            read.notes.append(note)
        if tokenizer is None:
            return check_rows(data, table, READ_PROMPTS)
        source = TableSource(data, table, tokenizer)
    first = min(READ_PROMPTS, CHECKED_WITH_PICTURES) if data.images.enabled else READ_PROMPTS
    if in_part := source.size is not None and source.size > first:
        read.left.append(f"data.max_prompt_tokens: only the first {first} of {source.size} prompts of {source.name}")
        source = KeptSource(source, np.arange(first))
    if columns:
        check_columns(source, data.columns)
    if tokenizer is not None and (data.overlong_prompts == "error" or source.size is None):
        check_prompt_lengths(source, tokenizer, most)
    elif tokenizer is not None and not in_part:
        source, _ = without_overlong(source, tokenizer, most)
    if data.success_field is not None and not held_out and source.size is not None:
        rates = success_rates(source, data, partial(place_of, source))
        if not in_part and (left := len(wanted_prompts(rates, data, source.name))) < len(rates):
            read.notes.append(f"data.success_range leaves {left} of the {len(rates)} prompts of {source.name}")


def read_examples(
    read: PromptsRead,
    model: ModelConfig,
    sft: SftConfig,
    algorithm: AlgorithmConfig,
    absent: Collection[str],
    images: ImagesConfig | None = None,
) -> None:
    """Read the conversations of a supervised run as its rollout actors do later, and add what was found to `read`.
    images: section `data.images`; None refuses pictures. absent: paths that do not exist, which are mistakes by
    themselves."""
    from ....actors.engines.stop_tokens import end_tokens, tokenizer_ends
    from ....actors.rollout.supervised.examples import Examples
    from ....actors.rollout.supervised.turn_marks import TurnMarker

    with _one_tokenizer_thread():
        tokenizer = _tokenizer(read, model, absent)
        for validation in (False, True):
            files = sft.files(validation=validation)
            if not files or any(file in absent for file in files):
                continue
            try:
                examples = Examples(sft, validation=validation, images=images)
                if tokenizer is not None:
                    ends = tokenizer_ends(tokenizer) if model.builtin else end_tokens(model.path, tokenizer)
                    marker = TurnMarker(tokenizer, ends, sft.chat_template_kwargs)
                    for index in range(min(examples.size, READ_PROMPTS)):
                        examples.tokens(index, marker)
            except ValueError as error:
                read.problems.append(str(error))
                continue
            if validation:
                continue
            read.rows |= {table.name: SourceRows(len(table), table.digest) for table in examples.tables}
            epochs = algorithm.steps * algorithm.prompts_per_step / examples.size
            read.plan.append(
                f"  {algorithm.steps} steps of {algorithm.prompts_per_step} of the {examples.size} rows of "
                f"{examples.name} = {epochs:.3g} epochs"
            )
            if examples.size > READ_PROMPTS and tokenizer is not None:
                read.left.append(f"sft.max_tokens: only the first {READ_PROMPTS} of {examples.size} rows")


def plan_epochs(read: PromptsRead, data: DataConfig, algorithm: AlgorithmConfig) -> None:
    """Add to `read` how often the run reads each source of training prompts.

    A note says if a step reads a prompt more than once."""
    mixed = {part.source: part.weight for part in data.mixture} if data.train == MIXTURE else {data.train: 1.0}
    for source, weight in mixed.items():
        prompts = algorithm.prompts_per_step * weight / sum(mixed.values())
        known = read.rows.get(source)
        if known is None or not known.rows:
            continue
        epochs = algorithm.steps * prompts / known.rows
        read.plan.append(
            f"  {algorithm.steps} steps of {prompts:g} of the {known.rows} prompts of {source} = {epochs:.3g} epochs"
        )
        if prompts > known.rows:
            read.notes.append(
                f"a step has {prompts:g} prompts of {source}, which has {known.rows} rows, so prompts repeat within a "
                "step (algorithm.prompts_per_step)"
            )


def changed_data(folder: Path, rows: Mapping[str, SourceRows]) -> list[str]:
    """Write the sources of training prompts to data.json in the run folder. Returns a sentence for each that is not as
    it was when an earlier process of the run wrote the file."""
    path = folder / "data.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    now = {name: asdict(one) for name, one in rows.items()}
    replace_file(path, json.dumps(now, indent=1).encode() + b"\n")
    notes = []
    for name, one in now.items() if before else ():
        if name not in before:
            notes.append(f"data: the run began with prompts of {', '.join(before)}, and goes on with those of {name}")
        elif before[name] != one:
            was, has = before[name]["rows"], one["rows"]
            what = f"had {was} rows and has {has}" if was != has else f"has other content in its {has} rows"
            notes.append(f"data: {name} {what} since the run began; prompts go on at their positions in its new order")
    return notes


def _check_stops(rollout: RolloutConfig, tokenizer: Any) -> None:
    """Raise ValueError if a stop text or a stop token id can never end a sample."""
    from ....actors.engines.stop_tokens import resolve_stops

    try:
        resolve_stops(sampling(rollout, n=1, seed=0), tokenizer)
    except ValueError as error:
        raise ValueError(f"rollout.{error}") from error
    if unknown := [token for token in rollout.stop_token_ids if token >= len(tokenizer)]:
        raise ValueError(
            f"rollout.stop_token_ids: got {unknown[0]}, expected less than {len(tokenizer)}, the number "
            "of the tokenizer's tokens"
        )


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


def is_here(path: str) -> bool:
    """Return whether the model at `path` is a folder, or a hub id whose files are in the cache of this machine. Raises
    ValueError for a text that is neither."""
    return _is_local(path) or _model_is_cached(path)


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
