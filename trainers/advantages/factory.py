"""Builds the advantage estimator from the `advantage` section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from .config import AdvantageConfig
from .estimator import AdvantageEstimator
from .estimators import GdpoAdvantage, GrpoAdvantage, ReinforcePpAdvantage, RlooAdvantage


def build_advantages(config: AdvantageConfig, weights: Mapping[str, float]) -> AdvantageEstimator:
    """Build the advantage estimator that `config` names.

    weights: name of each reward in the run's list of rewards (the rubric) -> its weight. Only `gdpo` uses them. Raises
    ValueError when `gdpo` has no reward with a weight other than 0, or when the kind is unknown.
    """
    if config.kind == "grpo":
        return GrpoAdvantage(config.normalize_std)
    if config.kind == "dr_grpo":
        return GrpoAdvantage(normalize_std=False)
    if config.kind == "rloo":
        return RlooAdvantage()
    if config.kind == "reinforce_pp":
        return ReinforcePpAdvantage(config.baseline)
    if config.kind == "gdpo":
        return GdpoAdvantage({name: weight for name, weight in weights.items() if weight})
    raise ValueError(f"advantage.kind: got {config.kind!r}, which no estimator here has")
