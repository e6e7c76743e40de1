"""The section `data` of the configuration: where prompts and answers come from."""

from __future__ import annotations

from typing import Any

from ...dataplane.section import Count, Section


class DataConfig(Section):
    """Prompts and answers of training and validation."""

    train: str = "task:reverse"
    """Source of training prompts: `task:reverse` or `task:arithmetic` (generated), a .jsonl file, a Hugging Face
    dataset folder, or a hub id."""
    validation: str | None = None
    """Source of validation prompts, like `train`. Unset: the task's held-out part; files and datasets have none."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or chat messages, which the tokenizer's chat template turns into text."""
    answer_field: str = "answer"
    """Column with the expected answer; empty: there is none."""
    template: str = "{prompt}"
    """Python format string over the row's columns that makes the model's input; `{prompt}` is the prompt column,
    whatever its name."""
    options: dict[str, Any] = {}
    """Options of a generated task, e.g. `min_digits`, `max_digits`."""
    max_prompt_tokens: Count = 512
    """Number of tokens that a prompt may have. Longer prompts are an error at the start."""

    @property
    def generated(self) -> bool:
        return self.train.startswith("task:")
