"""Advantage config to estimator: one line for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .estimator import AdvantageEstimator
from .estimators import Baseline, GdpoAdvantage, GrpoAdvantage, ReinforcePpAdvantage, RlooAdvantage

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"]


@dataclass(frozen=True, slots=True)
class AdvantageConfig:
    """The `advantage` part of the configuration."""

    kind: AdvantageKind = "grpo"
    normalize_std: bool = True
    """`grpo`: divide by the group's standard deviation."""
    baseline: Baseline = "step"
    """`reinforce_pp`: whose mean is taken off."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """`gdpo`: each reward's name -> its weight in the rubric."""

    def __post_init__(self) -> None:
        build_advantages(self)  # a mistake is told where the config is read


def build_advantages(config: AdvantageConfig) -> AdvantageEstimator:
    """Raises ValueError naming the key, its value and what was expected."""
    if config.kind == "grpo":
        return GrpoAdvantage(config.normalize_std)
    if config.kind == "dr_grpo":
        return GrpoAdvantage(normalize_std=False)
    if config.kind == "rloo":
        return RlooAdvantage()
    if config.kind == "reinforce_pp":
        return ReinforcePpAdvantage(config.baseline)
    if config.kind == "gdpo":
        return GdpoAdvantage({name: weight for name, weight in config.weights.items() if weight})
    raise ValueError(
        f"advantage.kind: got {config.kind!r}, expected 'grpo', 'dr_grpo', 'rloo', 'reinforce_pp' or 'gdpo'"
    )
