"""Averages per-token losses over a step: every token, every row or every prompt weighs the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from .terms import Denominator, LossInputs

AggregationKind = Literal["token", "sequence", "sequence_sum", "prompt"]


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Averages per-token losses over a step in one of four ways.

    `l_t` is the loss at token t, `|y|` the number of tokens of a row, `|G|` the number of tokens of its whole group
    (the rows of one prompt):

    token          sum of `l_t` / tokens of the step. Every token weighs the same (DAPO, arXiv:2503.14476, equation 8).
    sequence       mean over rows of `sum(l_t) / |y|`. Every row weighs the same (GRPO, DeepSeekMath, arXiv:2402.03300).
    sequence_sum   mean over rows of `sum(l_t) / length_norm`, a constant, so that tokens of long answers do not weigh
                   less (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    prompt         mean over groups of `sum(l_t) / |G|`. Every prompt weighs the same, whatever the lengths of its
                   answers, and so does every token of one prompt.
    """

    kind: AggregationKind = "token"
    length_norm: int | None = None
    """Number of tokens by which `sequence_sum` divides the sum of each row's losses; the other kinds ignore it."""

    def __post_init__(self) -> None:
        if self.kind == "sequence_sum" and self.length_norm is None:
            raise ValueError(
                "loss.length_norm: got None, expected 1 or more tokens with loss.aggregation='sequence_sum'"
            )

    @property
    def denominator(self) -> Denominator:
        if self.kind == "token":
            return "tokens"
        return "groups" if self.kind == "prompt" else "sequences"

    def __call__(self, values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        """Return the weighted sum of the per-token `values` `[T]` of one microbatch, which the step later divides by N.

        N is the step's number of tokens, rows or groups (see `denominator`). Raises ValueError when the kind is
        `prompt` and `inputs` has no `group_tokens`, which a term cannot count because a group's rows can be in several
        microbatches.
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

    def row_weights(self, row_tokens: np.ndarray, group_tokens: np.ndarray | None) -> torch.Tensor:
        """Return the weight of each row in a step's mean over rows, float32 `[N]`. The weights of all
        rows of a step add up to its denominator.

        row_tokens: number of response tokens of each row, int64 `[N]`. group_tokens: number of response tokens of each
        row's whole group. Raises ValueError when the kind is `prompt` and there are no `group_tokens`.
        """
        if self.kind == "token":
            return torch.from_numpy(row_tokens).float()
        if self.kind in ("sequence", "sequence_sum"):
            return torch.from_numpy(row_tokens > 0).float()
        if group_tokens is None:
            raise ValueError("loss.aggregation: got 'prompt', but the microbatch has no group_tokens to divide by")
        return torch.from_numpy(row_tokens / np.maximum(group_tokens, 1)).float()
