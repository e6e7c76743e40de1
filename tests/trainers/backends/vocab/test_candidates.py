"""Tests log-probs of several tokens at each position against a plain softmax, whole and split over two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from headrace.tests.trainers.backends.backend_ranks import run_on_ranks
from headrace.trainers.backends.vocab import candidates as module
from headrace.trainers.backends.vocab.candidates import candidate_logprobs, most_likely
from headrace.trainers.backends.vocab.logprobs import VocabShard

VOCAB, WIDTH, TOKENS, K = 37, 8, 11, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCAB, WIDTH)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCAB, (TOKENS, K))


@pytest.mark.parametrize("elements", [2**24, 2 * VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, elements: int, temperature: float) -> None:
    monkeypatch.setattr(module, "LOGIT_ELEMENTS", elements)
    hidden, weight, wanted = inputs()
    every = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    expected = every.gather(-1, wanted)
    factors = torch.randn(TOKENS, K)
    slopes = torch.autograd.grad((expected * factors).sum(), [hidden, weight])
    head = partial(F.linear, weight=weight)
    got = candidate_logprobs(hidden, wanted, head, VOCAB, temperature)
    torch.testing.assert_close(got, expected)
    for one, other in zip(torch.autograd.grad((got * factors).sum(), [hidden, weight]), slopes, strict=True):
        torch.testing.assert_close(one, other)
    ids, top = most_likely(hidden, K, head, VOCAB, temperature)
    best = every.topk(K, -1)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(top, best.values)


def test_more_tokens_than_there_are_are_refused() -> None:
    hidden, weight, _ = inputs()
    with pytest.raises(ValueError, match="distillation.k: got 38, expected at most 37"):
        most_likely(hidden, 38, partial(F.linear, weight=weight), VOCAB, 1.0)


def split(rank: int, world: int) -> tuple[torch.Tensor, ...]:
    """Values, gradients of this rank's rows of the weight, and most likely tokens, with half of the vocabulary."""
    hidden, weight, wanted = inputs()
    width = (VOCAB + 1) // 2
    part = weight[rank * width : (rank + 1) * width]
    shard, head = VocabShard(dist.group.WORLD, rank * width, width, VOCAB), partial(F.linear, weight=part)  # type: ignore[arg-type]
    got = candidate_logprobs(hidden, wanted, head, shard, 0.7)
    slopes = torch.autograd.grad(got.square().sum(), [weight])[0]
    return got.detach(), slopes, *most_likely(hidden, K, head, shard, 0.7)


@pytest.mark.processes
def test_a_vocabulary_that_is_split(tmp_path: Path) -> None:
    hidden, weight, wanted = inputs()
    every = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    expected = every.gather(-1, wanted)
    (slopes,) = torch.autograd.grad(expected.square().sum(), [weight], retain_graph=True)
    best = every.topk(K, -1)
    found = run_on_ranks(split, 2, tmp_path)
    torch.testing.assert_close(found[0][1] + found[1][1], slopes, rtol=1e-4, atol=1e-4)
    for values, _, ids, top in found:
        torch.testing.assert_close(values, expected.detach())
        assert torch.equal(ids, best.indices)
        torch.testing.assert_close(top, best.values.detach())
