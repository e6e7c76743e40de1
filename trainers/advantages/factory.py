"""Advantage config to estimator: one line for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .estimator import AdvantageEstimator
from .grpo import GrpoAdvantage


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """The `advantage` part of the configuration."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation."""

    def __post_init__(self) -> None:
        build_advantages(self)  # a mistake is told where the config is read


def build_advantages(config: AdvantageConfig) -> AdvantageEstimator:
    """Raises ValueError naming the key, its value and what was expected."""
    if config.kind == "grpo":
        return GrpoAdvantage(config.normalize_std)
    raise ValueError(f"advantage.kind: got {config.kind!r}, expected 'grpo'")
