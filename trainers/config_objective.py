"""The configuration's sections on what is maximised: how rewards become advantages, and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .config_section import Count, NonNegative, Positive, Section


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gdpo"] = "grpo"
    """`grpo`: minus the group's mean, over its deviation (arXiv:2402.03300); `dr_grpo`: not divided (arXiv:2503.20783);
    `rloo`: minus the mean of the group's others (arXiv:2402.14740); `reinforce_pp`: normalised over the whole step
    (arXiv:2501.03262); `gdpo`: each reward function normalised in its group, then added (arXiv:2601.05242)."""
    normalize_std: bool = True
    """`grpo`: divide by the group's standard deviation."""
    baseline: Literal["step", "group"] = "step"
    """`reinforce_pp`: whose mean reward is taken off."""


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
    """`ppo_clip`: ratios above this are clipped where the advantage is negative, too (arXiv:1912.09729: 3)."""
    aggregation: Literal["token", "sequence", "sequence_sum", "prompt"] = "token"
    """Mean over the step's tokens, over its sequences' token means, over its sequences' sums by length_norm (Dr. GRPO),
    or over its prompts' token means."""
    length_norm: Count | None = None
    """`sequence_sum`: tokens that a sequence's sum is divided by. None: rollout.max_new_tokens."""
    correction: Literal["none", "tis", "icepop", "sequence", "sequence_mask"] = "none"
    """Importance weights of trainer over engine: per token, truncated (`tis`) or masked (`icepop`, arXiv:2510.18855);
    per sequence, truncated or masked. Needs algorithm.prev_logprobs=recompute."""
    correction_low: NonNegative | None = None
    """Smaller weights are masked. None: 0.5 with `icepop`, 0 with `sequence_mask`."""
    correction_high: Positive | None = None
    """Larger weights are truncated to it, or masked. None: 5 with `icepop`, else 2."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to the reference (the initial weights); 0: no reference is kept."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator (joschu.net/blog/kl-approx.html)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or taken off each token's advantage."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus; costs a softmax over the vocabulary, with gradient."""
