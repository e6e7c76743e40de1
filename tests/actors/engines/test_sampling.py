"""Tests of sampling: distributions are compared with transformers' warpers, and draws with their probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.actors.engines.protocol import SamplingParams
from headrace.actors.engines.token_sampling import draw, log_distribution, row_keys, uniforms


def logits(rows: int = 64, vocab: int = 50) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
def test_distribution_equals_transformers_warpers(temperature: float, top_k: int, top_p: float) -> None:
    scores: Any = logits()
    ids: Any = torch.zeros(len(scores), 1, dtype=torch.long)
    expected: Any = TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        expected = TopKLogitsWarper(top_k)(ids, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(ids, expected)
    expected = torch.log_softmax(expected, dim=-1)
    ours = log_distribution(scores, temperature, top_p, top_k)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_greedy_reports_temperature_one() -> None:
    scores = logits()
    torch.testing.assert_close(log_distribution(scores, 0.0, 0.5, 3), torch.log_softmax(scores, -1))


def test_draws_follow_the_distribution_and_never_take_a_cut_token() -> None:
    log_probs = log_distribution(logits(1, 12), 1.0, top_p=0.9).expand(20_000, -1)
    keys = row_keys(0, "request", 20_000)
    tokens = draw(log_probs, torch.from_numpy(uniforms(keys, 3)))
    share = torch.bincount(tokens, minlength=12) / len(tokens)
    expected = log_probs[0].exp()
    assert (share[expected == 0] == 0).all() and (expected == 0).any()
    torch.testing.assert_close(share, expected, rtol=0, atol=0.015)


def test_draw_at_the_edges_of_the_unit_interval() -> None:
    log_probs = torch.log(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])).expand(2, -1)
    assert draw(log_probs, torch.tensor([0.0, 1 - 2.0**-32], dtype=torch.float64)).tolist() == [1, 3]


def test_random_numbers_belong_to_seed_request_sample_and_step() -> None:
    base = row_keys(0, "a", 4)
    assert len({*base, *row_keys(1, "a", 4), *row_keys(0, "b", 4)}) == 12
    assert np.array_equal(base[:2], row_keys(0, "a", 2))
    many = np.stack([uniforms(base, step) for step in range(1000)])
    assert len(np.unique(many)) > 3990 and 0.0 <= many.min() and many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.02 and np.abs(np.corrcoef(many.T) - np.eye(4)).max() < 0.1


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_impossible_parameters_are_named(wrong: dict) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"sampling {name}: got"):
        SamplingParams(**wrong)
