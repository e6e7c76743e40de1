"""Estimates the KL divergence to the reference policy from sampled tokens, as a loss term or as part of the reward.

The estimators are those of John Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .aggregation import Aggregation
from .config import KlKind
from .policy_objectives import row_ratio, token_ratio
from .terms import Denominator, LossInputs, TermSums


@dataclass(frozen=True, slots=True)
class ReferenceKl:
    """Loss term that estimates the KL divergence from the reference policy at each token, from `d = log p_ref - log p`.

    The estimate is k1 = -d, k2 = d^2 / 2, or k3 = exp(d) - 1 - d, which is unbiased and never negative. Used as a loss
    on on-policy samples, the three have different gradients. The gradient of k2 is the gradient of the KL divergence
    itself. The gradient of k3 (GRPO's choice, DeepSeekMath, arXiv:2402.03300, equation 4) agrees with it near the
    reference policy. The gradient of k1 is zero on average.

    k3_is is `r (exp(d) - 1 - d)`, where r is the probability ratio of the objective and has a gradient, too
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Its expectation under the previous policy is the KL divergence of
    the current policy, also after several updates on the same rows. Its gradient at a token is `-d r`, which stays
    small where training has made the token unlikely; the gradient of k3, `1 - exp(d)`, becomes very large
    there.
    """

    kind: KlKind = "k3"
    aggregation: Aggregation = Aggregation()
    max_log_ratio: float | None = None
    """Bound of |d| in nats; None means no bound."""
    by_row: bool = False
    """True when the r of k3_is is the ratio of the token's row, as in GSPO, and not that of the token."""

    name = "reference_kl"
    metrics = ("reference_kl",)

    @property
    def denominator(self) -> Denominator:
        return self.aggregation.denominator

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Return the KL estimates of a microbatch, summed once as a loss and once as a metric. Raises ValueError when
        `inputs` has no `ref_logprobs`."""
        values = _estimate(self.kind, _reference(inputs) - inputs.logprobs, self.max_log_ratio)
        if self.kind == "k3_is":
            values = values * (row_ratio if self.by_row else token_ratio)(inputs)
        return TermSums(self.aggregation(values, inputs), {"reference_kl": values.detach().sum()})


@dataclass(frozen=True, slots=True)
class RewardKl:
    """Lowers each token's advantage by `coefficient * k`, where k is the token's KL estimate without grad.

    k is computed from `d = log p_ref - log p_prev`. The estimate at a token lowers the advantage of this token only.
    PPO from human feedback (arXiv:2203.02155) and REINFORCE++ (arXiv:2501.03262) instead subtract the KL before
    advantages are estimated and sum it over the tokens that follow. That would need a reward per token, but Headrace
    normalises advantages in the driver, which has one reward per row and no tokens.
    """

    kind: KlKind
    coefficient: float
    max_log_ratio: float | None = None
    """Bound of |d| in nats; None means no bound."""

    metrics = ("reference_kl",)

    @torch.no_grad()
    def __call__(self, inputs: LossInputs) -> tuple[LossInputs, dict[str, torch.Tensor]]:
        """Return `inputs` with lowered advantages, and the summed KL estimates as the metric `reference_kl`.

        Raises ValueError when `inputs` has no `ref_logprobs`.
        """
        values = _estimate(self.kind, _reference(inputs) - inputs.prev_logprobs, self.max_log_ratio)
        lowered = replace(inputs, advantages=inputs.advantages - self.coefficient * values)
        return lowered, {"reference_kl": values.sum()}


def _reference(inputs: LossInputs) -> torch.Tensor:
    if inputs.ref_logprobs is None:
        raise ValueError("loss.kl_coef is not 0, but the rows have no ref_logprobs; write these before the step")
    return inputs.ref_logprobs


def _estimate(kind: KlKind, delta: torch.Tensor, bound: float | None) -> torch.Tensor:
    if bound is not None:
        delta = delta.clamp(-bound, bound)
    if kind == "k1":
        return -delta
    if kind == "k2":
        return delta.square() / 2
    return delta.exp() - 1 - delta
