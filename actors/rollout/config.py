"""The section `data` of the configuration: where prompts and answers come from."""

from __future__ import annotations

from typing import Any

from ...dataplane.section import Count, Section


class DataConfig(Section):
    """Source of the prompts and answers of training and validation."""

    train: str = "task:reverse"
    """Source of training prompts. `task:reverse` and `task:arithmetic` generate prompts; other sources are a .jsonl
    file, the folder of a Hugging Face dataset, or the id of a dataset on the hub."""
    validation: str | None = None
    """Source of validation prompts, with the same choices as `data.train`. Unset: the held-out part of a generated
    task; files and datasets have no such part."""
    split: str = "train"
    """Name of the split that is read from a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Name of the column that holds the prompt: text, or chat messages, which the tokenizer's chat template turns into
    text."""
    answer_field: str = "answer"
    """Name of the column that holds the expected answer. An empty name means that there are no answers."""
    template: str = "{prompt}"
    """Python format string that makes the model's input from a row's columns. `{prompt}` stands for the prompt column,
    whatever its name is."""
    options: dict[str, Any] = {}
    """Options of a generated task, such as `min_digits` and `max_digits`."""
    max_prompt_tokens: Count = 512
    """Largest number of tokens of a prompt. A longer prompt is an error when the run starts."""

    @property
    def generated(self) -> bool:
        return self.train.startswith("task:")
