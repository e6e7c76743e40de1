"""Computes policy objectives: the loss at each token from ratios and advantages, before weights and averages.

With `OwnObjective` a function of the user computes the loss at each token:

def weighted(inputs, floor=0.0):        # inputs: LossInputs, with the columns of `data.columns`
    weight = inputs.columns["weight"][inputs.row_ids].clamp(min=floor)
    return -weight * inputs.advantages * inputs.logprobs
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...actors.process.user_errors import contained, described
from ...dataplane.imports import import_object
from .terms import LossInputs

DRIFT_METRICS = ("approx_kl", "rollout_kl")
"""Names of the metrics that every objective reports. They estimate how far the policy has moved (estimator k3 of
`losses.kl`).

`approx_kl` estimates KL(previous policy || current policy). `rollout_kl` estimates KL(engine's policy || current
policy), which includes staleness and numerical mismatch.
"""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses and metrics that an objective computes for the tokens of one microbatch."""

    values: torch.Tensor
    """Loss at each token: float32 `[T]`, with grad."""
    metrics: Mapping[str, torch.Tensor]
    """Sums of the objective's metrics over the microbatch's tokens: float32 scalars without grad, in the order of the
    objective's `metrics`."""


class Objective(Protocol):
    """A policy-gradient surrogate loss. The loss at a token may depend on other tokens only through
    `LossInputs.row_sum`."""

    @property
    def name(self) -> str: ...

    @property
    def metrics(self) -> tuple[str, ...]: ...

    def __call__(self, inputs: LossInputs) -> TokenLosses: ...


