"""Computes log-probs of several tokens at each position, given or the most likely ones, as distillation needs them.

Like `logprobs.py`, it computes the logits of one chunk of tokens at a time, and again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from .logprobs import GPU_LOGIT_ELEMENTS, LOGIT_ELEMENTS, VocabShard

Head = Callable[[torch.Tensor], torch.Tensor]


def candidate_logprobs(
    hidden: torch.Tensor, candidates: torch.Tensor, head: Head, vocab: int | VocabShard, temperature: float
) -> torch.Tensor:
    """Return the log-probs of the token ids `candidates` (int64 `[T, k]`), float32 `[T, k]`, with grad.

    hidden, head, vocab, temperature: as in `token_logprobs`. Collective over the group of a shard.
    """
    shard = None if isinstance(vocab, int) else vocab
    rows = _rows(hidden, vocab)
    if len(hidden) <= rows:
        return _picked(hidden, candidates, head, shard, temperature)
    parts = zip(hidden.split(rows), candidates.split(rows), strict=True)
    return torch.cat(
        [
            checkpoint(_picked, h, c, head, shard, temperature, use_reentrant=False, preserve_rng_state=False)
            for h, c in parts
        ]
    )


@torch.no_grad()
def most_likely(
    hidden: torch.Tensor, k: int, head: Head, vocab: int | VocabShard, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of the `k` most likely tokens at each position, int64 `[T, k]`, and their log-probs, float32.

    hidden, head, vocab, temperature: as in `token_logprobs`. Collective over the group of a shard. Raises ValueError
    when the vocabulary, or the smallest shard of it, has fewer than `k` tokens.
    """
    shard = None if isinstance(vocab, int) else vocab
    ids, values = [], []
    for part in hidden.split(_rows(hidden, vocab)):
        logits = head(part).float() / temperature
        if logits.shape[-1] < k:
            raise ValueError(f"distillation.k: got {k}, expected at most {logits.shape[-1]}, the tokens of a rank")
        top, best = logits.topk(k, dim=-1)
        if shard is not None:
            top, best = _best_of_all(top, best + shard.start, k, shard.group)
        values.append(top - _log_total(logits, shard)[:, None])
        ids.append(best)
    return torch.cat(ids), torch.cat(values)


def _rows(hidden: torch.Tensor, vocab: int | VocabShard) -> int:
    width = vocab if isinstance(vocab, int) else vocab.width
    return max(1, (GPU_LOGIT_ELEMENTS if hidden.is_cuda else LOGIT_ELEMENTS) // width)


def _best_of_all(
    top: torch.Tensor, ids: torch.Tensor, k: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest of the logits `top` of all ranks, and the ids of their tokens, each `[t, k]`."""
    size = dist.get_world_size(group)
    tops, every = ([torch.empty_like(one) for _ in range(size)] for one in (top, ids))
    dist.all_gather(tops, top.contiguous(), group=group)
    dist.all_gather(every, ids.contiguous(), group=group)
    best, places = torch.cat(tops, -1).topk(k, dim=-1)
    return best, torch.cat(every, -1).gather(-1, places)


def _log_total(logits: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
    totals = torch.logsumexp(logits, -1)
    if shard is None:
        return totals
    every = [torch.empty_like(totals) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(every, totals, group=shard.group)
    return torch.logsumexp(torch.stack(every), 0)


def _picked(
    hidden: torch.Tensor, candidates: torch.Tensor, head: Head, shard: VocabShard | None, temperature: float
) -> torch.Tensor:
    values = _Picked.apply(head(hidden).float() / temperature, candidates, shard)
    assert isinstance(values, torch.Tensor)
    return values


class _Picked(torch.autograd.Function):
    """Picks log-probs of several tokens from logits, whose columns may be split over ranks.

    With z the logits of one position and l the log-probs there, d l[c] / d z[j] = 1(j is c) - exp(l[j]) for each
    candidate c, as in `_SplitSoftmax`. The gradient of the outputs is the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, candidates: torch.Tensor, shard: VocabShard | None) -> torch.Tensor:
        every = logits - _log_total(logits, shard)[:, None]
        local = candidates - (0 if shard is None else shard.start)
        here = (local >= 0) & (local < logits.shape[-1])
        local = local.where(here, 0)
        picked = every.gather(-1, local).where(here, 0.0)
        if shard is not None:
            dist.all_reduce(picked, group=shard.group)
        ctx.save_for_backward(every, local, here)
        return picked

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        every, local, here = ctx.saved_tensors
        result = every.exp() * -grads[0].sum(-1, keepdim=True)
        return result.scatter_add_(-1, local, grads[0].where(here, 0.0)), None, None
