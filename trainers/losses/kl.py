"""KL divergence of the policy to its reference, estimated from the sampled tokens.

The estimators are those of John Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .terms import Denominator, LossInputs, TermSums, aggregate

KlKind = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class ReferenceKl:
    """With `d = log p_ref - log p`: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (unbiased, never negative).

    As a loss on on-policy samples k2 has the gradient of the KL itself, k3 one that agrees with it near the reference
    (GRPO's choice, DeepSeekMath, arXiv:2402.03300, equation 4), and k1 one that is zero on average.
    """

    kind: KlKind = "k3"
    denominator: Denominator = "tokens"

    name = "reference_kl"
    metrics = ("reference_kl",)

    def __post_init__(self) -> None:
        if self.kind not in ("k1", "k2", "k3"):
            raise ValueError(f"loss.kl_kind: got {self.kind!r}, expected k1, k2 or k3")

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Raises ValueError when the inputs have no `ref_logprobs`."""
        if inputs.ref_logprobs is None:
            raise ValueError("loss.kl_coef is not 0, but the rows have no ref_logprobs; write them before the step")
        values = self._estimate(inputs.ref_logprobs - inputs.logprobs)
        return TermSums(aggregate(values, inputs, self.denominator), {"reference_kl": values.detach().sum()})

    def _estimate(self, delta: torch.Tensor) -> torch.Tensor:
        if self.kind == "k1":
            return -delta
        if self.kind == "k2":
            return delta.square() / 2
        return delta.exp() - 1 - delta
