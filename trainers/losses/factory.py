"""Loss config to loss: one line for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .kl import KlKind, ReferenceKl
from .ppo_clip import PpoClip
from .terms import Denominator, LossTerm, PolicyLoss


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The `loss` part of the configuration."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over the step's response tokens (DAPO), or over its rows' means (GRPO as published)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """Clip bounds of the ratio: `[1 - clip_low, 1 + clip_high]`. DAPO: 0.2 and 0.28."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; 0: no such term, and no reference needed."""
    kl_kind: KlKind = "k3"

    def __post_init__(self) -> None:
        build_loss(self)  # a mistake is told where the config is read, not in a worker


def build_loss(config: LossConfig) -> PolicyLoss:
    """Raises ValueError naming the key, its value and what was expected."""
    if not config.kl_coef >= 0:
        raise ValueError(f"loss.kl_coef: got {config.kl_coef}, expected 0 or more")
    terms: list[tuple[float, LossTerm]] = [(1.0, _policy_term(config))]
    if config.kl_coef > 0:
        terms.append((config.kl_coef, ReferenceKl(config.kl_kind, _denominator(config))))
    return PolicyLoss(terms)


def _policy_term(config: LossConfig) -> LossTerm:
    if config.kind == "ppo_clip":
        return PpoClip(config.clip_low, config.clip_high, _denominator(config))
    raise ValueError(f"loss.kind: got {config.kind!r}, expected 'ppo_clip'")


def _denominator(config: LossConfig) -> Denominator:
    if config.aggregation == "token":
        return "tokens"
    if config.aggregation == "sequence":
        return "sequences"
    raise ValueError(f"loss.aggregation: got {config.aggregation!r}, expected 'token' or 'sequence'")
