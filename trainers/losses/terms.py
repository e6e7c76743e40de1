"""Loss terms: what a term is given, what it gives back, and the weighted sum that a train step minimises.

A step's loss is `sum over tokens / N`, N being known only after its last microbatch. So a term returns a plain sum and
declares what its N counts; the train step divides once. Chunking a step's rows in any way then gives the same gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Denominator = Literal["tokens", "sequences", "groups"]
"""What N counts over the whole step: response tokens, rows with at least one, or groups with at least one such row."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one microbatch, flat: T tokens of N rows. Every one of them is trained on: what
    `response_mask` masks never gets here, so a term needs no mask of its own."""

    logprobs: torch.Tensor
    """float32 `[T]`, with grad: under the policy being trained."""
    prev_logprobs: torch.Tensor
    """float32 `[T]`: under the policy that ratios are taken against."""
    rollout_logprobs: torch.Tensor
    """float32 `[T]`: as the engine sampled."""
    ref_logprobs: torch.Tensor | None
    """float32 `[T]`: under the reference policy; None when the step has no reference."""
    advantages: torch.Tensor
    """float32 `[T]`: the row's advantage at each of its tokens."""
    row_ids: torch.Tensor
    """int64 `[T]`: 0..N-1, ascending."""
    row_tokens: torch.Tensor
    """int64 `[N]`: response tokens of each row; 0 for a failed row."""


@dataclass(frozen=True, slots=True)
class TermSums:
    """One term over one microbatch."""

    loss: torch.Tensor
    """float32 scalar with grad: the sum that the step divides by N."""
    metrics: Mapping[str, torch.Tensor]
    """float32 scalars without grad, in the order of the term's `metrics`: sums over tokens, to be divided by them."""


class LossTerm(Protocol):
    """One summand of the loss, linear in 1/N: its value over a microbatch depends on nothing outside it."""

    @property
    def name(self) -> str: ...

    @property
    def denominator(self) -> Denominator: ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of its metrics, known beforehand so that all ranks reduce the same vector."""
        ...

    def __call__(self, inputs: LossInputs) -> TermSums: ...


class PolicyLoss:
    """The weighted terms of a step, over one common denominator."""

    def __init__(self, terms: Sequence[tuple[float, LossTerm]]) -> None:
        """`terms`: (coefficient, term). Raises ValueError when there is none, or naming two terms that do not agree in
        their denominator or both report a metric of one name."""
        if not terms:
            raise ValueError("loss: got no terms, expected at least one")
        first = terms[0][1]
        owners: dict[str, str] = {}
        for _, term in terms:
            if term.denominator != first.denominator:
                raise ValueError(
                    f"loss: {first.name} is a mean over {first.denominator} and {term.name} over {term.denominator}; "
                    "all terms of a step need one denominator"
                )
            for metric in term.metrics:
                if metric in owners:
                    raise ValueError(f"loss: {owners[metric]} and {term.name} both report a metric {metric!r}")
                owners[metric] = term.name
        self._terms = tuple(terms)
        self.denominator: Denominator = first.denominator
        self.metrics: tuple[str, ...] = tuple(owners)

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Coefficients times the terms' sums; metrics of all terms, unweighted."""
        metrics: dict[str, torch.Tensor] = {}
        losses = []
        for coefficient, term in self._terms:
            sums = term(inputs)
            losses.append(coefficient * sums.loss)
            metrics.update(sums.metrics)
        return TermSums(torch.stack(losses).sum(), {name: metrics[name] for name in self.metrics})


def aggregate(values: torch.Tensor, inputs: LossInputs, denominator: Denominator) -> torch.Tensor:
    """The sum over the microbatch of per-token `values` `[T]`, ready to be divided by the step's N.

    "tokens": every token weighs the same. "sequences": every row weighs the same, that is the sum of the rows' means.
    Raises ValueError for "groups": a group's tokens may stand in several microbatches, so no microbatch knows its mean.
    """
    if denominator == "tokens":
        return values.sum()
    if denominator == "sequences":
        return (values / inputs.row_tokens[inputs.row_ids]).sum()
    raise ValueError(f"loss denominator: got {denominator!r}, expected 'tokens' or 'sequences'")
