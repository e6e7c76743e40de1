"""Builds the step's loss from the `loss` section of the configuration."""

from __future__ import annotations

from collections.abc import Sequence

from ...actors.columns import ColumnConfig
from .aggregation import Aggregation
from .config import LossConfig
from .correction import Correction, IcePop, MaskedSequences, TruncatedSequences, TruncatedTokens
from .entropy import EntropyBonus
from .kl import ReferenceKl, RewardKl
from .objective import Cispo, Gspo, Objective, PpoClip, Reinforce
from .own_objective import build_own_objective
from .policy_term import PolicyTerm
from .terms import LossTerm, PolicyLoss


def build_loss(config: LossConfig, columns: Sequence[ColumnConfig] = ()) -> PolicyLoss:
    """Build the step's loss from the policy term and, where `config` asks for them, a KL term and an entropy bonus.

    columns: columns that the user brings, which a loss of their own reads. Raises ValueError, naming the key, when
    `sequence_sum` has no `length_norm`, when a kind is unknown, and when a loss of the user's own cannot be imported or
    does not return a plain loss at each token.
    """
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
    return PolicyLoss(terms, columns)


def _objective(config: LossConfig) -> Objective:
    if config.kind == "ppo_clip":
        return PpoClip(config.clip_low, config.clip_high, config.clip_dual)
    if config.kind == "gspo":
        return Gspo(config.clip_low, config.clip_high)
    if config.kind == "cispo":
        return Cispo(config.clip_low, config.clip_high)
    if config.kind == "reinforce":
        return Reinforce()
    if ":" in config.kind:
        return build_own_objective(config.kind, config.options)
    raise ValueError(f"loss.kind: got {config.kind!r}, which no objective here has")


def _correction(config: LossConfig) -> Correction | None:
    if config.correction == "none":
        return None
    if config.correction == "tis":
        return TruncatedTokens(config.correction_bounds[1])
    if config.correction == "icepop":
        return IcePop(*config.correction_bounds)
    if config.correction == "sequence":
        return TruncatedSequences(config.correction_bounds[1])
    if config.correction == "sequence_mask":
        return MaskedSequences(*config.correction_bounds)
    raise ValueError(f"loss.correction: got {config.correction!r}, which no correction here has")
