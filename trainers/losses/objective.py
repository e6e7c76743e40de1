"""What a policy objective is: a loss at each token, from ratios and advantages, before weights and means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .terms import LossInputs

DRIFT_METRICS = ("approx_kl", "rollout_kl")
"""approx_kl: k3 of the previous policy to this one; rollout_kl: k3 of the engine's policy to this one (staleness and
numerical mismatch together)."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """An objective over one microbatch."""

    values: torch.Tensor
    """float32 `[T]`, with grad."""
    metrics: Mapping[str, torch.Tensor]
    """float32 scalars without grad, in the order of the objective's `metrics`: sums over tokens."""


class Objective(Protocol):
    """A policy-gradient surrogate. Looks beyond a token only through `LossInputs.row_sum`."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self, inputs: LossInputs) -> TokenLosses: ...


@torch.no_grad()
def drift(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """DRIFT_METRICS of a microbatch."""
    moved = inputs.logprobs - inputs.prev_logprobs
    rollout = inputs.logprobs - inputs.rollout_logprobs
    return {
        "approx_kl": (moved.exp() - 1 - moved).sum(),
        "rollout_kl": (rollout.exp() - 1 - rollout).sum(),
    }


def check_clip(clip_low: float, clip_high: float) -> None:
    """Raises ValueError unless `[1 - clip_low, 1 + clip_high]` bounds a ratio from both sides of 1."""
    if not 0 < clip_low <= 1:
        raise ValueError(f"loss.clip_low: got {clip_low}, expected a number in (0, 1]")
    if not clip_high > 0:
        raise ValueError(f"loss.clip_high: got {clip_high}, expected a number above 0")


def count(marks: torch.Tensor) -> torch.Tensor:
    """float32 scalar: how many of bool `[T]` hold."""
    return marks.sum(dtype=torch.float32)


# ---------------- PPO's clipped surrogate with separate lower and upper bounds, and optionally a second one for bad
# samples.
#
# Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7. The asymmetric clip
# ("clip-higher") is DAPO's: Yu et al. 2025, arXiv:2503.14476, section 3. The dual clip: Ye et al. 2019, "Mastering
# Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv:1912.09729.


@dataclass(frozen=True, slots=True)
class PpoClip:
    """`-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, r being the token's probability over its previous one.

    With `clip_dual` c, where A < 0: `-max(min(...), c A)`, so that one token that became much more probable since it
    was sampled (r A has no lower bound) does not rule the step.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    """None: no second clip."""

    name = "ppo_clip"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: r; clip_fraction: 1 where a bound cuts the gradient off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)
        if self.clip_dual is not None and not self.clip_dual > 1:
            raise ValueError(f"loss.clip_dual: got {self.clip_dual}, expected a number above 1, or null for none")

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = (inputs.logprobs - inputs.prev_logprobs).exp()
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        values = torch.minimum(gain, bounded)
        cut = bounded < gain
        if self.clip_dual is not None:
            floor = self.clip_dual * inputs.advantages
            low = (inputs.advantages < 0) & (values < floor)
            values, cut = torch.where(low, floor, values), cut | low
        metrics = {"ratio_mean": ratio.detach().sum(), "clip_fraction": count(cut)}
        return TokenLosses(-values, {**metrics, **drift(inputs)})


# ---------------- Group Sequence Policy Optimization: one ratio for a whole answer, clipped as one.
#
# Zheng et al. 2025, arXiv:2507.18071.


@dataclass(frozen=True, slots=True)
class Gspo:
    """`-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` at each token, with `s = exp(mean over the row's tokens of
    log p / p_prev)`: the geometric mean of the row's ratios.

    With `loss.aggregation=sequence` a row's sum is the paper's loss of the row. s stays much closer to 1 than a token's
    ratio, so its bounds are small: 3e-4 and 4e-4 in the paper.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    name = "gspo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: s; clip_fraction: 1 at every token of a row that a bound cuts off."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        log_ratios = inputs.row_sum(inputs.logprobs - inputs.prev_logprobs)
        ratio = (log_ratios / inputs.row_tokens.clamp(min=1)).exp()[inputs.row_ids]
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        metrics = {"ratio_mean": ratio.detach().sum(), "clip_fraction": count(bounded < gain)}
        return TokenLosses(-torch.minimum(gain, bounded), {**metrics, **drift(inputs)})


# ---------------- CISPO: the importance weight is clipped, not the token, so that every token keeps a gradient.
#
# MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv:2506.13585.


@dataclass(frozen=True, slots=True)
class Cispo:
    """`-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p`, sg meaning that no gradient flows through the weight.

    The paper bounds r from above only: `clip_low=1` is no lower bound.
    """

    clip_low: float = 1.0
    clip_high: float = 0.2

    name = "cispo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """ratio_mean: r, before the clip; clip_fraction: 1 where it clips."""

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = (inputs.logprobs - inputs.prev_logprobs).detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"ratio_mean": ratio.sum(), "clip_fraction": count(weight != ratio)}
        return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {**metrics, **drift(inputs)})


# ---------------- The plain policy gradient: Williams 1992, "Simple statistical gradient-following algorithms"
# (REINFORCE).


@dataclass(frozen=True, slots=True)
class Reinforce:
    """`-A log p`: right for rows that the current policy sampled, whatever the previous policy was."""

    name = "reinforce"
    metrics = DRIFT_METRICS

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.advantages * inputs.logprobs, drift(inputs))
