"""The fsdp backend balances experts as the formulas say, in every layout, and leaves other models alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.engines.config import RouterReplayConfig
from headrace.tests.trainers.backends.backend_ranks import (
    backend_config,
    gradients_of,
    micro_batch,
    random_rows,
    run_step,
    save_tiny_model,
    weights_of,
)
from headrace.tests.trainers.backends.experts.balance_reference import BalanceReference, row_weights, save_dots1
from headrace.tests.trainers.backends.experts.routed_rows import TEMPERATURE, random_routes, routed, spec_of
from headrace.trainers.backends.fsdp.backend import FsdpBackend
from headrace.trainers.losses.config import LossConfig

COEF = 0.4
RATE = 0.05
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": "packed"},
    "recomputed": {"recompute": "full"},
    "selective": {"recompute": "selective", "packing": "packed"},
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_dots1(tmp_path_factory.mktemp("dots1"))


def build(model: str, moe: dict[str, Any], **changes: Any) -> FsdpBackend:
    return FsdpBackend(backend_config(model, moe=moe, **changes), 0, 1)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return how far one - other is from `wanted`, as a share of the norm of `wanted`."""
    names = list(wanted)
    flat = [torch.cat([part[name].flatten() for name in names]) for part in (one, other, wanted)]
    return float(torch.linalg.norm(flat[0] - flat[1] - flat[2]) / torch.linalg.norm(flat[2]))


CASES = [(kind, layout) for kind in ("softmax", "sigmoid") for layout in LAYOUTS]
SHORT = (("softmax", "padded"), ("sigmoid", "selective"))
"""Cases of `make test`."""


