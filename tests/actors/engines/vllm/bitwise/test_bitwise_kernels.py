"""Tests of what the bitwise mode does to vLLM, with a vLLM in which only the functions that it touches exist."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.actors.engines.vllm.bitwise.kernels import INVARIANT, invariant_environment, normalize_sums_row_by_row

LAYERS = "vllm.model_executor.layers"


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6, residual: Any = None) -> torch.Tensor:
    assert residual is None, "vLLM's function for sums depends on the batch"
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def install(monkeypatch: pytest.MonkeyPatch, release: str, *, cpu: bool = False) -> Any:
    """Install a vLLM of a release, and return its module of norms."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": release},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.model_executor": {},
        LAYERS: {},
        f"{LAYERS}.batch_invariant": {"rms_norm_batch_invariant": norm},
        f"{LAYERS}.layernorm": {"rms_norm_batch_invariant": norm},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    layers: Any = sys.modules[LAYERS]
    layers.layernorm = sys.modules[f"{LAYERS}.layernorm"]
    return layers.layernorm


def test_norms_of_sums_are_those_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not depend on the environment, which a standby gets only after it has imported the worker."""
    for name in INVARIANT:
        monkeypatch.delenv(name, raising=False)
    norms = install(monkeypatch, "0.26.0")
    normalize_sums_row_by_row()
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    normed, total = norms.rms_norm_batch_invariant(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, x + residual) and torch.equal(normed, norm(total, weight, 1e-5))
    assert torch.equal(norms.rms_norm_batch_invariant(x, weight, 1e-5), norm(x, weight, 1e-5))


def test_other_releases_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = install(monkeypatch, "0.32.1")
    normalize_sums_row_by_row()
    assert norms.rms_norm_batch_invariant is norm


def test_engines_that_were_not_compared_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "0.26.1")
    assert invariant_environment() == INVARIANT
    install(monkeypatch, "0.32.1")
    with pytest.raises(ValueError, match="run.bitwise: got true with vLLM 0.32.1, expected vLLM 0.26"):
        invariant_environment()
    install(monkeypatch, "0.26.0", cpu=True)
    with pytest.raises(ValueError, match="rollout.engine: got 'vllm' with run.bitwise=true on CPUs, expected 'hf'"):
        invariant_environment()
