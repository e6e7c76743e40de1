"""Tests that layers with an engine's functions give the log-probs and gradients of transformers' formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from headrace.tests.trainers.backends.backend_ranks import (
    TINY,
    backend_config,
    flat_gradients,
    gradients_of,
    logprobs_of,
    micro_batch,
    random_rows,
    save_tiny_model,
)
from headrace.tests.trainers.backends.fsdp.bitwise.plain_functions import PlainFunctions
from headrace.trainers.backends.fsdp import causal_lm
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.fsdp.bitwise.engine_functions import use_functions
from headrace.trainers.backends.vocab.logprobs import Entropy, ExactSoftmax, token_logprobs
from headrace.trainers.losses.config import LossConfig

LAYER = ["linear", "norm", "norm", "rotate", "attend", "linear", "norm", "linear", "gate", "linear"]
"""Functions of a layer in the order in which an engine calls them, after the norm of its input."""


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, recompute: str
) -> None:
    model = save_tiny_model(tmp_path / "model", tied=tied)
    functions = PlainFunctions(TINY["head_dim"], TINY["max_position_embeddings"], 10000.0, torch.float32)
    monkeypatch.setattr(causal_lm, "compute_as_engine", lambda model, *_: use_functions(model, functions))
    config = backend_config(
        model, packing="packed", recompute=recompute, loss=LossConfig(clip_low=0.1, clip_high=0.15),
        with_reference=False,
    )  # fmt: skip
    plain, exact = FsdpBackend(config, 0, 1), FsdpBackend(replace(config, bitwise="hf"), 0, 1)
    functions.calls.clear()
    micros = [micro_batch(random_rows(5, 6)), micro_batch(random_rows(6, 3))]
    torch.testing.assert_close(logprobs_of(exact, micros[0]), logprobs_of(plain, micros[0]), rtol=0, atol=1e-6)
    expected, found = gradients_of(plain, micros), gradients_of(exact, micros)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    first = functions.calls[: functions.calls.index("token_logprobs") + 1]
    assert first == ["norm", *LAYER, "norm", *LAYER, "norm", "linear", "divide", "token_logprobs"]


def test_gradients_in_bfloat16_are_as_near_to_those_of_float32_as_without_the_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {**TINY, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 8, "initializer_range": 0.15}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16().save_pretrained(tmp_path)
    functions = PlainFunctions(32, TINY["max_position_embeddings"], 10000.0, torch.bfloat16)
    monkeypatch.setattr(causal_lm, "compute_as_engine", lambda model, *_: use_functions(model, functions))
    loss = LossConfig(clip_low=0.9, clip_high=9.0)
    found = {}
    for name, half, bitwise in (("float32", False, None), ("ordinary", True, None), ("exact", True, "hf")):
        config = backend_config(
            str(tmp_path), packing="packed", mixed_precision=half, loss=loss, with_reference=False, prev="train_pass"
        )
        found[name] = flat_gradients(FsdpBackend(replace(config, bitwise=bitwise), 0, 1), [random_rows(1, 24)])
    errors = {name: float((own - found["float32"]).norm() / found["float32"].norm()) for name, own in found.items()}
    assert 0.005 < errors["exact"] < 1.1 * errors["ordinary"] < 0.2, errors


@pytest.mark.parametrize("entropy", ["off", "train"])
def test_gradients_are_those_of_the_logits_that_the_engine_rounds(entropy: Entropy) -> None:
    """An engine divides logits by the temperature in bfloat16. Tokens that are almost certain keep a gradient of 0."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(200, 16).bfloat16(), (4 * torch.randn(300, 16)).bfloat16()
    targets = (hidden @ weight.t()).argmax(-1)
    functions = PlainFunctions(8, 8, 1e4, torch.bfloat16)
    exact = ExactSoftmax(functions.linear, functions.divide, functions.token_logprobs)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    values = token_logprobs(hidden, targets, weight, len(weight), temperature=0.7, entropy=entropy, exact=exact)
    found = torch.autograd.grad(torch.stack([one.sum() for one in values if one is not None]).sum(), inputs)
    wide = [one.detach().float().requires_grad_() for one in inputs]
    logits = wide[0] @ wide[1].t()
    rounded = (logits.detach().bfloat16() / 0.7).float() + (logits - logits.detach()) / 0.7
    every = torch.log_softmax(rounded, -1)
    total = every.gather(-1, targets[:, None]).sum()
    if entropy == "train":
        total = total - (every.exp() * every).sum()
    for ours, theirs in zip(found, torch.autograd.grad(total, wide), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.01
