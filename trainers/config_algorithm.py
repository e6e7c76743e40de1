"""The section `algorithm`: how large steps are, where their groups come from, and what rollouts may be ahead by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from .config_section import Count, CountOrZero, Section


class DynamicSamplingConfig(Section):
    """Groups without a learning signal are replaced (DAPO, arXiv:2503.14476 section 3.2)."""

    enabled: bool = False
    """Clear groups whose rewards (raw: before shaping, as the rubric gives them) are all alike and train on others."""
    max_factor: float = Field(default=4.0, ge=1.0)
    """Prompts rolled out for a step, at most, as a multiple of `prompts_per_step`. Beyond it groups without a signal
    are trained on after all, so that a step always has its size."""
    oversample: float = Field(default=1.0, ge=1.0)
    """`sync`, `streaming`: prompts rolled out for a step from the start, as a multiple of `prompts_per_step`. The step
    takes those that are ready first; the rest are ended and cleared."""


class AlgorithmConfig(Section):
    """The size and number of steps."""

    mode: Literal["sync", "async", "streaming"] = "sync"
    """`sync`: rollout, train and weight sync in lock-step; `async`: rollouts run ahead of the training, up to
    `max_staleness` versions; `streaming`: lock-step, but groups are trained on as they become ready."""
    max_staleness: CountOrZero = 1
    """`async`: versions that a row's oldest token may be behind the policy that is trained on it."""
    stale_groups: Literal["requeue", "drop"] = "requeue"
    """`async`: groups too old for `max_staleness` are rolled out again, or dropped for other prompts. None is with
    `in_order`, which never lets one grow too old."""
    sampler: str = "auto"
    """Which ready groups are trained on first: `in_order`, `ready_first`, `oldest_version_first`, `windowed`, or your
    own as `package.module:factory`. `auto`: ready_first when streaming, in_order when async, else the oldest."""
    sampler_options: dict[str, Any] = {}
    """Of the sampler: `{window: groups}` of `windowed`, keyword arguments of your own."""
    chunk_groups: Count | None = None
    """`streaming`: groups that are trained on together. None: a quarter of `prompts_per_step`."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    steps: Count = 100
    """Optimizer steps of the run."""
    prompts_per_step: Count = 32
    """Groups a step."""
    group_size: int = 8
    """Samples a prompt."""
    prev_logprobs: Literal["rollout", "recompute"] = "rollout"
    """The old policy's log-probs in the ratio: the engine's own, or recomputed by the trainer before each step."""

    @field_validator("group_size")
    @classmethod
    def _has_baseline(cls, size: int) -> int:
        if size < 2:
            raise ValueError(f"got {size}, expected a whole number >= 2, as a group of one has no baseline")
        return size
