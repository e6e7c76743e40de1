"""Tests that what layers keep, and whether they are compiled, changes neither loss nor gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.tests.trainers.backends.backend_ranks import (
    backend_config,
    flat_gradients,
    micro_batch,
    random_rows,
    save_tiny_model,
    save_tiny_moe,
)
from headrace.trainers.backends.config import TrainerConfig
from headrace.trainers.backends.fsdp import causal_lm
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.backends.model_split import mesh_problems


def gradient(backend: FsdpBackend) -> torch.Tensor:
    """Return the flat summed gradient of two microbatches."""
    rows = random_rows(7, 9)
    return flat_gradients(backend, [rows[:4], rows[4:]])


@pytest.fixture
def eager_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Have torch.compile trace and differentiate, but run the traced operators themselves: C++ takes a minute."""
    compiled: list[Any] = []
    real = torch.compile

    def compile_(function: Any) -> Any:
        compiled.append(function)
        return real(function, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_)
    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("save", [save_tiny_model, save_tiny_moe])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_computing_again_changes_no_gradient(tmp_path: Path, save: Any, mode: str) -> None:
    model = save(tmp_path)
    plain, again = (
        FsdpBackend(backend_config(model, packing="packed", recompute=recompute), 0, 1) for recompute in ("none", mode)
    )
    assert torch.equal(gradient(plain), gradient(again))


@pytest.mark.parametrize(
    ("changes", "calls"),
    [({}, [2, 2]), ({"recompute": "full"}, [4, 4]), ({"recompute": "full", "recompute_layers": 1}, [4, 2])],
)
def test_only_the_first_layers_are_computed_again(tmp_path: Path, changes: dict[str, Any], calls: list[int]) -> None:
    """The forward of a layer that keeps its values runs once for each of the two microbatches."""
    backend, seen = FsdpBackend(backend_config(save_tiny_model(tmp_path), **changes), 0, 1), list[int]()
    for index, layer in enumerate(backend._policy.layers()):
        layer.get_submodule("mlp").register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    gradient(backend)
    assert [seen.count(index) for index in range(2)] == calls


def test_selective_keeps_matrix_products_and_computes_norms_again(tmp_path: Path) -> None:
    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[str, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            self.calls[name] = self.calls.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    model, counts = save_tiny_model(tmp_path), {}
    for mode in ("none", "selective", "full"):
        backend = FsdpBackend(backend_config(model, recompute=mode), 0, 1)
        with Counter() as counter:
            gradient(backend)
        counts[mode] = counter.calls
    assert counts["selective"]["mm"] == counts["none"]["mm"] < counts["full"]["mm"]
    assert counts["selective"]["rsqrt"] == counts["full"]["rsqrt"] > counts["none"]["rsqrt"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks for it itself
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mixed_precision": True}, id="half"),
        pytest.param({}, id="exact", marks=pytest.mark.slow),
        pytest.param({"recompute": "full"}, id="full", marks=pytest.mark.slow),
        pytest.param({"recompute": "full", "fp8": "rowwise"}, id="fp8", marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_change_no_gradient(tmp_path: Path, changes: dict[str, Any], eager_compiler: list[Any]) -> None:
    model = save_tiny_model(tmp_path)
    plain = FsdpBackend(backend_config(model, packing="packed", **changes), 0, 1)
    wanted = gradient(plain)
    compiled = FsdpBackend(backend_config(model, packing="packed", compile=True, **changes), 0, 1)
    assert len(eager_compiler) == 2, "two layers"
    got = gradient(compiled)
    most = 5e-2 if changes.get("mixed_precision") else 1e-6
    assert torch.linalg.norm(got - wanted) <= most * torch.linalg.norm(wanted)


@torch.library.custom_op("headrace_tests::scaled", mutates_args=())
def scaled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    """Stand in for torch's variable-length kernel, which needs a GPU. It is an operator with the same arguments that
    only scales the queries."""
    assert int(ends.diff().max()) == longest
    return q * scale


@scaled.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q)


scaled.register_autograd(
    lambda ctx, grad: (grad * ctx.scale, None, None, None, None, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "scale", inputs[5]),
)


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends: torch.Tensor,
    _: Any,
    longest: tuple[int, int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    return scaled(q, k, v, ends, longest[0], scale)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_are_not_compiled_again_for_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager_compiler: list[Any]
) -> None:
    """With attention as on GPUs, which is part of the compiled layers: these hold for any number of rows and tokens."""
    monkeypatch.setattr(causal_lm, "attend_rows", attend_rows)
    real = FsdpBackend._build

    def build(backend: FsdpBackend, source: Any, *, trained: bool) -> Any:
        policy = real(backend, source, trained=trained)
        causal_lm.use_varlen_attention(policy.model)
        return policy

    monkeypatch.setattr(FsdpBackend, "_build", build)
    backend, graphs = FsdpBackend(backend_config(save_tiny_model(tmp_path), packing="packed", compile=True), 0, 1), []
    for seed in range(4):
        rows = random_rows(seed, 8 + seed)
        backend.begin_step()
        backend.accumulate(iter([micro_batch(rows[:3]), micro_batch(rows[3:7]), micro_batch(rows[seed:])]), 3)
        backend.abort_step()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs


def test_selective_with_compiled_layers_is_refused() -> None:
    trainer = TrainerConfig(recompute="selective", compile=True)
    [problem] = mesh_problems(trainer)
    assert problem.startswith("trainer.recompute: got 'selective' with trainer.compile=true, expected 'none' or 'full'")
