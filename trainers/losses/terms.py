"""Loss terms: what a term is given, what it gives back, and the weighted sum that a train step minimises.

A step's loss is `sum over tokens / N`, N being known only after its last microbatch. So a term returns a plain sum and
declares what its N counts; the train step divides once. Chunking a step's rows in any way then gives the same gradient.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Denominator = Literal["tokens", "sequences", "groups"]
"""What N counts over the whole step: response tokens, rows with at least one, or groups with at least one such row."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one microbatch, flat: T tokens of N rows. Every one of them is trained on: what
    `response_mask` masks never gets here, so a term needs no mask of its own.

    With context parallelism a row's tokens stand on several ranks; T is then this rank's share of them, N the same on
    all. A term is a sum over the tokens it is given, and what it needs to know of a whole row it asks `row_sum`.
    """

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
    """int64 `[N]`: response tokens of each whole row; 0 for a failed row."""
    group_tokens: torch.Tensor | None = None
    """int64 `[N]`: response tokens that the step trains on in each row's whole group, wherever its other rows are; None
    unless `loss.aggregation` is `prompt`."""
    entropy: torch.Tensor | None = None
    """float32 `[T]`, with grad: entropy (nats) of the trained policy's distribution at each token; None unless
    `loss.entropy_coef` is above 0."""
    reduce_rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Sums `[N]` over the ranks that share the rows' tokens, in forward and in backward (each rank's loss is a part of
    the sum that is differentiated). Collective. None: every row is here whole."""

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """`[N]`: sums of per-token `values` `[T]` over whole rows, differentiable; 0 for a row without tokens.

        The only way in which a loss may look beyond one token: everything else would depend on what else the microbatch
        or the rank happens to hold.
        """
        sums = values.new_zeros(len(self.row_tokens)).index_add(0, self.row_ids, values)
        return sums if self.reduce_rows is None else self.reduce_rows(sums)


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
        their denominator or both report a metric of one name, or a term that is not linear in 1/N."""
        if not terms:
            raise ValueError("loss: got no terms, expected at least one")
        first = terms[0][1]
        owners: dict[str, str] = {}
        for _, term in terms:
            if term.denominator not in typing.get_args(Denominator):
                raise ValueError(
                    f"loss: {term.name} is a mean over {term.denominator}, expected over tokens, sequences or groups"
                )
            if term.denominator != first.denominator:
                raise ValueError(
                    f"loss: {first.name} is a mean over {first.denominator} and {term.name} over {term.denominator}; "
                    "all terms of a step need one denominator"
                )
            for metric in term.metrics:
                if metric in owners:
                    raise ValueError(f"loss: {owners[metric]} and {term.name} both report a metric {metric!r}")
                owners[metric] = term.name
            _check_linear(term)
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


# ---------------------------------------------------------------- linear in 1/N

_PROBE_TOKENS = (3, 1, 0, 2)
"""Response tokens of the probe's rows; rows 0 and 1 are one group, 2 and 3 another."""


def _check_linear(term: LossTerm) -> None:
    """Try `term` on four made-up rows, once in one microbatch and once in one each. A mean over the microbatch, which
    would later be divided by N again, gives other sums then. Raises ValueError naming it."""
    whole = _probe(term, [[0, 1, 2, 3]])
    parts = _probe(term, [[3], [0], [2], [1]])
    for what, value in whole.items():
        if not torch.allclose(value, parts[what], rtol=1e-9, atol=1e-12):
            raise ValueError(
                f"loss: the {what} of {term.name} depends on which rows share a microbatch, expected a plain sum over "
                f"its tokens, as the step divides once by its {term.denominator}"
            )


@torch.enable_grad()
def _probe(term: LossTerm, micros: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Loss and metrics summed over `micros`, and the gradient by every row's tokens (log-probs, entropies)."""
    places = torch.arange(sum(_PROBE_TOKENS)).split(_PROBE_TOKENS)
    gradient = torch.zeros(2, sum(_PROBE_TOKENS), dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), dtype=torch.float64)}
    for rows in micros:
        index = torch.cat([places[row] for row in rows])
        now, prev, rollout, ref, entropy = (torch.sin((index + 1.0).double() * step) / 2 - 1 for step in range(1, 6))
        leaves = (now.requires_grad_(), entropy.requires_grad_())
        row_tokens = torch.tensor(_PROBE_TOKENS)[rows]
        row_ids = torch.repeat_interleave(torch.arange(len(rows)), row_tokens)
        inputs = LossInputs(
            *(now, prev, rollout, ref),
            advantages=torch.tensor([1.0, -0.5, 0.0, 0.75], dtype=torch.float64)[rows][row_ids],
            row_ids=row_ids,
            row_tokens=row_tokens,
            group_tokens=torch.tensor([4, 4, 2, 2])[rows],
            entropy=entropy,
        )
        result = term(inputs)
        for name, value in {"loss": result.loss.detach(), **result.metrics}.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        if result.loss.requires_grad:
            gradient[:, index] = torch.stack(torch.autograd.grad(result.loss, leaves, materialize_grads=True))
    return {**sums, "gradient": gradient}