@torch.no_grad()
def drift(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Return the metrics DRIFT_METRICS of a microbatch, `approx_kl` and `rollout_kl`, as sums over its tokens."""
    moved = inputs.logprobs - inputs.prev_logprobs
    rollout = inputs.logprobs - inputs.rollout_logprobs
    return {
        "approx_kl": (moved.exp() - 1 - moved).sum(),
        "rollout_kl": (rollout.exp() - 1 - rollout).sum(),
    }


def token_ratio(inputs: LossInputs) -> torch.Tensor:
    """Return each token's probability over its probability under the previous policy: float32 `[T]`, with grad."""
    return (inputs.logprobs - inputs.prev_logprobs).exp()


def row_ratio(inputs: LossInputs) -> torch.Tensor:
    """Return the geometric mean of `token_ratio` over the row of each token: float32 `[T]`, with grad."""
    log_ratios = inputs.row_sum(inputs.logprobs - inputs.prev_logprobs)
    return (log_ratios / inputs.row_tokens.clamp(min=1)).exp()[inputs.row_ids]


def count(marks: torch.Tensor) -> torch.Tensor:
    """Return the number of true values in `marks`, bool `[T]`, as a float32 scalar."""
    return marks.sum(dtype=torch.float32)


# ---------------- PPO's clipped surrogate has separate lower and upper bounds, and an optional dual clip.
#
# The surrogate is from Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, equation 7.
# The asymmetric clip ("clip-higher") is DAPO's (Yu et al. 2025, arXiv:2503.14476, section 3). The dual clip is from Ye
# et al. 2019, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", arXiv:1912.09729.


@dataclass(frozen=True, slots=True)
class PpoClip:
    """PPO's loss at a token is `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`.

    r is the token's probability over its probability under the previous policy, A its advantage. With `clip_dual` c,
    tokens with A < 0 have the loss `-max(min(...), c A)` instead. Without this bound r A can become arbitrarily
    negative for them, and a single token that has become much more probable since sampling would dominate the step.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    """Factor c of the dual clip, above 1; None disables it."""

    name = "ppo_clip"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """Names of the metrics. ratio_mean averages r; clip_fraction is the share of tokens whose gradient is zero because
    of a bound."""

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = token_ratio(inputs)
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


# ---------------- Group Sequence Policy Optimization clips whole answers, each by a single ratio.
#
# The source is Zheng et al. 2025, arXiv:2507.18071.


@dataclass(frozen=True, slots=True)
class Gspo:
    """GSPO's loss at a token is `-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`, where s is the ratio of its row.

    A is the advantage. s is the geometric mean of the row's token ratios: `exp(mean over the row's tokens of log(p /
    p_prev))`. With `loss.aggregation=sequence` the mean loss over a row's tokens equals the row's loss in the paper. s
    stays much closer to 1 than the ratio of one token, so its bounds are small (3e-4 and 4e-4 in the paper).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    name = "gspo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """Names of the metrics. ratio_mean averages s; clip_fraction is the share of tokens in rows whose gradient is zero
    because of a bound."""

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = row_ratio(inputs)
        gain = ratio * inputs.advantages
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * inputs.advantages
        metrics = {"ratio_mean": ratio.detach().sum(), "clip_fraction": count(bounded < gain)}
        return TokenLosses(-torch.minimum(gain, bounded), {**metrics, **drift(inputs)})


# ---------------- CISPO clips only the importance weight, so that every token keeps a gradient.
#
# The source is MiniMax 2025, "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
# arXiv:2506.13585.


@dataclass(frozen=True, slots=True)
class Cispo:
    """CISPO's loss at a token is `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p`.

    r is the token's probability over its probability under the previous policy, A its advantage, and sg (stop-gradient)
    means that no gradient flows through the weight. The paper bounds r from above only, which is `clip_low=1`.
    """

    clip_low: float = 1.0
    clip_high: float = 0.2

    name = "cispo"
    metrics = ("ratio_mean", "clip_fraction", *DRIFT_METRICS)
    """Names of the metrics. ratio_mean averages r before the clip; clip_fraction is the share of clipped tokens."""

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        ratio = token_ratio(inputs).detach()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"ratio_mean": ratio.sum(), "clip_fraction": count(weight != ratio)}
        return TokenLosses(-weight * inputs.advantages * inputs.logprobs, {**metrics, **drift(inputs)})


# ---------------- REINFORCE is the plain policy gradient (Williams 1992, "Simple statistical gradient-following
# algorithms").


@dataclass(frozen=True, slots=True)
class Reinforce:
    """REINFORCE's loss at a token is `-A log p`, where A is its advantage. It is correct only for rows that the current
    policy sampled."""

    name = "reinforce"
    metrics = DRIFT_METRICS

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.advantages * inputs.logprobs, drift(inputs))


class Likelihood:
    """The loss of supervised learning at a token is `-log p`."""

    name = "sft"
    metrics = ()

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        return TokenLosses(-inputs.logprobs, {})


class OwnObjective:
    """Objective that calls the user's function with a microbatch's `LossInputs` for the loss of each token.
    Corrections, averages, KL terms and entropy bonuses apply to this loss as to the built-in objectives."""

    metrics = DRIFT_METRICS

    def __init__(self, name: str, function: Callable[[LossInputs], Any]) -> None:
        """name: import path of the function, for error messages."""
        self.name = name
        self._function = function

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Return the losses of a microbatch. Raises ValueError if the function raises, or does not return a tensor with
        a gradient of one loss for each token."""
        try:
            values = self._function(inputs)
        except BaseException as error:  # The user's function can raise anything.
            raise ValueError(f"loss.kind: {self.name!r} raised {described(contained(error))}") from error
        shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        if shape != tuple(inputs.logprobs.shape) or not values.is_floating_point():
            raise ValueError(
                f"loss.kind: {self.name!r} returned {shape}, expected the loss at each token, a float tensor of "
                f"{tuple(inputs.logprobs.shape)}"
            )
        if inputs.logprobs.requires_grad and len(values) and not values.requires_grad:
            raise ValueError(f"loss.kind: {self.name!r} returned a loss without gradient, expected one with a gradient")
        return TokenLosses(values, drift(inputs))


def build_own_objective(kind: str, options: Mapping[str, Any]) -> OwnObjective:
    """Import the function `kind` (`package.module:function`), whose keyword arguments are `options`.

    Raises ValueError if it cannot be imported, is not a function, or does not take the options.
    """
    function = import_object(kind, "loss.kind")
    if not callable(function):
        raise ValueError(f"loss.kind: {kind!r} is a {type(function).__name__}, expected a function")
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise ValueError(
            f"loss.options: {sorted(options)} do not fit {kind!r}{inspect.signature(function)}: {error}; expected a "
            "function of (inputs, **options)"
        ) from error
    return OwnObjective(kind, lambda inputs: function(inputs, **options))
