"""How per-token losses become a step's mean: whose weights are equal, and what the step divides by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .terms import Denominator, LossInputs

AggregationKind = Literal["token", "sequence", "sequence_sum", "prompt"]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """With `l_t` the loss at token t, `|y|` a row's tokens and `|G|` those of its whole group:

    token          sum of `l_t` / tokens of the step: every token weighs the same (DAPO, arXiv:2503.14476, equation 8)
    sequence       mean over rows of `sum(l_t) / |y|`: every row does (GRPO, DeepSeekMath, arXiv:2402.03300)
    sequence_sum   mean over rows of `sum(l_t) / length_norm`, a constant, so that long answers are not weighed down
                   (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)
    prompt         mean over groups of `sum(l_t) / |G|`: every prompt does, whatever its answers' lengths, and within
                   it every token
    """

    kind: AggregationKind = "token"
    length_norm: int | None = None
    """Tokens; with `sequence_sum` only."""

    def __post_init__(self) -> None:
        if self.kind not in ("token", "sequence", "sequence_sum", "prompt"):
            raise ValueError(
                f"loss.aggregation: got {self.kind!r}, expected 'token', 'sequence', 'sequence_sum' or 'prompt'"
            )
        if self.kind == "sequence_sum" and not (self.length_norm and self.length_norm >= 1):
            raise ValueError(
                f"loss.length_norm: got {self.length_norm}, expected 1 or more tokens with "
                "loss.aggregation='sequence_sum'"
            )

    @property
    def denominator(self) -> Denominator:
        if self.kind == "token":
            return "tokens"
        return "groups" if self.kind == "prompt" else "sequences"

    def __call__(self, values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        """The sum over the microbatch of per-token `values` `[T]`, ready to be divided by the step's N.

        Raises ValueError when `prompt` has no `group_tokens`: a group's rows may stand in several microbatches.
        """
        if self.kind == "token":
            return values.sum()
        if self.kind == "sequence":
            return (values / inputs.row_tokens[inputs.row_ids]).sum()
        if self.kind == "sequence_sum":
            assert self.length_norm is not None
            return values.sum() / self.length_norm
        if inputs.group_tokens is None:
            raise ValueError("loss.aggregation: got 'prompt', but the microbatch has no group_tokens to divide by")
        return (values / inputs.group_tokens[inputs.row_ids]).sum()
