"""The section `data` of the configuration: where prompts and answers come from."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator

from ...dataplane.section import Count, Section


def is_generated(source: str) -> bool:
    """Return whether a source of prompts is no file or data set, but makes its prompts itself."""
    return source == "environment" or source.startswith(("task:", "reasoning-gym:"))


class DataConfig(Section):
    """Source of the prompts and answers of training and validation."""

    train: str = "task:reverse"
    """Source of training prompts. `task:reverse` and `task:arithmetic` generate prompts, and so does
    `reasoning-gym:NAME` for each data set of reasoning-gym. `environment` numbers the tasks that the environment itself
    has. Other sources are a .jsonl file, the folder of a Hugging Face dataset, or the id of a dataset on the hub."""
    validation: str | None = None
    """Source of validation prompts, with the same choices as `data.train`. Unset: the held-out part of a generated
    task, or the same dataset as `data.train` if `data.validation_split` is set."""
    subset: str | None = None
    """Name of the configuration of a Hugging Face dataset that has several, such as `main` of openai/gsm8k."""
    split: str = "train"
    """Name of the split of a Hugging Face dataset that is trained on."""
    validation_subset: str | None = None
    """Name of the configuration of the dataset that validation reads. Unset: `data.subset` if validation reads the same
    dataset as training, else none."""
    validation_split: str | None = None
    """Name of the split that validation reads. Unset: `validation`, or `test` if there is none. A dataset that training
    also reads must have one of these; any other dataset may instead have a single split or the one named by
    `data.split`."""
    prompt_field: str = "prompt"
    """Name of the column that holds the prompt: text, or a list of chat messages."""
    answer_field: str = "answer"
    """Name of the column that holds the expected answer. An empty name means that there are no answers."""
    answer_pattern: str | None = None
    """Regular expression that finds the expected answer in its column: the content of the expression's one group, at
    its last match. `#### (.+)` fits the solutions of openai/gsm8k. Unset: the whole column is the answer."""
    template: str = "{prompt}"
    """Python format string that makes the prompt's text from the columns of a row. `{prompt}` stands for the prompt
    column, whatever its name is. For chat messages, `{prompt}` is the text that the chat template makes of them."""
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
    max_prompt_tokens: Count = 512
    """Largest number of tokens of a prompt, including those that the chat template adds."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Treatment of prompts from a file or dataset that have more than `data.max_prompt_tokens` tokens. All prompts are
    checked at the start. `error` ends the run; `drop` leaves out the prompts that are too long and reports how many
    there were."""

    @field_validator("answer_pattern")
    @classmethod
    def _one_group(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"got {pattern!r}, expected a regular expression ({error})") from None
        if groups != 1:
            raise ValueError(f"got {pattern!r}, expected a regular expression with one group, it has {groups}")
        return pattern

    def source(self, *, validation: bool) -> str:
        """Return the source of the validation prompts if `validation` is True, else that of the training prompts."""
        return (self.validation if validation else None) or self.train

    @property
    def generated(self) -> bool:
        """True if the training prompts are generated, so that there are others to validate with."""
        return is_generated(self.train)
