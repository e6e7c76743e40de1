"""Builds the advantage estimator from the `advantage` section of the configuration."""

from __future__ import annotations

from collections.abc import Mapping

from .config import AdvantageConfig
from .estimator import AdvantageEstimator
from .estimators import GdpoAdvantage, GrpoAdvantage, ReinforcePpAdvantage, RlooAdvantage


def build_advantages(config: AdvantageConfig, weights: Mapping[str, float]) -> AdvantageEstimator:
    """Build the estimator that `config` names.

    weights: name of each reward -> its weight in the rubric, with which `gdpo` adds up the rewards' advantages.
    Raises ValueError in one sentence for `gdpo` without a reward that has a weight, or for an unknown kind.
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
