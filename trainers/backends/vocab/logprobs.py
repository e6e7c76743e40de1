"""Computes log-probs and entropies of tokens from hidden states, for a vocabulary that is whole or split over ranks.

The logits of all tokens would be the largest tensor of a step: `T x V` in float32 takes 20 GB for T = 32k tokens and a
vocabulary of V = 150k. Therefore they are computed for one chunk of tokens at a time, and again in backward. With a
whole vocabulary, log-probs and their gradients are computed from the chunk's logits as they come, which is in bfloat16
with mixed precision, and on a GPU without any copy of them (`kernels.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .allowed import OUTSIDE, Allowed, parts_of

LOGIT_ELEMENTS = 2**24
"""Largest number of float32 logits that a rank computes at a time on a CPU (64 MiB), or twice as many in bfloat16."""

GPU_LOGIT_ELEMENTS = 2**26
"""Largest number of float32 logits that a rank computes at a time on a GPU (256 MiB), or twice as many in bfloat16.

With a lower limit the chunks of a large vocabulary would have too few tokens to keep the GPU's matrix units busy.
"""

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function that returns `x @ weight.T`."""
Entropy = Literal["off", "report", "train"]
"""Ways to compute the entropy: `off` for not at all, `report` for a metric without gradient, `train` for a loss term
with gradient."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The part of the vocabulary whose logits this rank computes; the ranks of `group` together hold all of it."""

    group: dist.ProcessGroup
    start: int
    """Token id of this rank's first logit."""
    width: int
    """Largest number of logits per token on any rank of the group. Chunk sizes are computed from it, so that all ranks
    divide the tokens into the same chunks."""
    size: int
    """Number of tokens of the whole vocabulary."""


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor] | torch.Tensor,
    vocab: int | VocabShard,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "off",
    allowed: Allowed | None = None,
    exact: ExactSoftmax | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of `targets` (float32 `[T]`) and the entropies in nats (float32 `[T]`, or None for "off").

    `hidden` `[T, H]` and the token ids `targets` (int64 `[T]`) are the same on all ranks of a shard's group. `head`
    maps hidden states `[t, H]` to this rank's logits `[t, v]`; in backward it must sum the gradient of its input over
    the group. With a whole vocabulary it may be the weight of an output layer without bias, `[V, H]`, which is faster.
    `vocab` is the size of the vocabulary, or this rank's shard when the vocabulary is split over ranks. Logits are
    divided by `temperature`. With `allowed`, log-probs and entropies are those of the distribution over each token's
    set alone. With `exact`, which needs the weight of an output layer, log-probs are computed by its functions.
    Collective over the group, and in the backward pass, too, when there is more than one chunk. Raises ValueError for a
    set with a token outside the vocabulary.
    """
    width = vocab if isinstance(vocab, int) else vocab.width
    shard = None if isinstance(vocab, int) else vocab
    if allowed is not None:
        allowed.expect_known(width if shard is None else shard.size)
    elements = GPU_LOGIT_ELEMENTS if hidden.is_cuda else LOGIT_ELEMENTS
    rows = max(1, elements // width)
    if isinstance(head, torch.Tensor):
        assert shard is None, "the logits of a shard need communication"
        rows *= 4 // head.dtype.itemsize
        values = _WholeSoftmax.apply(hidden, head, targets, temperature, entropy, rows, allowed, exact)
        assert isinstance(values, tuple)
        return values
    assert exact is None, "the layer of exact log-probs has no bias and is not split"
    if len(hidden) <= rows:
        return _chunk(hidden, targets, head, shard, temperature, entropy, allowed)
    parts = [
        checkpoint(_chunk, h, t, head, shard, temperature, entropy, a, use_reentrant=False, preserve_rng_state=False)
        for h, t, a in zip(hidden.split(rows), targets.split(rows), parts_of(allowed, len(hidden), rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), None if entropy == "off" else torch.cat(entropies)


def _chunk(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    shard: VocabShard | None,
    temperature: float,
    entropy: Entropy,
    allowed: Allowed | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
    if allowed is not None:
        logits = logits.masked_fill(allowed.outside(logits, 0 if shard is None else shard.start), OUTSIDE)
    if temperature != 1.0:
        logits = logits / temperature
    if shard is not None:
        logprobs, entropies = _SplitSoftmax.apply(logits, targets, shard, entropy)
        return logprobs, entropies
    logprobs = -F.cross_entropy(logits, targets, reduction="none")
    if entropy == "off":
        return logprobs, None
    with torch.no_grad() if entropy == "report" else nullcontext():
        every = torch.log_softmax(logits, -1)
        return logprobs, -(every.exp() * every).sum(-1)


@dataclass(frozen=True, slots=True)
class ExactSoftmax:
    """Computes log-probs with the functions of an engine, and their gradients as always."""

    linear: Linear
    divide: Callable[[torch.Tensor, float], torch.Tensor]
    """Function that returns logits divided by the temperature, as the engine rounds them. It may overwrite them."""
    token_logprobs: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Function of divided logits `[t, V]` and tokens (int64 `[t]`) that returns the tokens' log-probs and their logits,
    float32 `[t]`."""

    def softmax_sums(
        self, logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Do what the function `softmax_sums` does."""
        divided, entropies = self.divide(logits, temperature), None
        if with_entropy:
            _, _, entropies = _kernels(logits).softmax_sums(divided, targets, 1.0, with_entropy=True)
        logprobs, picked = self.token_logprobs(divided, targets)
        return picked - logprobs, logprobs, entropies

    def softmax_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        log_totals: torch.Tensor,
        of_logprobs: torch.Tensor,
        entropies: torch.Tensor | None,
        of_entropies: torch.Tensor | None,
    ) -> torch.Tensor:
        """Do what the function `softmax_gradient` does, for the logits as the engine divides and rounds them.

        `log_totals` are theirs: the probabilities of other logits would not add up to 1, and a token that is almost
        certain would have a gradient.
        """
        scaled = None if of_entropies is None else of_entropies / temperature
        divided, of_logprobs = self.divide(logits, temperature), of_logprobs / temperature
        kernels = _kernels(logits)
        found = kernels.softmax_gradient(divided, targets, 1.0, log_totals, of_logprobs, entropies, scaled)
        return found.to(logits.dtype)


class _WholeSoftmax(torch.autograd.Function):
    """Computes log-probs and entropies from hidden states and the weight of the output layer, chunk by chunk.

    Neither pass keeps logits, so the backward pass computes those of a chunk again. The gradient of the weight is
    summed over the chunks in float32. For the formulas see `_SplitSoftmax`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
        entropy: Entropy, rows: int, allowed: Allowed | None, exact: ExactSoftmax | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        kernels, linear = _functions(hidden, exact)
        parts = [
            kernels.softmax_sums(_logits(linear, h, weight, a), t, temperature, with_entropy=entropy != "off")
            for h, t, a in zip(
                hidden.split(rows), targets.split(rows), parts_of(allowed, len(hidden), rows), strict=True
            )
        ]
        log_totals, logprobs = (torch.cat([part[index] for part in parts]) for index in (0, 1))
        entropies = None if entropy == "off" else torch.cat([part[2] for part in parts])
        ctx.save_for_backward(hidden, weight, targets, log_totals, entropies)
        ctx.temperature, ctx.rows, ctx.allowed, ctx.exact = temperature, rows, allowed, exact
        if entropy == "report":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, log_totals, entropies = ctx.saved_tensors
        kernels, linear = _functions(hidden, ctx.exact)
        of_logprobs = torch.zeros_like(log_totals) if grads[0] is None else grads[0].contiguous()
        of_entropies = None if grads[1] is None else grads[1].contiguous()
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            sets = None if ctx.allowed is None else ctx.allowed.part(start, start + ctx.rows)
            of_logits = kernels.softmax_gradient(
                _logits(linear, hidden[part], weight, sets), targets[part], ctx.temperature, log_totals[part],
                of_logprobs[part],
                None if of_entropies is None else entropies[part],
                None if of_entropies is None else of_entropies[part],
            )  # fmt: skip
            torch.mm(of_logits, weight, out=of_hidden[part])
            if of_weight is not None:
                of_weight += of_logits.t() @ hidden[part]
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), *[None] * 6


