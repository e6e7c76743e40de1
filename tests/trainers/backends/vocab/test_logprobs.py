"""Tests of log-probs and entropies of chunks of tokens against autograd on all logits, in torch and in Triton."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from headrace.tests.trainers.backends.vocab.kernel_checks import check_kernels
from headrace.trainers.backends.vocab import logprobs as vocab_logprobs
from headrace.trainers.backends.vocab.logprobs import Entropy, token_logprobs


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    every = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("entropy", ["off", "report", "train"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", [0, 1, 4, 11])
def test_chunks_give_values_and_gradients_of_the_whole(
    entropy: Entropy, temperature: float, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocab_logprobs, "LOGIT_ELEMENTS", 4 * 37)  # chunks of four tokens
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    weight = torch.randn(37, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, 37, (tokens,), generator=generator)
    mix = torch.randn(2, tokens, generator=generator)
    logprobs, entropies = token_logprobs(hidden, targets, weight, 37, temperature=temperature, entropy=entropy)
    wanted, wanted_entropies = reference(hidden, weight, targets, temperature)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-6, atol=1e-6)
    loss, wanted_loss = (logprobs * mix[0]).sum(), (wanted * mix[0]).sum()
    assert (entropies is None) == (entropy == "off")
    if entropies is not None:
        torch.testing.assert_close(entropies, wanted_entropies, rtol=1e-6, atol=1e-6)
        assert entropies.requires_grad == (entropy == "train")
    if entropies is not None and entropy == "train":
        loss, wanted_loss = loss + (entropies * mix[1]).sum(), wanted_loss + (wanted_entropies * mix[1]).sum()
    ours = torch.autograd.grad(loss, (hidden, weight))
    theirs = torch.autograd.grad(wanted_loss, (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_callable_head_gives_what_its_weight_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab_logprobs, "LOGIT_ELEMENTS", 4 * 37)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 8, generator=generator), torch.randn(37, 8, generator=generator)
    targets = torch.randint(0, 37, (9,), generator=generator)
    called, _ = token_logprobs(hidden, targets, lambda states: states @ weight.t(), 37)
    given, _ = token_logprobs(hidden, targets, weight, 37)
    torch.testing.assert_close(given, called, rtol=1e-6, atol=1e-6)


def test_half_precision_sums_the_weights_gradient_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token a chunk, sums in bfloat16 would lose most of 512 equal parts."""
    monkeypatch.setattr(vocab_logprobs, "LOGIT_ELEMENTS", 5)
    hidden, weight = torch.ones(512, 2, dtype=torch.bfloat16), torch.zeros(5, 2, dtype=torch.bfloat16)
    weight.requires_grad_()
    logprobs, _ = token_logprobs(hidden, torch.zeros(512, dtype=torch.int64), weight, 5)
    logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(weight.grad[:, 0].float(), 512 * torch.tensor([0.8, *[-0.2] * 4]), rtol=1e-2, atol=0)


@pytest.mark.processes
def test_kernels_do_what_torch_does() -> None:
    """Without a GPU Triton's interpreter runs them, which it only does in a process that imports Triton like that."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        check_kernels("cuda")
        return
    command = [sys.executable, "-m", "headrace.tests.trainers.backends.vocab.kernel_checks"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("4 checks\n"), done.stdout + done.stderr
