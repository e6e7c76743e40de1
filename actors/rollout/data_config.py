"""The section `data` of the configuration: the prompts of training and validation, and where they come from."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...dataplane.config import Count, PathText, Positive, Section, Text
from ..columns import ColumnConfig
from ..images.config import ImagesConfig

Share = Annotated[float, Field(ge=0, le=1)]
JSONL_SUFFIXES = (".jsonl", ".ndjson")
"""Suffixes of files with one JSON object per line."""
MIXTURE = "mixture"
"""Value of `data.train` that reads the sources of `data.mixture`."""


def is_generated(source: str) -> bool:
    """Return whether a source generates its prompts itself, instead of reading a file or data set."""
    return source == "environment" or source.startswith(("task:", "reasoning-gym:"))


def with_one_group(pattern: str) -> str:
    """Return `pattern` unchanged. Raises ValueError unless it is a regular expression with exactly one group."""
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"got {pattern!r}, expected a regular expression ({error})") from None
    if groups != 1:
        raise ValueError(f"got {pattern!r} with {groups} groups, expected a regular expression with one group")
    return pattern


def indexed_fields(template: str) -> list[str]:
    """Return the columns of which a template takes a part, as `{a[b]}` does. Raises ValueError for a template that has
    no column, or that reads attributes."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError:  # The first row is refused with the reason.
        return []
    if not fields:
        raise ValueError(
            f"got {template!r}, expected a text with {{prompt}} or another column in braces, because all prompts would "
            "be equal"
        )
    for field in fields:
        if "." in re.sub(r"\[[^]]*\]", "", field) or field.startswith("prompt["):
            raise ValueError(f"got {template!r}, expected columns in braces, but {field!r} is a part of one")
    return [field.partition("[")[0] for field in fields if "[" in field]


class SourceConfig(Section):
    """A source of prompts in addition to that of section `data`. An unset key, other than `split` and `subset`, takes
    its value from section `data`."""

    source: PathText
    """Source of the prompts: a .jsonl file, the folder of a Hugging Face dataset, the id of a dataset on the hub, or a
    generated task such as `task:reverse` or `reasoning-gym:NAME`."""
    subset: Text | None = None
    """Name of the configuration, for a Hugging Face dataset with several configurations."""
    split: Text | None = None
    """Name of the split of a Hugging Face dataset. Unset: for an evaluation `validation`, or `test` if there is none,
    or its only split; for training `train`."""
    prompt_field: Text | None = None
    """Name of the column that holds the prompt; see `data.prompt_field`."""
    answer_field: str | None = None
    """Name of the column that holds the expected answer; see `data.answer_field`."""
    answer_pattern: str | None = None
    """Regular expression that finds the expected answer in its column; see `data.answer_pattern`. An empty one takes
    the whole column, whatever section `data` says."""
    template: str | None = None
    """Format of the prompt's text; see `data.template`."""
    chat_template: Literal["messages", "all"] | None = None
    """Prompts to which the chat template is applied; see `data.chat_template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments of the chat template; see `data.chat_template_kwargs`."""
    system_prompt: str | None = None
    """System message in front of chat messages; see `data.system_prompt`. An empty one means none."""
    options: dict[str, Any] | None = None
    """Options of a generated task; see `data.options`."""

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return with_one_group(pattern) if pattern else pattern

    @field_validator("template")
    @classmethod
    def _has_columns(cls, template: str | None) -> str | None:
        if template is not None:
            indexed_fields(template)
        return template


def replaced(source: SourceConfig, names: Sequence[str]) -> dict[str, Any]:
    """Return the keys among `names` of section `data` that a source replaces, with their values."""
    given = {name: getattr(source, name) for name in names}
    return {
        name: None if value == "" and name in ("answer_pattern", "system_prompt") else value
        for name, value in given.items()
        if value is not None
    }


REPLACED = (
    "prompt_field", "answer_field", "answer_pattern", "template", "chat_template", "chat_template_kwargs",
    "system_prompt", "options",
)  # fmt: skip
"""Keys of section `data` that a source of a mixture or an evaluation can replace."""


class MixedSourceConfig(SourceConfig):
    """One of the sources of a mixture."""

    weight: Positive = 1.0
    """Share of the prompts that come from this source, relative to the weights of the others."""


