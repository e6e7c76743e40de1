"""The section `loss` of the configuration: what the policy minimises."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ...dataplane.section import Count, NonNegative, Positive, Section

CORRECTION_BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence": (None, 2.0),
    "sequence_mask": (0.0, 2.0),
}
"""Bounds (low, high) of each correction's weights where the keys are unset; None: it has no lower bound. IcePop's are
Ring-1T's."""


class LossConfig(Section):
    """What the policy minimises."""

    kind: Literal["ppo_clip", "gspo", "cispo", "reinforce"] = "ppo_clip"
    """`ppo_clip`: a clipped ratio per token (arXiv:1707.06347); `gspo`: per answer (arXiv:2507.18071; its bounds are
    around 4e-4); `cispo`: the ratio as a clipped weight (arXiv:2506.13585); `reinforce`: no ratio."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; 1: not clipped below (CISPO as published)."""
    clip_high: Positive = 0.28
    """The ratio is clipped above 1 + clip_high (DAPO, arXiv:2503.14476)."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Second bound of `ppo_clip`: ratios above it are clipped where the advantage is negative, too (arXiv:1912.09729:
    3). Unset: there is none."""
    aggregation: Literal["token", "sequence", "sequence_sum", "prompt"] = "token"
    """Mean over the step's tokens, over its sequences' token means, over its sequences' sums by length_norm (Dr. GRPO),
    or over its prompts' token means."""
    length_norm: Count | None = None
    """Number of tokens that `sequence_sum` divides a sequence's sum by. Unset: rollout.max_new_tokens."""
    correction: Literal["none", "tis", "icepop", "sequence", "sequence_mask"] = "none"
    """Importance weights of trainer over engine: per token, truncated (`tis`) or masked (`icepop`, arXiv:2510.18855);
    per sequence, truncated or masked. Needs algorithm.prev_logprobs=recompute."""
    correction_low: NonNegative | None = None
    """Lower bound of the weights: smaller ones are masked. Unset: 0.5 with `icepop`, 0 with `sequence_mask`."""
    correction_high: Positive | None = None
    """Upper bound of the weights: larger ones are truncated to it, or masked. Unset: 5 with `icepop`, else 2."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference (the initial weights); 0: no reference is kept."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL (joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place of the KL: a term of the loss, or taken off each token's advantage."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus; costs a softmax over the vocabulary, with gradient."""

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """(low, high) of the correction's weights, from the keys or by default; low is 0 when there is no lower
        bound."""
        low, high = CORRECTION_BOUNDS[self.correction]
        return (
            (low or 0.0) if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )
