"""Defines loss terms, how they average per-token losses, and the weighted sum that a train step minimises.

A step's loss is `sum over tokens / N`, and N is known only after the last microbatch. Therefore a term returns a plain
sum and declares what its N counts, and the train step divides once. The gradient is then the same however the step's
rows are divided into microbatches. An aggregation gives equal weight to tokens, to rows or to groups.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from ...actors.columns import ColumnConfig, made_up

Denominator = Literal["tokens", "sequences", "groups"]
"""Unit of N, the denominator of a loss, over the whole step: response tokens, rows with a response token, or groups
with such a row."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The response tokens of one microbatch, as flat tensors: T tokens of N rows.

    All of them are trained on. Tokens whose `response_mask` is 0 have already been removed, so a term needs no mask.
    With context parallelism a row's tokens are split over several ranks; T is then this rank's share of them, and N is
    the same on all these ranks. A term sums over its given tokens and uses `row_sum` for sums over whole rows.
    """

    logprobs: torch.Tensor
    """Log-probs of the tokens under the policy that is being trained: float32 `[T]`, with grad."""
    prev_logprobs: torch.Tensor
    """Log-probs of the tokens under the previous policy, whose probabilities are the denominators of the probability
    ratios: float32 `[T]`."""
    rollout_logprobs: torch.Tensor
    """Log-probs of the tokens under the engine policy that sampled them: float32 `[T]`."""
    ref_logprobs: torch.Tensor | None
    """Log-probs of the tokens under the reference policy: float32 `[T]`; None when the step has no reference policy."""
    advantages: torch.Tensor
    """Advantage of each token: float32 `[T]`. It is the advantage of the token's row, unless a KL penalty has lowered
    it."""
    row_ids: torch.Tensor
    """Row of each token: int64 `[T]`, 0..N-1, ascending."""
    row_tokens: torch.Tensor
    """Number of response tokens of each whole row: int64 `[N]`, 0 for a row whose rollout failed."""
    group_tokens: torch.Tensor | None = None
    """Number of response tokens that the step trains on in each row's whole group, over all microbatches and ranks:
    int64 `[N]`; None unless `loss.aggregation` is `prompt`."""
    entropy: torch.Tensor | None = None
    """Entropy (nats) of the trained policy's distribution at each token: float32 `[T]`, with grad; None unless
    `loss.entropy_coef` is above 0."""
    reduce_rows: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that sums a tensor `[N]` over the context-parallel ranks, which share the rows' tokens. In backward it
    also sums the gradients over these ranks, because each rank's loss depends on the sum. Collective. None when every
    row is whole on this rank."""
    teacher_logprobs: torch.Tensor | None = None
    """Log-probs of the tokens under the teachers, averaged with their weights: float32 `[T]`; None without one."""
    teacher_candidates: torch.Tensor | None = None
    """Log-probs of the teacher's k most likely tokens at each position under the teacher: float32 `[T, k]`; None unless
    `distillation.kind` is `topk`."""
    candidate_logprobs: torch.Tensor | None = None
    """Log-probs of these tokens under the policy that is being trained: float32 `[T, k]`, with grad; None unless
    `distillation.kind` is `topk`."""

    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """User-defined columns (`data.columns`) by name: `[N]` for a `per_sample` column, `[T]` for a `per_token`
    one, of the column's dtype."""

    def row_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum per-token `values` `[T]` over whole rows. Returns `[N]`, differentiable, with 0 for a row without tokens.

        This is the only way in which the loss at a token may depend on other tokens. Anything else would depend on
        which rows happen to be in the same microbatch or on the same rank.
        """
        sums = values.new_zeros(len(self.row_tokens)).index_add(0, self.row_ids, values)
        return sums if self.reduce_rows is None else self.reduce_rows(sums)


@dataclass(frozen=True, slots=True)
class TermSums:
    """The loss and metrics of one term on one microbatch."""

    loss: torch.Tensor
    """Sum of the losses over the microbatch: float32 scalar with grad. The step later divides it by its denominator
    N."""
    metrics: Mapping[str, torch.Tensor]
    """Sums of the metrics over the microbatch's tokens: float32 scalars without grad, in the order of the term's
    `metrics`. The step later divides them by its number of tokens."""


class LossTerm(Protocol):
    """One summand of the step's loss. It returns plain sums over each microbatch, which the step adds up and divides
    once, by its denominator N.

    Therefore the term's value on a row must not depend on which other rows are in the same microbatch.
    """

    @property
    def name(self) -> str: ...

    @property
    def denominator(self) -> Denominator: ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the term's metrics. The names never change, so that the ranks sum vectors of the same layout."""
        ...

    def __call__(self, inputs: LossInputs) -> TermSums: ...


class PolicyLoss:
    """The weighted sum of a step's loss terms, which share one denominator."""

    def __init__(self, terms: Sequence[tuple[float, LossTerm]], columns: Sequence[ColumnConfig] = ()) -> None:
        """Combine `terms`, which are pairs of (coefficient, term). columns: user-defined columns. Raises ValueError
        when there is no term, when a term's denominator is unknown or differs from the first term's, when two terms
        report the same metric, or when a term's sums depend on how rows are divided into microbatches. The error names
        the terms.
        """
        if not terms:
            raise ValueError("loss: got no terms, expected at least one")
        first = terms[0][1]
        owners: dict[str, str] = {}
        for _, term in terms:
            if term.denominator not in typing.get_args(Denominator):
                raise ValueError(
                    f"loss: {term.name} is a mean over {term.denominator}, expected a mean over tokens, "
                    "sequences or groups"
                )
            if term.denominator != first.denominator:
                raise ValueError(
                    f"loss: {first.name} is a mean over {first.denominator} and {term.name} over {term.denominator}; "
                    "expected one denominator for all terms of a step"
                )
            for metric in term.metrics:
                if metric in owners:
                    raise ValueError(f"loss: {owners[metric]} and {term.name} both report a metric {metric!r}")
                owners[metric] = term.name
            _check_linear(term, columns)
        self._terms = tuple(terms)
        self.denominator: Denominator = first.denominator
        self.metrics: tuple[str, ...] = tuple(owners)

    def __call__(self, inputs: LossInputs) -> TermSums:
        """Return the sum of coefficient times loss over all terms. The metrics of the terms have no coefficients."""
        metrics: dict[str, torch.Tensor] = {}
        losses = []
        for coefficient, term in self._terms:
            sums = term(inputs)
            losses.append(coefficient * sums.loss)
            metrics.update(sums.metrics)
        return TermSums(torch.stack(losses).sum(), {name: metrics[name] for name in self.metrics})


# ---------------- The sums of a loss must not depend on how rows are divided into microbatches.

_PROBE_TOKENS = (3, 1, 0, 2)
"""Number of response tokens of each of the four made-up rows that `_check_linear` uses. Rows 0 and 1 are one group,
rows 2 and 3 another."""


def _check_linear(term: LossTerm, columns: Sequence[ColumnConfig]) -> None:
    """Check that the sums of `term` do not depend on how rows are divided into microbatches.

    The term is evaluated on four made-up rows, once in a single microbatch and once in one microbatch per row. A term
    that takes a mean over the microbatch, which the step would divide by N again, gives different sums. Raises
    ValueError naming such a term.
    """
    whole = _probe(term, [[0, 1, 2, 3]], columns)
    parts = _probe(term, [[3], [0], [2], [1]], columns)
    for what, value in whole.items():
        if not torch.allclose(value, parts[what], rtol=1e-9, atol=1e-12):
            raise ValueError(
                f"loss: the {what} of {term.name} depends on which rows share a microbatch, expected a plain sum over "
                f"its tokens, as the step divides once by its {term.denominator}"
            )


@torch.enable_grad()
def _probe(term: LossTerm, micros: Sequence[Sequence[int]], columns: Sequence[ColumnConfig]) -> dict[str, torch.Tensor]:
    """Evaluate `term` on made-up rows. `micros` divides the rows into microbatches, each a list of row numbers.

    Returns the sums of the loss and of each metric over all microbatches, and as `gradient` the loss's gradient with
    respect to the log-prob, the entropy and the candidates of every token.
    """
    places = torch.arange(sum(_PROBE_TOKENS)).split(_PROBE_TOKENS)
    gradient = torch.zeros(4, sum(_PROBE_TOKENS), dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {"loss": torch.zeros((), dtype=torch.float64)}
    for rows in micros:
        index = torch.cat([places[row] for row in rows])
        series = [torch.sin((index + 1.0).double() * step) / 2 - 1 for step in range(1, 11)]
        now, prev, rollout, ref, entropy, teacher = series[:6]
        candidates, of_teacher = torch.stack(series[6:8], -1) - 1, torch.stack(series[8:], -1) - 1
        leaves = (now.requires_grad_(), entropy.requires_grad_(), candidates.requires_grad_())
        row_tokens = torch.tensor(_PROBE_TOKENS)[rows]
        row_ids = torch.repeat_interleave(torch.arange(len(rows)), row_tokens)
        inputs = LossInputs(
            *(now, prev, rollout, ref),
            advantages=torch.tensor([1.0, -0.5, 0.0, 0.75], dtype=torch.float64)[rows][row_ids],
            row_ids=row_ids,
            row_tokens=row_tokens,
            group_tokens=torch.tensor([4, 4, 2, 2])[rows],
            entropy=entropy,
            teacher_logprobs=teacher,
            teacher_candidates=of_teacher,
            candidate_logprobs=candidates,
            columns={column.name: _made_up(column, rows, index) for column in columns},
        )
        result = term(inputs)
        for name, value in {"loss": result.loss.detach(), **result.metrics}.items():
            sums[name] = sums.get(name, 0.0) + value.double()
        if result.loss.requires_grad:
            by_now, by_entropy, by_candidates = torch.autograd.grad(result.loss, leaves, materialize_grads=True)
            gradient[:, index] = torch.stack([by_now, by_entropy, *by_candidates.unbind(-1)])
    return {**sums, "gradient": gradient}


def _made_up(column: ColumnConfig, rows: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    if column.kind == "per_sample":
        return torch.from_numpy(made_up(column, len(_PROBE_TOKENS)))[rows]
    return torch.from_numpy(made_up(column, sum(_PROBE_TOKENS)))[index]
