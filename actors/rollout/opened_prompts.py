"""Opens the prompts of a run: one source, or a mixture of several, checked and ready to be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..protocols import PromptSource
from .config import DataConfig
from .mixture import MixedSource
from .prompt_files import validation_note
from .prompts import PromptStream, TableSource, check_prompt_lengths, open_source, without_overlong


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """A source of prompts that is ready to be read."""

    source: PromptSource
    notes: tuple[str, ...]
    """Sentences for the user about choices made when the source was opened, such as the split that validation reads or
    how many prompts were left out."""


def open_prompts(
    config: DataConfig, tokenizer: Any, *, seed: int, check_lengths: bool, held_out: str | None = None
) -> OpenedSource:
    """Open the training prompts, or those of one evaluation. With `data.overlong_prompts=drop`, prompts of a finite
    source that are too long are left out.

    held_out: name of the evaluation whose prompts are opened, those that `config` describes as its validation; None
    opens the training prompts. check_lengths: True makes prompts that are too long an error, unless they were left out.
    Raises ValueError with a one-sentence message if the source cannot be opened or its prompts do not fit.
    """
    parts = config.parts(validation=held_out is not None)
    opened = [_open_part(part, tokenizer, seed=seed, check_lengths=check_lengths, held_out=held_out) for part in parts]
    if parts == [config]:
        return opened[0]
    streams = [PromptStream(one.source, seed=seed, shuffle=held_out is None) for one in opened]
    weights = [part.weight for part in config.mixture]
    mixed = MixedSource([one.source.name for one in opened], streams, weights, seed)
    return OpenedSource(mixed, tuple(note for one in opened for note in one.notes))


def _open_part(
    config: DataConfig, tokenizer: Any, *, seed: int, check_lengths: bool, held_out: str | None
) -> OpenedSource:
    """Open one source; see `open_prompts`."""
    notes = list[str]()
    source = open_source(config, tokenizer, seed=seed, validation=held_out is not None)
    if held_out is not None and isinstance(source, TableSource):
        note = validation_note(config, source.table, held_out)
        notes += [note] if note else []
    if config.overlong_prompts == "drop" and source.size is not None:
        whole = source.size
        source, dropped = without_overlong(source, tokenizer, config.max_prompt_tokens)
        if dropped:
            notes.append(
                f"{dropped} of {whole} {held_out or 'training'} prompts of {source.name} are left out, as they have "
                f"more than data.max_prompt_tokens={config.max_prompt_tokens} tokens"
            )
    elif check_lengths:
        check_prompt_lengths(source, tokenizer, config.max_prompt_tokens)
    return OpenedSource(source, tuple(notes))
