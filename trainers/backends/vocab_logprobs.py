"""Computes log-probs and entropies of tokens from hidden states, for a vocabulary that is whole or split over ranks.

The logits of all tokens would be the largest tensor of a step: `T x V` in float32 takes 20 GB for T = 32k tokens and a
vocabulary of V = 150k. Therefore they are computed for one chunk of tokens at a time, and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LOGIT_ELEMENTS = 2**24
"""Largest number of float32 logits that a rank computes at a time on a CPU (64 MiB)."""

GPU_LOGIT_ELEMENTS = 2**27
"""Largest number of float32 logits that a rank computes at a time on a GPU (512 MiB).

With a lower limit the chunks of a large vocabulary would have too few tokens to keep the GPU's matrix units busy.
"""

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


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    vocab: int | VocabShard,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "off",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of `targets` (float32 `[T]`) and the entropies in nats (float32 `[T]`, or None for "off").

    `hidden` `[T, H]` and the token ids `targets` (int64 `[T]`) are the same on all ranks of a shard's group. `head`
    maps hidden states `[t, H]` to this rank's logits `[t, v]`; in backward it must sum the gradient of its input over
    the group. `vocab` is the size of the vocabulary, or this rank's shard when the vocabulary is split over ranks.
    Logits are divided by `temperature`. Collective over the group, also in the backward pass when there is more than
    one chunk.
    """
    width = vocab if isinstance(vocab, int) else vocab.width
    shard = None if isinstance(vocab, int) else vocab
    elements = GPU_LOGIT_ELEMENTS if hidden.is_cuda else LOGIT_ELEMENTS
    rows = max(1, elements // width)
    if len(hidden) <= rows:
        return _chunk(hidden, targets, head, shard, temperature, entropy)
    parts = [
        checkpoint(_chunk, h, t, head, shard, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
        for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)
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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = head(hidden).float()
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
