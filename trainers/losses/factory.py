"""Loss config to loss: one line for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .aggregation import Aggregation, AggregationKind
from .correction import Correction, IcePop, MaskedSequences, TruncatedSequences, TruncatedTokens
from .entropy import EntropyBonus
from .key_checks import correction_bounds, loss_problems
from .kl import KlKind, ReferenceKl, RewardKl
from .objective import Cispo, Gspo, Objective, PpoClip, Reinforce
from .policy_term import PolicyTerm
from .terms import LossTerm, PolicyLoss

ObjectiveKind = Literal["ppo_clip", "gspo", "cispo", "reinforce"]
CorrectionKind = Literal["none", "tis", "icepop", "sequence", "sequence_mask"]


@dataclass(frozen=True, slots=True)
class LossConfig:
    """The `loss` part of the configuration."""

    kind: ObjectiveKind = "ppo_clip"
    aggregation: AggregationKind = "token"
    """Whose weights are equal: see `Aggregation`."""
    length_norm: int | None = None
    """Tokens that `sequence_sum` divides a row's sum by; None with the others."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    """Clip bounds of the ratio: `[1 - clip_low, 1 + clip_high]`. DAPO: 0.2 and 0.28."""
    clip_dual: float | None = None
    """Second bound of `ppo_clip` where the advantage is negative; None: none."""
    correction: CorrectionKind = "none"
    """Weights for the engine's policy not being the previous one."""
    correction_low: float | None = None
    """Lower bound of the weights; None: the correction's own."""
    correction_high: float | None = None
    """Upper bound of the weights; None: the correction's own."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference; 0: no such term, and no reference needed."""
    kl_kind: KlKind = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off the advantages."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0: none, and no entropy needed."""

    def __post_init__(self) -> None:
        build_loss(self)  # a mistake is told where the config is read, not in a worker


def build_loss(config: LossConfig) -> PolicyLoss:
    """Raises ValueError naming the key, its value and what was expected."""
    for key in ("kl_coef", "entropy_coef"):
        if not getattr(config, key) >= 0:
            raise ValueError(f"loss.{key}: got {getattr(config, key)}, expected 0 or more")
    if config.kl_in not in ("loss", "reward"):
        raise ValueError(f"loss.kl_in: got {config.kl_in!r}, expected 'loss' or 'reward'")
    problems = loss_problems(config)
    if problems:
        raise ValueError("\n".join(problems))
    aggregation = Aggregation(config.aggregation, config.length_norm)
    in_reward = config.kl_coef > 0 and config.kl_in == "reward"
    reward_kl = RewardKl(config.kl_kind, config.kl_coef) if in_reward else None
    terms: list[tuple[float, LossTerm]] = [
        (1.0, PolicyTerm(_objective(config), aggregation, _correction(config), reward_kl))
    ]
    if config.kl_coef > 0 and not in_reward:
        terms.append((config.kl_coef, ReferenceKl(config.kl_kind, aggregation)))
    if config.entropy_coef > 0:
        terms.append((config.entropy_coef, EntropyBonus(aggregation)))
    return PolicyLoss(terms)


def _objective(config: LossConfig) -> Objective:
    if config.kind == "ppo_clip":
        return PpoClip(config.clip_low, config.clip_high, config.clip_dual)
    if config.kind == "gspo":
        return Gspo(config.clip_low, config.clip_high)
    if config.kind == "cispo":
        return Cispo(config.clip_low, config.clip_high)
    if config.kind == "reinforce":
        return Reinforce()
    raise ValueError(f"loss.kind: got {config.kind!r}, expected 'ppo_clip', 'gspo', 'cispo' or 'reinforce'")


def _correction(config: LossConfig) -> Correction | None:
    if config.correction == "none":
        return None
    if config.correction == "tis":
        return TruncatedTokens(correction_bounds(config)[1])
    if config.correction == "icepop":
        return IcePop(*correction_bounds(config))
    if config.correction == "sequence":
        return TruncatedSequences(correction_bounds(config)[1])
    if config.correction == "sequence_mask":
        return MaskedSequences(*correction_bounds(config))
    raise ValueError(
        f"loss.correction: got {config.correction!r}, expected 'none', 'tis', 'icepop', 'sequence' or 'sequence_mask'"
    )
