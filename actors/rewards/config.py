"""The section `reward` of the configuration: the rubric's functions, their weights and options."""

from __future__ import annotations

import difflib
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ...dataplane.config import CountOrZero, Positive, Section, Share

REWARD_KINDS = (
    "exact_match", "boxed", "math_verify", "per_position", "format", "overlong", "reasoning_gym", "environment",
)  # fmt: skip


TOTALS = ("mean", "std", "flat_groups_share")
"""Names that no function can have, because `reward/<name>` is a metric of the total reward for these."""


class RewardFunctionConfig(Section):
    """One reward function of the rubric."""

    kind: str
    """Kind of the reward function. `exact_match` is 1 for a response equal to the expected answer, else 0. `boxed` is 1
    if the content of the last `\\boxed{...}` is the expected answer. `math_verify` compares the answers by value, with
    the package math-verify (extra `math`): what the last `\\boxed{...}` holds, or any formula or number with
    `options.extract=any`, within `options.timeout_s` seconds (5 if unset).
    `per_position` is the share of characters that agree with the answer. `format` is 1 for a finished response that
    matches the regular expression `options.pattern`, else 0. `overlong` falls from 0 to -1 as the response grows over
    the last `options.cache` of `options.max_length` tokens (arXiv:2503.14476). `reasoning_gym` is the score of that
    library for its own tasks. `environment` is the reward that the environment gave, the one named `options.name` if it
    gave several. Your own function or class is given as `package.module:function`."""
    weight: float = 1.0
    """Factor by which the function's value is multiplied in a sample's reward. A function of weight 0 is only
    logged."""
    options: dict[str, Any] = {}
    """Keyword arguments for the constructor of a class, or for every call of a function."""
    per: Literal["sample", "group"] = "sample"
    """Samples that one call scores. `group`: all samples of a prompt at once; your function gets lists of responses and
    finish reasons, and returns a list of numbers."""
    runs: Literal["thread", "process"] = "thread"
    """Place where your function runs; an `async def` is awaited instead. With `process`, the function runs in processes
    of its own, and a process is killed when a call takes too long. Its arguments and results must then fit into
    JSON."""
    timeout_s: Positive | None = None
    """Time limit in seconds for one call of an `async def`, of a function that scores groups, or of one in a process.
    Unset: `reward.timeout_s`."""
    retries: CountOrZero = 0
    """Number of times that a failed or late call of such a function (see `timeout_s`) is repeated."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/\s]+$")
    """Name of the function in the metric `reward/<name>`. Unset: the kind, the name of your own function, or for
    `environment` the name in `options.name`."""

    @property
    def label(self) -> str:
        of_environment = self.options.get("name") if self.kind == "environment" else None
        return self.name or (str(of_environment) if of_environment else self.kind.rpartition(":")[2])

    @model_validator(mode="after")
    def _has_its_own_metric(self) -> RewardFunctionConfig:
        if self.label in TOTALS or re.search(r"[/\s]", self.label):
            raise ValueError(
                f"got the name {self.label!r}, expected one without / and whitespace, other than {', '.join(TOTALS)} "
                "(key `name`), because it becomes the metric reward/NAME, and those are metrics of the total reward"
            )
        return self

    @model_validator(mode="after")
    def _process_needs_a_path(self) -> RewardFunctionConfig:
        if self.kind in REWARD_KINDS and (self.runs, self.per) != ("thread", "sample"):
            raise ValueError(
                f"got kind={self.kind!r} with runs={self.runs!r} and per={self.per!r}, expected runs='thread' and "
                "per='sample', because only your own functions can run in other ways"
            )
        if self.kind in REWARD_KINDS:
            self.refuse_limits()
        return self

    def refuse_limits(self) -> None:
        """Raise ValueError if `timeout_s` or `retries` is set. Called for functions whose calls have no such
        settings."""
        if self.timeout_s is None and not self.retries:
            return
        given = f"retries={self.retries}" if self.timeout_s is None else f"timeout_s={self.timeout_s:g}"
        raise ValueError(
            f"got kind={self.kind!r} with {given}, which has no effect on a function that is called for one sample in "
            "the rollout actor, expected an async def, per='group' or runs='process' (reward.timeout_s limits all "
            "functions of a row)"
        )

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
    """The rubric, which scores samples with one or more reward functions. A sample's reward is the sum of weight x
    value over these functions, scaled by `reward.scale` and clipped to `reward.clip`."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(kind="exact_match"),)
    """Reward functions of the rubric: a list of sections with the keys below. Empty: every reward is 0, which needs
    teachers (`distillation.teachers`)."""
    scale: Positive = 1.0
    """Factor by which the sum is multiplied."""
    clip: tuple[float, float] | None = None
    """Bounds (low, high) to which a sample's reward is clipped, after scaling. Unset: it is not clipped."""
    max_error_share: Share = 0.5
    """Largest share of a step's rows in which a reward function or the episode can fail; above it the run stops. Failed
    rows are counted and not trained on."""
    timeout_s: Positive = 60.0
    """Time limit in seconds for the reward functions of one row. A row that exceeds it counts as failed."""

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each reward in the rubric's weighted sum: name -> weight."""
        return {function.label: function.weight for function in self.functions}

    @property
    def signal_terms(self) -> list[tuple[str, float]]:
        """Rewards whose weighted sum decides whether a group has a training signal, as (name, weight).

        They are all rewards with a weight other than 0, except `overlong`, which only adjusts the others."""
        return [(f.label, f.weight) for f in self.functions if f.weight and f.kind != "overlong"]

    @field_validator("clip")
    @classmethod
    def _in_order(cls, clip: tuple[float, float] | None) -> tuple[float, float] | None:
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(f"got {list(clip)}, expected [low, high] with low below high")
        return clip