def _logits(linear: Linear, hidden: torch.Tensor, weight: torch.Tensor, allowed: Allowed | None) -> torch.Tensor:
    logits = linear(hidden, weight)
    return logits if allowed is None else logits.masked_fill_(allowed.outside(logits), OUTSIDE)


def _functions(hidden: torch.Tensor, exact: ExactSoftmax | None = None) -> tuple[Any, Linear]:
    """Return what has `softmax_sums` and `softmax_gradient` for tensors like `hidden`, and the product with the weight.
    It is `exact`, or the module `kernels` (Triton) on a GPU, else this module."""
    if exact is not None:
        return exact, exact.linear
    return _kernels(hidden), F.linear


def _kernels(hidden: torch.Tensor) -> Any:
    if hidden.is_cuda:
        from . import kernels

        return kernels
    return sys.modules[__name__]


def softmax_sums(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return log-sum-exp of all logits, the log-probs of `targets` (int64 `[t]`), and entropies in nats, float32 `[t]`.
    Entropies are None unless `with_entropy`. `logits` `[t, V]` are divided by `temperature` first."""
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_totals = torch.logsumexp(z, -1)
    every = z - log_totals[:, None]
    entropies = -(every.exp() * every).sum(-1) if with_entropy else None
    return log_totals, z.gather(-1, targets[:, None])[:, 0] - log_totals, entropies


def softmax_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    log_totals: torch.Tensor,
    of_logprobs: torch.Tensor,
    entropies: torch.Tensor | None,
    of_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of the logits, `[t, V]` in their dtype, from those of log-probs and entropies. These two are
    float32 `[t]`; the second is None if entropies have no gradient. The values of `logits` may be overwritten.
    log_totals: from `softmax_sums`."""
    z = logits.float() if temperature == 1.0 else logits.float() / temperature
    every = z - log_totals[:, None]
    chances = every.exp()
    result = chances * -of_logprobs[:, None]
    if entropies is not None and of_entropies is not None:
        result -= chances * (every + entropies[:, None]) * of_entropies[:, None]
    result.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return (result if temperature == 1.0 else result / temperature).to(logits.dtype)


class _SplitSoftmax(torch.autograd.Function):
    """Computes log-probs and entropies from logits whose columns are split over ranks.

    This is the method of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Let z be the logits of one
    position, l the log-probs of all tokens there, and H the entropy. Then d l[target] / d z[j] = 1(j is target) -
    exp(l[j]) and d H / d z[j] = -exp(l[j]) (l[j] + H). The gradient of the outputs is the same on every rank, so
    backward needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, entropy: Entropy
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=shard.group)
        shifted = logits - top[:, None]
        weights = shifted.exp()
        local = targets - shard.start
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.where(here, 0)
        picked = shifted.gather(-1, local[:, None])[:, 0].where(here, 0.0)
        sums = [weights.sum(-1), picked]
        if entropy != "off":
            sums.append((weights * shifted).sum(-1))
        totals = torch.stack(sums)
        dist.all_reduce(totals, group=shard.group)
        log_total = totals[0].log()
        entropies = None if entropy == "off" else log_total - totals[2] / totals[0]
        ctx.save_for_backward(shifted.sub_(log_total[:, None]), local, here, entropies)
        if entropy == "report":
            ctx.mark_non_differentiable(entropies)
        return totals[1] - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        every, local, here, entropies = ctx.saved_tensors
        probabilities = every.exp()
        of_logprobs, of_entropies = grads
        result = torch.zeros_like(every)
        if of_logprobs is not None:
            result -= probabilities * of_logprobs[:, None]
            result.scatter_add_(-1, local[:, None], of_logprobs.where(here, 0.0)[:, None])
        if of_entropies is not None and entropies is not None:
            result -= probabilities * (every + entropies[:, None]) * of_entropies[:, None]
        return result, None, None, None