class DataConfig(Section):
    """Source of the prompts and answers of training and validation."""

    train: PathText = "task:reverse"
    """Source of training prompts. `task:reverse` and `task:arithmetic` generate prompts, and so does
    `reasoning-gym:NAME` for each data set of reasoning-gym. `environment` numbers the tasks that the environment itself
    has, and `mixture` reads the sources of `data.mixture`. Other sources are a .jsonl file, the folder of a Hugging
    Face dataset, or the id of a dataset on the hub."""
    validation: PathText | None = None
    """Source of validation prompts, with the same choices as `data.train`. Unset: the held-out part of a generated
    task, or the same dataset as `data.train` if `data.validation_split` is set."""
    subset: Text | None = None
    """Name of the configuration, for a Hugging Face dataset with several configurations, such as `main` of
    openai/gsm8k."""
    split: Text = "train"
    """Name of the split to train on, for a Hugging Face dataset."""
    validation_subset: Text | None = None
    """Name of the configuration of the dataset that validation reads. Unset: `data.subset` if validation reads the same
    dataset as training, else none."""
    validation_split: Text | None = None
    """Name of the split that validation reads. Unset: `validation`, or `test` if there is none. A dataset that training
    also reads must have one of these; any other dataset can instead have a single split or the one named by
    `data.split`."""
    prompt_field: Text = "prompt"
    """Name of the column that holds the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Name of the column that holds the expected answer. An empty name means that there are no answers."""
    answer_pattern: str | None = None
    """Regular expression that finds the expected answer in its column: the content of the expression's one group, at
    its last match. `#### (.+)` fits the solutions of openai/gsm8k. Unset: the whole column is the answer."""
    template: str = "{prompt}"
    """Python format string that makes the prompt's text from the columns of a row. `{prompt}` stands for the prompt
    column, whatever its name is. For chat messages, `{prompt}` is the text of the user's last message. `{a[b]}` is the
    entry `b` of a column `a` of mappings or lists."""
    chat_template: Literal["messages", "all"] = "messages"
    """Prompts to which the chat template of the model's tokenizer is applied. `messages`: only those that are chat
    messages; a text prompt is the model's input as it is. `all`: also text prompts, which become a user message after
    `data.template` is applied."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments that are passed to the chat template, such as `{enable_thinking: false}`. An argument that the template
    does not read is an error."""
    system_prompt: str | None = None
    """System message that is put in front of chat messages that do not begin with one."""
    options: dict[str, Any] = {}
    """Options of a generated task, such as `min_digits` and `max_digits`, or of the data set of reasoning-gym."""
    mixture: tuple[MixedSourceConfig, ...] = ()
    """Sources of `data.train=mixture`, with weights. Each source is read in its own shuffled epochs. The field
    `data_source` of a prompt names its source, unless its row already has a column of that name."""
    images: ImagesConfig = ImagesConfig()
    """Pictures of the prompts."""
    columns: tuple[ColumnConfig, ...] = ()
    """Numeric columns that are passed to a loss function of your own. Environments and rewards get all columns of a
    row."""
    max_prompt_tokens: Count = 512
    """Largest number of tokens of a prompt, including those of the chat template."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Treatment of prompts from a file or dataset that have more than `data.max_prompt_tokens` tokens. All prompts are
    checked at the start. `error` ends the run; `drop` leaves out the prompts that are too long and reports how many
    there were."""

    success_field: Text | None = None
    """Name of the column with the success rate of a training prompt from a file or dataset: the share of samples, from
    0 to 1, that solved it for a model like the one that is trained. Unset: rates are not known."""
    success_range: tuple[Share, Share] = (0.0, 1.0)
    """Smallest and largest success rate of training prompts. Others are left out, and their number is reported."""
    curriculum: Literal["none", "easy_first"] = "none"
    """Order of training prompts. `none` shuffles each epoch. `easy_first` begins each epoch with the prompts of the
    highest success rate; prompts with equal rates are shuffled."""

    @field_validator("success_range")
    @classmethod
    def _ascending(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if ends[0] > ends[1]:
            raise ValueError(f"got {list(ends)}, expected the smaller end first")
        return ends

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        return pattern if pattern is None else with_one_group(pattern)

    @field_validator("template")
    @classmethod
    def _has_columns(cls, template: str) -> str:
        indexed_fields(template)
        return template

    def source(self, *, validation: bool) -> str:
        """Return the source of the validation prompts if `validation` is True, else that of the training prompts."""
        return (self.validation if validation else None) or self.train

    @model_validator(mode="after")
    def _fits(self) -> DataConfig:
        if self.train == MIXTURE and not self.mixture:
            raise ValueError("mixture: got no sources, expected at least one, because data.train is mixture")
        for part in self.mixture:
            if part.source == MIXTURE:
                raise ValueError("mixture: got the source 'mixture', expected a file, dataset or generated task")
        names = [column.name for column in self.columns]
        if len(set(names)) != len(names):
            raise ValueError(f"columns: got {', '.join(names)}, expected each name once")
        return self

    @property
    def trained(self) -> tuple[str, ...]:
        """Sources of the training prompts: a single one, or those of the mixture."""
        return tuple(part.source for part in self.mixture) if self.train == MIXTURE else (self.train,)

    def parts(self, *, validation: bool) -> list[DataConfig]:
        """Return one section per source of the training prompts, or of the validation prompts if `validation` is True.
        Without a mixture, the only section is this one."""
        if self.source(validation=validation) != MIXTURE:
            return [self]
        return [
            DataConfig.model_validate(
                self.model_dump()
                | {"mixture": (), "validation": None, "train": part.source, "subset": part.subset}
                | {"split": part.split or self.split, **replaced(part, REPLACED)}
            )
            for part in self.mixture
        ]

    @property
    def generated(self) -> bool:
        """True if the training prompts are generated, so that other prompts can be generated for validation."""
        return all(map(is_generated, self.trained))

    @property
    def has_held_out(self) -> bool:
        """True if the configuration gives prompts for validation."""
        return bool(self.validation or self.validation_split or self.generated)
