"""The section `reward` of the configuration: the rubric's functions, their weights and options."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import Field, field_validator

from ...dataplane.section import Section, Share

REWARD_KINDS = ("exact_match", "per_position", "format", "overlong")


class RewardFunctionConfig(Section):
    """One term of the rubric."""

    kind: str
    """`exact_match`, `per_position`, `format`, `overlong`, or your own function or class as
    `package.module:function`."""
    weight: float = 1.0
    """Factor of the function's value in the total; 0: only logged."""
    options: dict[str, Any] = {}
    """Keyword arguments: of the constructor for a class, of every call for a function."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/\s]+$")
    """Name of its metric `reward/<name>`. Unset: the kind, or the function's name."""

    @property
    def label(self) -> str:
        return self.name or self.kind.rpartition(":")[2]

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        module, colon, function = kind.partition(":")
        if kind not in REWARD_KINDS and not (colon and module and function.isidentifier()):
            near = difflib.get_close_matches(kind, REWARD_KINDS, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"got {kind!r}, expected {', '.join(REWARD_KINDS)} or package.module:function{hint}")
        return kind


class RewardConfig(Section):
    """The rubric. A sample's reward is the sum of weight x value over its functions."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(kind="exact_match"),)
    """Terms of the rubric: a list of sections with the keys below."""
    max_error_share: Share = 0.5
    """Share of a step's rows whose reward function raised (masked and counted) above which the run stops."""

    @field_validator("functions")
    @classmethod
    def _at_least_one(cls, functions: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        # Not min_length: pydantic would report it beside every mistake inside a function.
        if not functions:
            raise ValueError("got [], expected at least one function")
        return functions