@pytest.mark.parametrize(
    ("kind", "layout"), [case if case in SHORT else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_auxiliary_loss_has_the_gradient_of_its_formula(model: str, biased: str, kind: str, layout: str) -> None:
    folder, rows = (model, biased)[kind == "sigmoid"], random_rows(1, 7)
    micros = [micro_batch(rows[:3]), micro_batch([]), micro_batch(rows[3:])]
    with_loss = gradients_of(build(folder, {"aux_loss_coef": COEF}, **LAYOUTS[layout]), micros)
    without = gradients_of(build(folder, {}, **LAYOUTS[layout]), micros)
    reference = BalanceReference(folder, sigmoid=kind == "sigmoid")
    wanted = reference.gradient(rows, [COEF * weight for weight in row_weights(rows, "token")])
    assert difference(with_loss, without, wanted) < 2e-4
    assert all(float(wanted[name].abs().sum()) > 0 for name in wanted if name.endswith("mlp.gate.weight"))


@pytest.mark.parametrize(
    "aggregation", ["prompt", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sequence", "sequence_sum"))]
)
def test_rows_weigh_as_in_the_policy_loss(model: str, aggregation: Any) -> None:
    rows = random_rows(2, 8)
    norm = 10 if aggregation == "sequence_sum" else None
    loss = LossConfig(clip_low=0.1, clip_high=0.15, kl_coef=0.05, aggregation=aggregation, length_norm=norm)
    whole = micro_batch(rows)
    groups = whole.group_tokens
    assert groups is not None
    micros = [dataclasses.replace(micro_batch([row]), group_tokens=groups[i : i + 1]) for i, row in enumerate(rows)]
    with_loss = gradients_of(build(model, {"aux_loss_coef": COEF}, loss=loss), micros)
    without = gradients_of(build(model, {}, loss=loss), [whole])
    weights = [COEF * weight for weight in row_weights(rows, aggregation)]
    assert difference(with_loss, without, BalanceReference(model).gradient(rows, weights)) < 2e-4


def metrics_of(loads: np.ndarray, layers: Sequence[int]) -> dict[str, float]:
    imbalance = loads.max(1) / loads.mean(1)
    return {
        **{f"moe/load_imbalance_layer_{layer}": one for layer, one in zip(layers, imbalance, strict=True)},
        "moe/load_imbalance": imbalance.mean(),
        "moe/load_imbalance_max": imbalance.max(),
        "moe/idle_experts": float((loads == 0).sum()),
    }


def test_metrics_of_a_step(model: str) -> None:
    rows, reference = random_rows(3, 8), BalanceReference(model)
    chunks = [rows[:2], rows[2:]]
    loads = metrics_of(reference.loads(rows), spec_of(model).layers)
    quiet = run_step(build(model, {}), chunks)
    counted = run_step(build(model, {"load_metrics": True}), chunks)
    assert counted == pytest.approx({**quiet, **loads}, rel=1e-6), "counting changes nothing else"
    step = run_step(build(model, {"aux_loss_coef": 1e-9}, recompute="full"), chunks)
    weights, layers = row_weights(rows, "token"), 3
    losses = [
        weight * float(reference.row_loss(row).detach()) for row, weight in zip(rows, weights, strict=True) if weight
    ]
    assert step["moe/aux_loss"] == pytest.approx(sum(losses) / sum(weights) / layers, rel=1e-5)
    assert step["moe/aux_loss"] > 1 and {name: step[name] for name in loads} == pytest.approx(loads)
    assert not any(name.startswith("moe/") for name in quiet)


def biases_in(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tensors.items() if name.endswith("e_score_correction_bias")}


def test_biases_move_once_an_update_by_the_sign_of_the_load(biased: str, tmp_path: Path) -> None:
    rows, before = random_rows(4, 9), biases_in(AutoModelForCausalLM.from_pretrained(biased).state_dict())
    assert len(before) == 3
    loads = BalanceReference(biased, sigmoid=True).loads(rows)
    backend = build(biased, {"bias_update_rate": RATE}, recompute="full", lr=1e-9)
    step = run_step(backend, [rows[:4], rows[4:6], rows[6:]])
    wanted = {
        name: bias + RATE * torch.from_numpy(np.sign(load.mean() - load)).float()
        for (name, bias), load in zip(before.items(), loads, strict=True)
    }
    streamed = biases_in(weights_of(backend))
    assert {name: tensor.dtype for name, tensor in streamed.items()} == dict.fromkeys(wanted, torch.float32)
    for name, bias in wanted.items():
        torch.testing.assert_close(streamed[name], bias, rtol=0, atol=1e-6)
    assert step["moe/bias_max"] == pytest.approx(max(float(bias.abs().max()) for bias in wanted.values()), rel=1e-5)
    backend.save(str(tmp_path / "checkpoint"))
    backend.export_model(str(tmp_path / "exported"))
    exported = biases_in(AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict())
    resumed = build(biased, {"bias_update_rate": RATE})
    resumed.load(str(tmp_path / "checkpoint"))
    for found in (exported, biases_in(weights_of(resumed))):
        assert all(torch.equal(found[name], streamed[name]) for name in streamed)
    empty = [dataclasses.replace(row, mask=np.zeros_like(row.mask)) for row in rows]
    assert run_step(backend, [empty])["train/skipped"] == 1.0
    assert all(torch.equal(bias, streamed[name]) for name, bias in biases_in(weights_of(backend)).items())


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_replayed_experts_are_those_that_count(model: str, biased: str, kind: str) -> None:
    folder = (model, biased)[kind == "sigmoid"]
    rows, spec = random_rows(5, 6), spec_of(folder)
    routes = random_routes(rows, spec)
    on = RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=1)
    moe = {"aux_loss_coef": COEF, **({"bias_update_rate": RATE} if kind == "sigmoid" else {})}
    backend = build(folder, moe, router_replay=on, lr=1e-9)
    backend.begin_step(TEMPERATURE)
    backend.accumulate([routed(rows[:3], routes[:3], spec), routed(rows[3:], routes[3:], spec)], 2)
    step = backend.finish_step()
    reference = BalanceReference(folder, sigmoid=kind == "sigmoid")
    loads = reference.loads(rows, routes)
    wanted = metrics_of(loads, spec.layers)
    assert {name: step[name] for name in wanted} == pytest.approx(wanted), "the measured native pass counts nothing"
    own = metrics_of(reference.loads(rows), spec.layers)
    assert own != pytest.approx(wanted)
    if kind == "sigmoid":
        before = biases_in(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        after = biases_in(weights_of(backend))
        for (name, bias), load in zip(before.items(), loads, strict=True):
            moved = bias + RATE * torch.from_numpy(np.sign(load.mean() - load)).float()
            torch.testing.assert_close(after[name], moved, rtol=0, atol=1e-6)


def test_routes_of_biased_routers_replay_exactly(biased: str) -> None:
    """Own routes give the log-probs of no replay; others do not."""
    rows, spec = random_rows(6, 6), spec_of(biased)
    reference = BalanceReference(biased, sigmoid=True)
    own = []
    for row in rows:
        chosen = np.stack([index for _, index in reference.choices(row)], 1).astype(spec.numpy_dtype)
        own.append(np.concatenate([chosen, spec.missing(1)]))
    on = RouterReplayConfig(enabled=True, verify="forward", native_agreement_every=0)
    backend = build(biased, {}, router_replay=on)
    [plain] = build(biased, {}).logprobs([micro_batch(rows)], 1)
    [same] = backend.logprobs([routed(rows, own, spec)], 1)
    torch.testing.assert_close(same, plain, rtol=0, atol=1e-5)
    [others] = backend.logprobs([routed(rows, random_routes(rows, spec), spec)], 1)
    assert (others - plain).abs().max() > 1e-2


def test_what_cannot_be_balanced_is_refused(model: str, tmp_path: Path) -> None:
    dense = save_tiny_model(tmp_path)
    for key, got, expected in (("aux_loss_coef", 0.01, "0"), ("load_metrics", True, "false")):
        with pytest.raises(ValueError, match=f"trainer.moe.{key}: got {str(got).lower()}, expected {expected} for a "
                           "model of type 'qwen3' without experts"):  # fmt: skip
            build(dense, {key: got})
    with pytest.raises(ValueError, match="trainer.moe.bias_update_rate: got 0.01, expected 0 for a model of type "
                       "'qwen3_moe', because of the types"):  # fmt: skip
        build(model, {"bias_update_rate": 0.01})
    backend = build(model, {"aux_loss_coef": 0.01})
    backend.begin_step()
    with pytest.raises(ValueError, match="has no row_tokens, which trainer.moe.aux_loss_coef needs"):
        backend.accumulate([dataclasses.replace(micro_batch(random_rows(1, 2)), row_tokens=None)], 1)


def test_nothing_is_hooked_without_a_choice_or_replay(model: str, biased: str) -> None:
    for folder in (model, biased):
        for module in build(folder, {})._policy.model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks, module
