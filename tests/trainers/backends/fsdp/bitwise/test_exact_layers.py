"""Tests that layers with an engine's functions give the log-probs and gradients of transformers' formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.tests.trainers.backends.backend_ranks import (
    TINY,
    backend_config,
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
    assert first == ["norm", *LAYER, "norm", *LAYER, "norm", "linear", "token_logprobs"]
