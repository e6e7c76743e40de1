"""The section `sft` of the configuration: the conversations that a supervised run learns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from ....dataplane.config import Count, PathText, Positive, Section, Text
from ..data_config import JSONL_SUFFIXES


class SftConfig(Section):
    """Conversations of a supervised run, `headrace sft`. It trains on their assistant's turns instead of rollouts, and
    reads none of the sections `rollout` (except `rollout.num_actors`), `environment`, `reward`, `advantage`,
    `distillation`, `evaluation` and `router_replay`, of `data` only `data.images`, and of `algorithm` and `loss` only
    the keys about steps, modes, means, entropy, KL and its reference model."""

    train: tuple[PathText, ...] = ()
    """Files of conversations to train on, each with one JSON object per line (.jsonl): a single path or a list. A line
    has `sft.messages_field`, or `prompt` and `completion`, which are both text or both lists of messages. A column
    `tools` declares the tools of a conversation. Unset: the run is not supervised, so it trains on rollouts."""
    validation: PathText | None = None
    """File of conversations that are never trained on. Every `validation.every` steps, before the first step and after
    the last, `validation/loss` is the loss of all of them. Unset: there is no validation."""
    messages_field: Text = "messages"
    """Name of the column with a conversation's messages, in the form of OpenAI's API."""
    turns: Literal["all", "each", "last"] = "all"
    """Turns of the assistant that are trained on. `all` trains on all turns of a conversation in one row. `each` makes
    a row of each turn, with the messages before it, as chat templates need that change a turn when another follows.
    `last` trains on the last turn only."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments that are passed to the chat template, such as `{enable_thinking: false}`."""
    epochs: Positive | None = None
    """Number of times that the run trains on each row. It sets `algorithm.steps`, rounded up to whole steps of
    `algorithm.prompts_per_step` rows. Unset: the run ends after `algorithm.steps`."""
    max_tokens: Count = 1024
    """Largest number of tokens of a row."""
    overlong: Literal["error", "truncate"] = "error"
    """Treatment of rows of more than `sft.max_tokens` tokens. `error` ends the run; `truncate` keeps the first tokens
    of a row."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else given

    @field_validator("train", "validation")
    @classmethod
    def _are_lines(cls, given: Any) -> Any:
        for path in [given] if isinstance(given, str) else given or ():
            if not path.endswith(JSONL_SUFFIXES):
                raise ValueError(f"got {path!r}, expected a file that ends in {' or '.join(JSONL_SUFFIXES)}")
        return given

    def files(self, *, validation: bool) -> tuple[str, ...]:
        """Return the files of the conversations to train on, or those of validation if `validation` is True."""
        if validation:
            return () if self.validation is None else (self.validation,)
        return self.train
