"""Defines the section `loss` of the configuration, the loss that the policy minimises."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ...dataplane.config import Count, CountOrZero, NonNegative, PathText, Positive, Section

KlKind = Literal["k1", "k2", "k3", "k3_is"]
LOSS_KINDS = ("ppo_clip", "gspo", "cispo", "reinforce")
SUPERVISED = "sft"
"""Value of `loss.kind` in supervised runs."""
CORRECTION_BOUNDS: dict[str, tuple[float | None, float]] = {
    "tis": (None, 2.0),
    "icepop": (0.5, 5.0),
    "sequence": (None, 2.0),
    "sequence_mask": (0.0, 2.0),
}
"""Default bounds (low, high) of the importance weights: kind of correction -> bounds. low is None for a correction
without a lower bound. The bounds of `icepop` are those of Ring-1T."""


class LossConfig(Section):
    """The loss that the policy minimises."""

    kind: str = "ppo_clip"
    """Objective of the policy: `ppo_clip`, `gspo`, `cispo`, `reinforce`, or a user-defined function as
    `package.module:function`, which takes a `LossInputs` and returns the loss at each token. `ppo_clip` clips the
    probability ratio of each token (arXiv:1707.06347). `gspo` clips one ratio for each answer (arXiv:2507.18071, with
    bounds around 4e-4). `cispo` uses the clipped ratio as a weight (arXiv:2506.13585). `reinforce` uses no ratio. A
    supervised run always has `sft`, the negative log-prob of each token, whatever is set here."""
    options: dict[str, Any] = {}
    """Keyword arguments for a user-defined loss."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Distance from 1 to the lower bound of the probability ratio, which is clipped below 1 - clip_low. 1 means no
    lower bound, as in the paper on CISPO."""
    clip_high: Positive = 0.28
    """Distance from 1 to the upper bound of the probability ratio, which is clipped above 1 + clip_high (DAPO,
    arXiv:2503.14476)."""
    clip_dual: Annotated[float, Field(gt=1)] | None = None
    """Second upper bound of the ratio in `ppo_clip`, for tokens with a negative advantage (arXiv:1912.09729 uses 3).
    Unset: there is no second bound."""
    aggregation: Literal["token", "sequence", "sequence_sum", "prompt"] = "token"
    """Mean that turns the losses of a step's tokens into one number. `token` is the mean over all tokens. `sequence` is
    the mean over rows of each row's mean over its tokens. `sequence_sum` is the mean over rows of each row's sum
    divided by `loss.length_norm` (Dr. GRPO). `prompt` is the mean over prompts of each prompt's mean over its
    tokens. Failed rows are in none of these means; those that `algorithm.mask_truncated` leaves out are in the means
    over rows and prompts, with a loss of 0."""
    length_norm: Count | None = None
    """Number of tokens by which `sequence_sum` divides the sum of each row's losses. Unset:
    `rollout.max_new_tokens`."""
    correction: Literal["none", "tis", "icepop", "sequence", "sequence_mask"] = "none"
    """Correction for the difference between the trainer's and the engine's probabilities, by importance weights. `tis`
    weights each token and truncates the weights. `icepop` weights each token and leaves out tokens whose weight is
    outside the bounds (arXiv:2510.18855). `sequence` weights each row and truncates the weights. `sequence_mask`
    weights each row and leaves out rows whose weight is outside the bounds. All but `none` need
    algorithm.prev_logprobs=recompute."""
    correction_low: NonNegative | None = None
    """Lower bound of the importance weights. Tokens or rows with a smaller weight are left out. Unset: 0.5 with
    `icepop`, 0 with `sequence_mask`."""
    correction_high: Positive | None = None
    """Upper bound of the importance weights. Larger weights are truncated to it, or their tokens or rows are left out.
    Unset: 5 with `icepop`, else 2."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the reference model. With 0 no reference model is kept."""
    reference_model: PathText | None = None
    """Folder or hub id of the reference model, which needs the policy's vocabulary. The train workers load it beside
    the policy, with the code of the backend `fsdp`. Unset: the reference model has the run's initial weights."""
    reference_every: CountOrZero = 0
    """Number of steps after which the reference model moves towards the policy (TRL's `sync_ref_model`). 0 keeps its
    weights. Needs a reference model of its own, which an adapter does not have."""
    reference_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy's weights in the reference model after such a move; the rest are those it had. With 1 the
    policy becomes the reference."""
    kl_kind: KlKind = "k3"
    """Estimator of the KL divergence from d = log p_ref - log p at each token (joschu.net/blog/kl-approx.html). `k1` is
    -d, `k2` is d^2 / 2, and `k3` is exp(d) - 1 - d. `k3_is` is k3 times the objective's probability ratio, with the
    gradient of both (DeepSeek-V3.2, arXiv:2512.02556; TRL's default). The ratio corrects k3 for tokens that the
    previous policy sampled. It also bounds the gradient of tokens that training has made unlikely."""
    kl_max_log_ratio: Positive | None = 20.0
    """Bound of |d| in nats. Beyond it the estimate is constant and has no gradient, so that one token whose probability
    collapsed cannot own the update. Unset: there is no bound."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Place where the KL divergence enters the objective. `loss` adds it to the loss; `reward` subtracts it from each
    token's advantage."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus; with 0 there is no bonus. The bonus needs a softmax over the vocabulary in both the
    forward and the backward pass."""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        module, colon, name = kind.partition(":")
        if kind not in (*LOSS_KINDS, SUPERVISED) and not (colon and module and name.isidentifier()):
            near = difflib.get_close_matches(kind, LOSS_KINDS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"got {kind!r}, expected one of {', '.join(LOSS_KINDS)}{hint} or package.module:function")
        return kind

    @model_validator(mode="after")
    def _ratio_in_loss(self) -> LossConfig:
        if self.kl_kind == "k3_is" and self.kl_in == "reward" and self.kl_coef > 0:
            raise ValueError(
                "loss.kl_kind=k3_is with loss.kl_in=reward: expected loss.kl_kind=k3, because a reward is computed "
                "with the previous policy, whose probability ratio is 1"
            )
        return self

    def with_length_norm(self, max_new_tokens: int) -> LossConfig:
        """Return the section with a value for an unset `length_norm`: the largest number of tokens of a response."""
        if self.aggregation != "sequence_sum" or self.length_norm is not None:
            return self
        return self.model_copy(update={"length_norm": max_new_tokens})

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """Bounds (low, high) of the correction's importance weights; low is 0 when there is no lower bound."""
        low, high = CORRECTION_BOUNDS[self.correction]
        return (
            (low or 0.0) if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )
